"""When keys were last used, written behind the requests: none waits for it, and none fails with it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy as sa

from relay.store import keys

if TYPE_CHECKING:
    from uuid import UUID

_log = logging.getLogger(__name__)


class LastUse:
    """Notes of one process. Each key is written at most once a minute by it; the statement sees to the other ones."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        #: Key to when it is to be noted again, by the monotonic clock.
        self._next: dict[UUID, float] = {}
        self._waiting: set[UUID] = set()
        self._writing = False

    def note(self, key_id: UUID) -> None:
        """Say that the key was used just now. Returns at once; what cannot be written is dropped."""
        now = time.monotonic()
        if self._next.get(key_id, 0.0) > now:
            return
        with self._lock:
            self._next[key_id] = now + keys.LAST_USE_EVERY_SECS
            self._waiting.add(key_id)
            if self._writing:
                return
            self._writing = True
        # A thread for the occasion, not a standing one: there is nothing to stop, and nothing that a fork would lose.
        threading.Thread(target=self._write, name="relay-last-use", daemon=True).start()

    def _write(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, set()
                if not batch:
                    self._writing = False
                    return
            try:
                with self._engine.begin() as connection:
                    keys.note_use(connection, sorted(batch))
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                _log.warning("the last use of API keys was not written", extra={"error": type(error).__name__})
