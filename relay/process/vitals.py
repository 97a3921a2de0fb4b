"""Whether a process gets on: threads that must live, and waits that must end.

A process whose port answers can still do nothing: a thread of it died, or stands before a database session that
answers no more. The first is for its supervisor, as only a new process mends it, so `/healthz` says it. The second goes
into its heartbeat, and by way of that into readiness: it passes by itself, and a restart would not hasten it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

#: Seconds of waiting that the heartbeat tells of. Each wait that has a bound of its own and is usual ends before.
STALLED_SECS = 10.0
#: Seconds after which what waits for nothing outside the process counts as dead.
STUCK_SECS = 60.0


class Vitals:
    """Watches one process between `watch` and `leave`; at other times all is well. Safe from any thread."""

    def __init__(
        self,
        *,
        threads: Collection[str] = (),
        waits: Mapping[str, Callable[[], float]] | None = None,
        inner: Collection[str] = (),
    ) -> None:
        """Take the names of the threads, and for each wait its seconds so far (0.0: none).

        `inner` names those of the waits that nothing outside the process can lengthen.
        """
        self._threads = threads
        self._waits = dict(waits or {})
        self._inner = inner
        self._watching = False

    def watch(self) -> None:
        """All threads have started: from now on they are missed."""
        self._watching = True

    def leave(self) -> None:
        """The process is about to end, and its threads with it."""
        self._watching = False

    def dead(self) -> list[str]:
        """Return what is gone for good: threads that ended, and inner waits over STUCK_SECS."""
        if not self._watching:
            return []
        alive = {thread.name for thread in threading.enumerate()}
        gone = [name for name in self._threads if name not in alive]
        return gone + [name for name in self._inner if self._waits[name]() > STUCK_SECS and name not in gone]

    def stalled(self) -> dict[str, float]:
        """Return the waits over STALLED_SECS, in seconds to a tenth."""
        waits = {name: round(secs(), 1) for name, secs in self._waits.items()} if self._watching else {}
        return {name: secs for name, secs in waits.items() if secs > STALLED_SECS}

    def details(self) -> dict[str, object]:
        """Return what a heartbeat says of it: `stalled` and `dead`, each only where there is any."""
        found: dict[str, object] = {"stalled": self.stalled(), "dead": self.dead()}
        return {name: what for name, what in found.items() if what}
