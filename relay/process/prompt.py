"""Runs a sweep soon after somebody rang for it, in a thread of its own, besides beat's ticks."""

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


class Prompt:
    """A bell. `sweep` returns whether it ran; it may be refused because it runs elsewhere."""

    def __init__(self, sweep: Callable[[], bool], *, name: str) -> None:
        self._sweep = sweep
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
            self._bell.wait()
            if self._stop.is_set():
                return
            self._bell.clear()
            for _ in range(TRIES):
                try:
                    if self._sweep() or self._stop.is_set():
                        break
                except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                    log.warning("a sweep met no database", extra={"error": str(error).strip()[:200]})
                self._stop.wait(AGAIN_SECS)
