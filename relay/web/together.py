"""Group commit: events that arrive while others are being committed share the next statement (B-7).

Of the events that wait, one brings the thread that runs the statement for all: its request's own, or one that whoever
posts it keeps for that. So an event that comes alone goes at once, and the busier the process, the more of them share
the cost of a statement and of a wait for the disk.

Nobody pays for a neighbour. Where a statement fails, each of its events goes alone and meets its own error; so does an
event whose idempotency key is taken, since that may mean to wait for another transaction. The group's sessions wait
for locks for hardly longer than a commit takes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa

from relay import failpoints
from relay.store import events
from relay.store.engine import is_alive, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.store.events import NewEvent

#: Statements under way at once.
LEADERS: Final = 2
#: One is under way where it keeps up: what comes meanwhile waits, as a larger group costs less an event, and two would
#: wait for each other's locks. Another begins beside it once so many events wait, or it has taken so many seconds.
ENOUGH: Final = 16
SLOW_SECS: Final = 0.01
#: Events of one statement, and bytes of their payloads (or one larger event).
MAX_EVENTS: Final = 64
MAX_BYTES: Final = 1 << 20
#: Milliseconds that a group waits for a lock.
LOCK_TIMEOUT_MS: Final = 50
#: Seconds after which a connection is made anew: after a failover, those to the old primary are let go.
RENEW_SECS: Final = 300.0


@dataclass(slots=True, eq=False)
class Waiting(ABC):
    """An event, and what became of it."""

    event: NewEvent
    #: The 202's body. Once it is settled without one and without an error the event must go alone.
    answer: bytes | None = None
    error: BaseException | None = None
    #: When it was told to lead (monotonic).
    leads_since: float = 0.0

    @abstractmethod
    def take(self) -> bool:
        """Whether the event is still to be stored; asked once, just before."""

    @abstractmethod
    def lead(self) -> None:
        """Have a thread call Together.lead with this one, soon. Raises nothing, and does not wait."""

    @abstractmethod
    def settle(self) -> None:
        """Go on, as what became of the event is known. Raises nothing, and does not wait."""


@dataclass(slots=True, eq=False)
class Blocked(Waiting):
    """The event of a request whose thread waits. Its lock is released once, when it is settled or is to lead."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False

    def take(self) -> bool:
        """Always."""
        return True

    def lead(self) -> None:
        """Wake the thread, to lead."""
        self.lock.release()

    def settle(self) -> None:
        """Wake the thread, if it waits."""
        self.done = True
        if self.lock.locked():
            self.lock.release()


class Together:
    """The groups of one process."""

    def __init__(self, engine: sa.Engine) -> None:
        """`engine` is a hot one of `LEADERS` connections of its own."""
        self._engine = engine
        self._lock = threading.Lock()
        self._queue: deque[Waiting] = deque()
        #: When those that lead were told to, the first one first.
        self._leading: list[float] = []
        #: Connections that no leader uses, and when they were made.
        self._idle: list[tuple[sa.Connection, float]] = []
        sa.event.listen(engine, "engine_disposed", lambda _engine: self._forget())

    def ingest(self, event: NewEvent) -> bytes | None:
        """Commit the event with its deliveries, in company; return the 202's body.

        None means that nothing of it was stored and it must go alone (`events.take`). Raises as the database does where
        it is not known whether the event was stored.
        """
        own = Blocked(event)
        own.lock.acquire()
        leads = self._enter(own)
        if not leads:
            # Bounded by what a statement may take: whoever leads hands on, whatever becomes of its own.
            own.lock.acquire()
            leads = not own.done
        if leads:
            self.lead(own)
        if own.error is not None:
            raise own.error
        return own.answer

    def post(self, one: Waiting) -> None:
        """Have the event committed, in company, and settled. Returns at once."""
        if self._enter(one):
            one.lead()

    def lead(self, own: Waiting) -> None:
        """Commit the event with those that wait, and hand on. For the thread that `own` was told to bring."""
        group: list[Waiting] = []
        size = 0
        with self._lock:
            following: Waiting | None = own
            while following is not None:
                if following.take():
                    group.append(following)
                    size += len(following.event.payload)
                following = None
                if self._queue and len(group) < MAX_EVENTS:
                    size_then = size + len(self._queue[0].event.payload)
                    if not group or size_then <= MAX_BYTES:
                        following = self._queue.popleft()
        try:
            if group:
                self._commit(group)
        finally:
            heir: Waiting | None = None
            with self._lock:
                self._leading.remove(own.leads_since)
                if self._queue and self._wants_leader():
                    heir = self._queue.popleft()
                    self._appoint(heir)
            if heir is not None:
                heir.lead()
            for one in group:
                one.settle()

    def _enter(self, one: Waiting) -> bool:
        """Return whether the event is to lead, else have it wait."""
        with self._lock:
            if self._wants_leader():
                self._appoint(one)
                return True
            self._queue.append(one)
            return False

    def _wants_leader(self) -> bool:
        """Whether one more is to lead. With the lock held; whatever it returns, those that lead see to those that wait."""
        running = self._leading
        if not running:
            return True
        if len(running) >= LEADERS:
            return False
        return len(self._queue) >= ENOUGH or time.monotonic() - running[0] > SLOW_SECS

    def _appoint(self, one: Waiting) -> None:
        one.leads_since = time.monotonic()
        self._leading.append(one.leads_since)

    def _commit(self, group: Sequence[Waiting]) -> None:
        """Run the statement, and note each one's answer or error. Raises nothing."""
        connection: sa.Connection | None = None
        try:
            connection, since = self._take_connection()
            failpoints.hit("ingest.before_commit")
            answers = events.ingest(connection, [one.event for one in group])
            failpoints.hit("ingest.after_commit")
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


def _blame(group: Sequence[Waiting], error: BaseException) -> None:
    for one in group:
        one.error = error
