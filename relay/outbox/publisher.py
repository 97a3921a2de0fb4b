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
from relay.store import announcements, traces
from relay.store.announcements import START, Place
from relay.store.locks import advisory_lock
from relay.store.lookout import Lookout

if TYPE_CHECKING:
    import threading

    from relay.outbox.stream import Stream
    from relay.store.announcements import Marked
    from relay.tracing import Tracing

log = logging.getLogger(__name__)

#: The lock under which one publisher of an installation works.
LOCK = "publisher"
#: Seconds after which the server ends the session of a leader that asks for nothing: it asks many times a second, so
#: its process is frozen or its machine gone, and its lock is for another.
LEADERS_SILENCE_SECS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the publisher looks, in seconds."""

    #: Rows marked and announced at once.
    batch: int = 1000
    #: After a look that found some, but no full batch.
    busy_secs: float = 0.004
    #: After a look that found none.
    idle_secs: float = 0.01
    #: After a look that found none, once none was found for `quiet_after_secs`.
    quiet_secs: float = 0.02
    quiet_after_secs: float = 2.0
    #: A look starts at the last due time seen less this: under a long transaction dead index entries pile up
    #: at the low end, and each look would walk them.
    margin_secs: float = 5.0
    #: How often a look starts at the beginning of time, for rows that became unannounced with an old due time.
    full_scan_secs: float = 1.0
    #: Between two tries for the lock, for Redis, or for Postgres.
    retry_secs: float = 0.5
    #: How late a row that nobody announced must be for a publisher that waits for the lock to speak of it, and how
    #: often it looks.
    complain_secs: float = 10.0


class Publisher:
    """Announces while it holds the lock; otherwise waits for it."""

    def __init__(
        self, engine: sa.Engine, stream: Stream, *, pace: Pace | None = None, tracing: Tracing | None = None
    ) -> None:
        """Take the hot `engine` and the `stream`."""
        self._tracing = tracing
        self._engine = engine
        self._stream = stream
        self._pace = pace or Pace()
        self._after = START
        self._next_full_scan = 0.0
        self._redis_answers = True
        #: Monotonic times: when a look last ended well, or the first is awaited since; when one last found rows; when
        #: whoever waits for the lock next looks at what is late.
        self._looked_at = time.monotonic()
        self._found_at = 0.0
        #: Whether the last mark found any.
        self._busy = False
        self._next_complaint = 0.0
        #: How many hints this process has added.
        self.announced = 0
        #: Whether this process holds the lock.
        self.leading = False

    @property
    def looked_secs(self) -> float:
        """Seconds since this process last looked and got an answer, or since it was made; it grows while another leads."""
        return time.monotonic() - self._looked_at

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, through every outage of Postgres and Redis."""
        while not stop.is_set():
            try:
                with advisory_lock(self._engine, LOCK, silence_secs=LEADERS_SILENCE_SECS) as connection:
                    if connection is not None:
                        log.info("publishing")
                        self.leading = True
                        self._lead(connection, stop)
                if connection is None:
                    self._wait_in_line()
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                log.warning("the database does not answer the publisher", extra={"error": str(error).strip()})
            finally:
                self.leading = False
            stop.wait(self._pace.retry_secs)

    def run_once(self, connection: sa.Connection, lookout: Lookout | None = None) -> int:
        """Announce one batch; return how many rows it held. Marks nothing while Redis does not answer.

        With a `lookout` it first asks whether there is any, unless the last time there was.
        """
        if not self._redis_ready():
            return 0
        after = self._after
        now = time.monotonic()
        if now >= self._next_full_scan:
            after = START
            self._next_full_scan = now + self._pace.full_scan_secs
        # After a full batch there is more, most likely, and the place is one among rows of the same due time.
        if lookout is not None and after.id == START.id and not self._busy and not lookout.any_due(after.due_at):
            return 0
        marked = announcements.mark(connection, after=after, limit=self._pace.batch)
        self._after = self._next_place(marked)
        self._busy = bool(marked.ids)
        if not marked.ids:
            return 0
        self._found_at = now
        failpoints.hit("publish.after_mark")
        try:
            self._stream.announce(marked.ids)
        except redis.RedisError as error:
            self._lost_redis(error)
            announcements.unmark(connection, marked.ids)
            self._next_full_scan = 0.0
            return 0
        failpoints.hit("publish.after_announce")
        if self._tracing is not None:
            began = time.time() - (time.monotonic() - now)
            for id_, parent in traces.of(connection, marked.ids).items():
                self._tracing.record("relay.publish", parent, {"relay.delivery_id": str(id_)}, began=began)
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
        pace = self._pace
        lookout = Lookout(connection)
        while not stop.is_set():
            count = self.run_once(connection, lookout)
            self._looked_at = time.monotonic()
            if count >= pace.batch:
                continue
            if not self._redis_answers:
                connection.exec_driver_sql("select 1")
                stop.wait(pace.retry_secs)
                continue
            pause = pace.busy_secs if count else pace.idle_secs
            if self._looked_at - self._found_at > pace.quiet_after_secs:
                pause = pace.quiet_secs
            # Not stop.wait: it costs as much as the look itself, and these are short.
            time.sleep(pause)

    def _wait_in_line(self) -> None:
        """Say so where another holds the lock and does not do the work."""
        now = time.monotonic()
        if now < self._next_complaint:
            return
        self._next_complaint = now + self._pace.complain_secs
        with self._engine.connect() as connection:
            late = announcements.unannounced_secs(connection)
        if late > self._pace.complain_secs:
            log.warning(
                "another publisher holds the lock, and due rows wait; workers look for themselves",
                extra={"late_s": round(late, 1)},
            )

    def _redis_ready(self) -> bool:
        if self._redis_answers:
            return True
        try:
            self._stream.try_write()
        except redis.RedisError:
            return False
        log.info("Redis takes hints again")
        self._redis_answers = True
        return True

    def _lost_redis(self, error: redis.RedisError) -> None:
        log.warning("Redis takes no hints; workers look for themselves", extra={"error": str(error)})
        self._redis_answers = False
