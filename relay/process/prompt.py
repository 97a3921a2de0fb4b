"""Runs a sweep soon after somebody rang for it, or work for it was seen, in a thread of its own, besides beat's ticks.

For work that is rare and should not wait. A tick through the broker costs five processes ten milliseconds, whether
there is work or not; to look for it costs one of them a tenth of one.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

#: Tries while another process runs the sweep, or the database is away, and the seconds between them.
TRIES = 5
AGAIN_SECS = 0.3
#: Seconds between two looks for work.
LOOK_SECS = 2.0


class Prompt:
    """A bell. `sweep` returns whether it ran; it may be refused because it runs elsewhere.

    `wanted` says whether there is work that nobody here rang for: cheaply, as each process of a role asks by itself.
    """

    def __init__(self, sweep: Callable[[], bool], *, name: str, wanted: Callable[[], bool] | None = None) -> None:
        self._sweep = sweep
        self._wanted = wanted
        self._bell = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def ring(self) -> None:
        """Have the sweep run. Never waits; what is lost with this process, beat's next tick does."""
        self._bell.set()

    def stop(self) -> None:
        """End the thread, without waiting for a run that is under way."""
        self._stop.set()
        self._bell.set()

    def _run(self) -> None:
        while True:
            rung = self._bell.wait(None if self._wanted is None else LOOK_SECS)
            if self._stop.is_set():
                return
            if rung:
                self._bell.clear()
            elif not self._sees_work():
                continue
            for _ in range(TRIES):
                try:
                    if self._sweep() or self._stop.is_set():
                        break
                except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                    log.warning("a sweep met no database", extra={"error": str(error).strip()[:200]})
                self._stop.wait(AGAIN_SECS)

    def _sees_work(self) -> bool:
        try:
            return self._wanted is not None and self._wanted()
        except (sa.exc.SQLAlchemyError, psycopg.Error):
            # Whoever needs the database more says so.
            log.debug("no look for work: the database does not answer")
            return False
