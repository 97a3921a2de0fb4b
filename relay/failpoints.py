"""Places at which a test can break a process on purpose. Inert, and next to free, unless RELAY_FAILPOINT names them."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

#: Seconds that the action `sleep` takes.
SLEEP_SECS = 5.0
#: Seconds within which the action `stop` has stopped the whole process.
STOP_SECS = 0.2

_armed: dict[str, str] = {}


class FailpointError(RuntimeError):
    """A failpoint was told to raise."""


def arm(points: Mapping[str, str]) -> None:
    """Arm failpoints: names to actions (`kill`, `stop`, `sleep` or `raise`)."""
    _armed.clear()
    _armed.update(points)


def hit(name: str, of: str | None = None) -> None:
    """Do what the failpoint `name` is armed with, if it is; or `name.of`, which one of many that pass here can arm."""
    if not _armed:
        return
    action = _armed.get(name) or _armed.get(f"{name}.{of}")
    if action is None:
        return
    log.warning("failpoint", extra={"failpoint": name, "action": action})
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        # The kernel stops the threads one after the other: without this one the caller would run on for a moment.
        time.sleep(STOP_SECS)
    elif action == "sleep":
        time.sleep(SLEEP_SECS)
    else:
        raise FailpointError(name)
