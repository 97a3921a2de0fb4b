"""A process's heartbeat in Postgres, beaten by a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy as sa

from relay import __version__
from relay.store import heartbeats
from relay.store.heartbeats import BEAT_SECS, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

log = logging.getLogger(__name__)


class Heart:
    """Beats until stopped. `pulse` runs with each beat and returns details for the row."""

    def __init__(
        self,
        engine: sa.Engine,
        *,
        role: str,
        process_id: UUID,
        pulse: Callable[[sa.Connection], Mapping[str, object]] | None = None,
        beat_secs: float = BEAT_SECS,
    ) -> None:
        self._engine = engine
        self._process = Process(
            process_id=process_id, role=role, host=socket.gethostname(), pid=os.getpid(), release=__version__
        )
        self._pulse = pulse
        self._beat_secs = beat_secs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-heart", daemon=True)

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self, deadline: float | None = None) -> None:
        """Stop, and take the row away: who leaves in good order is not missed.

        Waits a second at most, and not beyond `deadline` (monotonic).
        """
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic())))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._engine.connect() as connection:
                    heartbeats.beat(connection, self._process, self._pulse(connection) if self._pulse else {})
                    connection.commit()
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                log.warning("a heartbeat failed", extra={"error": str(error).strip()[:200]})
            except Exception:  # the thread's own boundary: a process that works must not be taken for dead
                log.exception("a heartbeat failed")
            self._stop.wait(self._beat_secs)
        try:
            with self._engine.connect() as connection:
                heartbeats.leave(connection, self._process)
                connection.commit()
        except (sa.exc.SQLAlchemyError, psycopg.Error):
            log.debug("the heartbeat's row stays; its age tells")
