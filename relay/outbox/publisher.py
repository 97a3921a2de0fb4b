"""The outbox publisher: due rows that nobody has heard of become hints on the stream.

The mark is committed first, then the hint is added. The other order lets a hint overtake
its commit: the claim skips the locked row, and the delivery waits for the reconciler.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import redis
import sqlalchemy as sa

from relay import failpoints
from relay.store import announcements
from relay.store.announcements import START, Place
from relay.store.locks import advisory_lock

if TYPE_CHECKING:
    import threading

    from relay.outbox.stream import Stream
    from relay.store.announcements import Marked

log = logging.getLogger(__name__)

#: The lock under which one publisher of an installation works.
LOCK = "publisher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the publisher looks, in seconds."""

    #: Rows marked and announced at once.
    batch: int = 1000
    #: After a look that found some, but no full batch.
    busy_secs: float = 0.004
    #: After a look that found none.
    idle_secs: float = 0.015
    #: A look starts at the last due time seen less this: under a long transaction dead index entries pile up
    #: at the low end, and each look would walk them.
    margin_secs: float = 5.0
    #: How often a look starts at the beginning of time, for rows that became unannounced with an old due time.
    full_scan_secs: float = 1.0
    #: Between two tries for the lock, for Redis, or for Postgres.
    retry_secs: float = 0.5


class Publisher:
    """Announces while it holds the lock; otherwise waits for it."""

    def __init__(self, engine: sa.Engine, stream: Stream, *, pace: Pace | None = None) -> None:
        """Take the hot `engine` and the `stream`."""
        self._engine = engine
        self._stream = stream
        self._pace = pace or Pace()
        self._after = START
        self._next_full_scan = 0.0
        self._redis_answers = True
        #: How many hints this process has added.
        self.announced = 0
        #: Whether this process holds the lock.
        self.leading = False

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, through every outage of Postgres and Redis."""
        while not stop.is_set():
            try:
                with advisory_lock(self._engine, LOCK) as connection:
                    if connection is not None:
                        log.info("publishing")
                        self.leading = True
                        self._lead(connection, stop)
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                log.warning("the database does not answer the publisher", extra={"error": str(error).strip()})
            finally:
                self.leading = False
            stop.wait(self._pace.retry_secs)

    def run_once(self, connection: sa.Connection) -> int:
        """Announce one batch; return how many rows it held. Marks nothing while Redis does not answer."""
        if not self._redis_ready():
            return 0
        after = self._after
        if time.monotonic() >= self._next_full_scan:
            after = START
            self._next_full_scan = time.monotonic() + self._pace.full_scan_secs
        marked = announcements.mark(connection, after=after, limit=self._pace.batch)
        self._after = self._next_place(marked)
        if not marked.ids:
            return 0
        failpoints.hit("publish.after_mark")
        try:
            self._stream.announce(marked.ids)
        except redis.RedisError as error:
            self._lost_redis(error)
            announcements.unmark(connection, marked.ids)
            self._next_full_scan = 0.0
            return 0
        failpoints.hit("publish.after_announce")
        self.announced += len(marked.ids)
        return len(marked.ids)

    def _next_place(self, marked: Marked) -> Place:
        """Say where the next look begins."""
        if len(marked.ids) == self._pace.batch and marked.last is not None:
            # More wait behind these: go on there, and not through the entries that these leave behind.
            return marked.last
        seen = marked.last or self._after
        if seen.id == START.id:
            return seen
        # All caught up. A margin, for rows of transactions that began earlier and commit later.
        return Place(seen.due_at - timedelta(seconds=self._pace.margin_secs), START.id)

    def _lead(self, connection: sa.Connection, stop: threading.Event) -> None:
        # On the lock's own connection: losing the lock and losing the way to mark are one event.
        while not stop.is_set():
            count = self.run_once(connection)
            if count >= self._pace.batch:
                continue
            if not self._redis_answers:
                connection.exec_driver_sql("select 1")
                stop.wait(self._pace.retry_secs)
            else:
                # Not stop.wait: it costs as much as the look itself, and these are short.
                time.sleep(self._pace.busy_secs if count else self._pace.idle_secs)

    def _redis_ready(self) -> bool:
        if self._redis_answers:
            return True
        try:
            self._stream.ping()
        except redis.RedisError:
            return False
        log.info("Redis answers the publisher again")
        self._redis_answers = True
        return True

    def _lost_redis(self, error: redis.RedisError) -> None:
        log.warning("Redis does not answer the publisher; workers look for themselves", extra={"error": str(error)})
        self._redis_answers = False
