"""Group commit: events that arrive while others are being committed share the next statement (B-7).

There are no threads for it: of the requests that wait, one runs the statement for all. So an event that comes alone
goes at once, and the busier the process, the more of them share the cost of a statement and of a wait for the disk.

Nobody pays for a neighbour. Where a statement fails, each of its events goes alone and meets its own error; so does an
event whose idempotency key is taken, since that may mean to wait for another transaction. The group's sessions wait
for locks for hardly longer than a commit takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa

from relay.store import events
from relay.store.engine import is_alive, run

if TYPE_CHECKING:
    from relay.store.events import NewEvent

#: Statements under way at once: while one waits for the disk, the next is made.
LEADERS: Final = 2
#: Events of one statement, and bytes of their payloads (or one larger event).
MAX_EVENTS: Final = 64
MAX_BYTES: Final = 1 << 20
#: Milliseconds that a group waits for a lock.
LOCK_TIMEOUT_MS: Final = 50
#: Seconds after which a connection is made anew: after a failover, those to the old primary are let go.
RENEW_SECS: Final = 300.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request's event, and what became of it. Its lock is released once, when that is known or it is to lead."""

    event: NewEvent
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The 202's body; None with `done`: the event must go alone.
    answer: bytes | None = None
    error: BaseException | None = None
    done: bool = False


class Together:
    """The groups of one process."""

    def __init__(self, engine: sa.Engine) -> None:
        """`engine` is a hot one of `LEADERS` connections of its own."""
        self._engine = engine
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._leading = 0
        #: Connections that no leader uses, and when they were made.
        self._idle: list[tuple[sa.Connection, float]] = []
        sa.event.listen(engine, "engine_disposed", lambda _engine: self._forget())

    def ingest(self, event: NewEvent) -> bytes | None:
        """Commit the event with its deliveries, in company; return the 202's body.

        None means that nothing of it was stored and it must go alone (`events.take`). Raises as the database does where
        it is not known whether the event was stored.
        """
        own = _Waiting(event)
        own.lock.acquire()
        with self._lock:
            leads = self._leading < LEADERS
            if leads:
                self._leading += 1
            else:
                self._queue.append(own)
        if not leads:
            # Bounded by what a statement may take: whoever leads hands on, whatever becomes of its own.
            own.lock.acquire()
            leads = not own.done
        if leads:
            self._lead(own)
        if own.error is not None:
            raise own.error
        return own.answer

    def _lead(self, own: _Waiting) -> None:
        group = [own]
        size = len(own.event.payload)
        with self._lock:
            while self._queue and len(group) < MAX_EVENTS:
                size += len(self._queue[0].event.payload)
                if size > MAX_BYTES:
                    break
                group.append(self._queue.popleft())
        try:
            self._commit(group)
        finally:
            with self._lock:
                heir = self._queue.popleft() if self._queue else None
                if heir is None:
                    self._leading -= 1
            if heir is not None:
                heir.lock.release()
            for one in group:
                one.done = True
                if one is not own:
                    one.lock.release()

    def _commit(self, group: list[_Waiting]) -> None:
        """Run the statement, and note each one's answer or error. Raises nothing."""
        connection: sa.Connection | None = None
        try:
            connection, since = self._take_connection()
            answers = events.ingest(connection, [one.event for one in group])
        except psycopg.Error as error:
            # With a SQLSTATE on a live connection the server has undone the statement, and each can go alone. Without,
            # nobody knows what it did.
            if connection is None or connection.invalidated or error.sqlstate is None or not is_alive(connection):
                _blame(group, error)
            self._drop(connection)
        except BaseException as error:  # noqa: BLE001 - the boundary: each request raises it for itself
            _blame(group, error)
            self._drop(connection)
        else:
            for one, answer in zip(group, answers, strict=True):
                one.answer = answer
            self._give_back(connection, since)

    def _take_connection(self) -> tuple[sa.Connection, float]:
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            if time.monotonic() - kept[1] < RENEW_SECS and is_alive(kept[0]):
                return kept
            self._drop(kept[0])
        connection = self._engine.connect()
        try:
            run(connection, f"set lock_timeout = {LOCK_TIMEOUT_MS}")
        except BaseException:
            self._drop(connection)
            raise
        return connection, time.monotonic()

    def _give_back(self, connection: sa.Connection, since: float) -> None:
        with self._lock:
            self._idle.append((connection, since))

    def _forget(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            self._drop(connection)

    @staticmethod
    def _drop(connection: sa.Connection | None) -> None:
        if connection is not None:
            if not connection.invalidated:
                connection.invalidate()
            connection.close()


def _blame(group: list[_Waiting], error: BaseException) -> None:
    for one in group:
        one.error = error
