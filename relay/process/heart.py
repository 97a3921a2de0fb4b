"""A process's heartbeat in Postgres, beaten by a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import threading
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
    ) -> None:
        self._engine = engine
        self._process = Process(
            process_id=process_id, role=role, host=socket.gethostname(), pid=os.getpid(), release=__version__
        )
        self._pulse = pulse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-heart", daemon=True)

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and take the row away: who leaves in good order is not missed. Waits a second at most."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._engine.connect() as connection:
                    heartbeats.beat(connection, self._process, self._pulse(connection) if self._pulse else {})
                    connection.commit()
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                log.warning("a heartbeat failed", extra={"error": str(error).strip()[:200]})
            self._stop.wait(BEAT_SECS)
        try:
            with self._engine.connect() as connection:
                heartbeats.leave(connection, self._process)
                connection.commit()
        except (sa.exc.SQLAlchemyError, psycopg.Error):
            log.debug("the heartbeat's row stays; its age tells")
