"""Where a worker's deliveries come from: the stream's hints, or Postgres itself when hints do not come.

The reader reserves room, reads as many hints as there is room for and passes them on; now and
then while the stream is quiet it looks in Postgres for rows that are late. The poller brings
hints back that came to nothing for a moment, and looks in Postgres all the time while Redis is
away. The settler acknowledges. None of these threads waits on Celery's broker connection.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from relay.core.errors import Unavailable
from relay.delivery.dispatch import DATABASE_ERRORS, Dispatcher
from relay.store import announcements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import sqlalchemy as sa

    from relay.delivery.permits import Room
    from relay.delivery.recorder import Recorder
    from relay.outbox.stream import Hint, Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Waits, in seconds."""

    #: A blocking read's.
    block_secs: float = 1.0
    #: Between two looks in Postgres while the stream is quiet, and how late a row must be to be taken then.
    look_secs: float = 5.0
    look_late_secs: float = 2.0
    #: Between two turns of the poller and the settler with nothing to do: they are woken where there is.
    rest_secs: float = 2.0
    #: Between two looks that found nothing, while Redis does not answer.
    away_secs: float = 0.1
    #: Between two tries of Redis, and of Postgres after a claim failed.
    retry_secs: float = 0.5
    #: Where results have waited for so long, or a claim has, the database is asked before anything more is taken.
    hold_secs: float = 3.0
    #: Between two runs of the reaper's stand-in, while no hints come or Redis is away: nor may beat's tasks then.
    stand_in_secs: float = 5.0
    #: A hint whose row was locked comes back after the first of these, then twice as long, up to the second.
    again_first_secs: float = 0.02
    again_longest_secs: float = 1.0


class Batch:
    """Hints on their way to a claim, and the room reserved for them."""

    def __init__(self, intake: Intake, hints: Sequence[Hint]) -> None:
        self.ids = [hint.delivery_id for hint in hints]
        self._intake = intake
        self._entries = [hint.entry for hint in hints]
        self._lock = threading.Lock()
        self._room_given = False

    def dispatch(self) -> int:
        """Claim and send; return how many sends began. From here on the room is the dispatcher's to give back."""
        with self._lock:
            assert not self._room_given, "a batch is dispatched once"
            self._room_given = True
        return self._intake.dispatch(self.ids)

    def acknowledge(self) -> None:
        """Settle the hints: their leases are committed, or there was nothing to lease."""
        self._return_room()
        self._intake.settle(self._entries)

    def abandon(self) -> None:
        """Leave the hints unsettled: the claim failed, or never came to be."""
        self._return_room()

    def _return_room(self) -> None:
        with self._lock:
            if self._room_given:
                return
            self._room_given = True
        self._intake.give_back_room(len(self.ids))


class Intake:
    """Feeds a dispatcher. Made and started once for a process."""

    def __init__(
        self,
        hot: sa.Engine,
        *,
        stream: Stream,
        settler: Stream,
        dispatcher: Dispatcher,
        recorder: Recorder,
        room: Room,
        batch: int,
        stand_in: Callable[[bool], None],
        rhythm: Rhythm | None = None,
    ) -> None:
        """Take two views of the stream, as a blocking read must not hold up acknowledgements. `stand_in` runs the
        reaper where beat's tasks do not come, and is told whether Redis is away."""
        self._hot = hot
        self._stream = stream
        self._settler = settler
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._room = room
        self._batch = batch
        self._stand_in = stand_in
        self._rhythm = rhythm or Rhythm()
        self._stop = threading.Event()
        self._deliver: Callable[[Batch], None] = self.deliver_directly
        #: Whether the last try of Redis was answered; unknown (None) before the first.
        self.redis_answers: bool | None = None
        self._claims_fail = threading.Event()
        #: Claims under way: when (monotonic) each began.
        self._claims: dict[object, float] = {}
        self._next_probe = 0.0
        self._turns = dict.fromkeys(("reader", "poller", "settler"), time.monotonic())
        self._reread = False
        self._next_look = time.monotonic() + self._rhythm.look_secs
        self._next_stand_in = 0.0
        self._later = _Later(self._rhythm)
        self._settled: list[bytes] = []
        self._settled_lock = threading.Lock()
        self._to_settle = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for loop, name in (
                (self._read, "relay-reader"),
                (self._poll, "relay-poller"),
                (self._settle_loop, "relay-settler"),
            )
        ]

    def start(self, deliver: Callable[[Batch], None] | None = None) -> None:
        """Start reading. `deliver` takes each batch of hints on (through Celery); without it they are claimed here."""
        if deliver is not None:
            self._deliver = deliver
        for thread in self._threads:
            thread.start()

    @property
    def claim_secs(self) -> float:
        """Seconds that the oldest claim under way has taken so far; 0.0 where there is none."""
        began = min(list(self._claims.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def turn_secs(self, thread: str) -> float:
        """Seconds since `thread` (reader, poller or settler) last began a turn of its loop."""
        return time.monotonic() - self._turns[thread]

    def stop_reading(self) -> None:
        """Take no more hints. Safe to call from a signal handler: it only sets a flag."""
        self._stop.set()

    def join(self, deadline: float) -> None:
        """Wait until the threads have ended, or until `deadline` (monotonic): a frozen Redis may hold one."""
        self._stop.set()
        self._to_settle.set()
        self._later.wake()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def hint_again(self, ids: Sequence[UUID]) -> None:
        """Bring `ids` back after a pause that grows from try to try."""
        self._later.add(ids)

    # --- for batches ---

    def dispatch(self, ids: Sequence[UUID]) -> int:
        """Claim and send `ids`, and notice whether the database let it, and how long it takes."""
        claim = object()
        self._claims[claim] = time.monotonic()
        try:
            sends = self._dispatcher.dispatch(ids)
        except DATABASE_ERRORS:
            self._reread = True
            self._claims_fail.set()
            raise
        finally:
            del self._claims[claim]
        self._claims_fail.clear()
        return sends

    def give_back_room(self, count: int) -> None:
        """Return room of hints that became no send."""
        self._room.release(count)

    def settle(self, entries: Sequence[bytes]) -> None:
        """Acknowledge soon, in company. Never waits for Redis."""
        with self._settled_lock:
            self._settled.extend(entries)
        self._to_settle.set()

    def deliver_directly(self, batch: Batch) -> None:
        """Claim and send a batch in the calling thread, without Celery."""
        try:
            batch.dispatch()
        except (*DATABASE_ERRORS, Unavailable) as error:
            batch.abandon()
            log.warning("a claim failed", extra={"error": str(error).strip()[:200]})
        else:
            batch.acknowledge()

    # --- the reader ---

    def _read(self) -> None:
        while not self._stop.is_set():
            self._turns["reader"] = time.monotonic()
            if not self._may_read() or not self._redis_may_answer():
                continue
            reserved = self._room.reserve(self._batch, timeout=0.25)
            if not reserved:
                continue
            hints: list[Hint] = []
            kept = 0
            try:
                hints = self._next_hints(reserved)
                if not hints and time.monotonic() >= self._next_look:
                    # With the room in hand, which may be all there is: the poller would seldom get any.
                    kept = reserved
            except redis.RedisError as error:
                self._redis_failed(error)
            finally:
                self._room.release(reserved - max(kept, len(hints)))
            if hints:
                self._pass_on(Batch(self, hints))
            elif kept:
                if not self._look(kept, late_secs=self._rhythm.look_late_secs):
                    # Where a look finds rows, hints do not come (publisher dead, Redis full): look again at once.
                    self._next_look = time.monotonic() + self._rhythm.look_secs
                self._stand_in_at_times(away=False)

    def _next_hints(self, count: int) -> list[Hint]:
        if not self.redis_answers:
            self._stream.ensure_group()
        if self._reread:
            # A claim failed: what was read then is still ours, unsettled, and was not sent.
            hints = self._stream.read_unacknowledged(count)
            self._reread = len(hints) == count
        else:
            hints = self._stream.read(count, block_ms=int(self._rhythm.block_secs * 1000))
        if not self.redis_answers:
            log.info("reading hints from the stream")
            self.redis_answers = True
        return hints

    def _pass_on(self, batch: Batch) -> None:
        try:
            self._deliver(batch)
        except Exception:  # whatever Celery's inside raises, the room must come back and the reader live on
            log.exception("a batch could not be handed on")
            batch.abandon()
            self._reread = True
            self._stop.wait(self._rhythm.retry_secs)

    def _may_read(self) -> bool:
        """Hold off while results pile up or claims fail: hints read now would only wait here, leased to nobody."""
        if self._recorder.queued > self._room.size:
            self._stop.wait(0.005)
            return False
        if self._recorder.oldest_secs > self._rhythm.hold_secs:
            self._stop.wait(0.1)
            return False
        if self._claims_fail.is_set():
            return self._database_answers()
        return self._claims_end() or self._database_answers()

    def _claims_end(self) -> bool:
        """Whether no claim is stuck, or one is and the database answered another connection a moment ago."""
        return self.claim_secs <= self._rhythm.hold_secs or time.monotonic() < self._next_probe

    def _database_answers(self) -> bool:
        # One that answers may still refuse claims (read-only, locked): without the pause that would be a storm.
        self._stop.wait(self._rhythm.retry_secs)
        try:
            with self._hot.connect() as connection:
                connection.exec_driver_sql("select 1")
        except DATABASE_ERRORS:
            return False
        self._claims_fail.clear()
        self._next_probe = time.monotonic() + self._rhythm.retry_secs
        return True

    def _redis_may_answer(self) -> bool:
        """While Redis is away, ask it with no room in hand: the poller needs all there is."""
        if self.redis_answers is not False:
            return True
        # Also between a ping that is answered and a read that is not, or the two would chase each other.
        self._stop.wait(self._rhythm.retry_secs)
        try:
            self._stream.ping()
        except redis.RedisError:
            return False
        return True

    def _redis_failed(self, error: redis.RedisError) -> None:
        if self.redis_answers is not False:
            log.warning("Redis does not answer: looking in Postgres instead", extra={"error": str(error)[:200]})
        self.redis_answers = False
        self._later.wake()

    # --- the poller ---

    def _poll(self) -> None:
        rhythm = self._rhythm
        while not self._stop.is_set():
            self._turns["poller"] = time.monotonic()
            away = self.redis_answers is False
            due = self._later.wait(rhythm.away_secs if away else rhythm.rest_secs)
            if due:
                self._bring_back(due)
            if not away or self._stop.is_set() or not self._may_read():
                continue
            while self._look_while_away() and not self._stop.is_set() and self._may_read():
                self._turns["poller"] = time.monotonic()
            self._stand_in_at_times(away=True)

    def _bring_back(self, ids: Sequence[UUID]) -> None:
        if self.redis_answers is False:
            # Their rows are due: the look that follows finds them.
            return
        try:
            self._settler.announce(ids)
        except redis.RedisError:
            self._later.add(ids)

    def _look_while_away(self) -> int:
        reserved = self._room.try_reserve(self._batch)
        if not reserved:
            self._stop.wait(0.01)
            return 0
        return self._look(reserved, late_secs=0.0)

    def _look(self, reserved: int, *, late_secs: float) -> int:
        """Take due rows from Postgres, as many as there is room reserved for; return how many sends began."""
        ids: list[UUID] = []
        try:
            with self._hot.connect() as connection:
                ids = announcements.due_ids(connection, late_secs=late_secs, limit=reserved)
        except DATABASE_ERRORS as error:
            self._claims_fail.set()
            log.warning("a look for due rows failed", extra={"error": str(error).strip()[:200]})
        finally:
            self._room.release(reserved - len(ids))
        if not ids:
            return 0
        try:
            return self.dispatch(ids)
        except (*DATABASE_ERRORS, Unavailable) as error:
            log.warning("a claim failed", extra={"error": str(error).strip()[:200]})
            return 0

    def _stand_in_at_times(self, *, away: bool) -> None:
        if time.monotonic() < self._next_stand_in:
            return
        self._next_stand_in = time.monotonic() + self._rhythm.stand_in_secs
        try:
            self._stand_in(away)
        except DATABASE_ERRORS as error:
            log.warning("reaping in beat's place failed", extra={"error": str(error).strip()[:200]})

    # --- the settler ---

    def _settle_loop(self) -> None:
        while not (self._stop.is_set() and not self._settled):
            self._turns["settler"] = time.monotonic()
            self._to_settle.wait(self._rhythm.rest_secs)
            self._to_settle.clear()
            with self._settled_lock:
                entries, self._settled = self._settled, []
            for start in range(0, len(entries), 1000):
                try:
                    self._settler.acknowledge(entries[start : start + 1000])
                except redis.RedisError as error:
                    # They stay pending and are reclaimed; their rows are leased or done, so nothing is sent twice.
                    log.warning("hints could not be settled", extra={"error": str(error)[:200]})
                    break

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop again should it raise: a worker that is alive and reads nothing would be worse."""
        while not self._stop.is_set():
            try:
                loop()
            except Exception:  # the thread's own boundary
                log.exception("a thread of the intake failed and goes on")
                self._stop.wait(self._rhythm.retry_secs)


class _Later:
    """Ids to come back to after a pause, which grows while they keep coming."""

    def __init__(self, rhythm: Rhythm) -> None:
        self._rhythm = rhythm
        self._heap: list[tuple[float, UUID]] = []
        #: What the heap holds: an id that came by many hints comes back as one.
        self._held: set[UUID] = set()
        #: The last pause of an id, and when it may be forgotten.
        self._pauses: dict[UUID, tuple[float, float]] = {}
        self._changed = threading.Condition()

    def add(self, ids: Sequence[UUID]) -> None:
        now = time.monotonic()
        with self._changed:
            for id_ in ids:
                if id_ in self._held:
                    continue
                self._held.add(id_)
                before = self._pauses.get(id_)
                pause = self._rhythm.again_first_secs
                if before is not None:
                    pause = min(before[0] * 2, self._rhythm.again_longest_secs)
                self._pauses[id_] = (pause, now + 10 * self._rhythm.again_longest_secs)
                heapq.heappush(self._heap, (now + pause, id_))
            self._changed.notify()

    def wait(self, timeout: float) -> list[UUID]:
        """Wait up to `timeout` seconds for ids to be due; return those that are."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                now = time.monotonic()
                until = min(deadline, self._heap[0][0]) if self._heap else deadline
                if until <= now:
                    break
                if self._changed.wait(until - now) and not self._heap:
                    break
            due: list[UUID] = []
            while self._heap and self._heap[0][0] <= now:
                due.append(heapq.heappop(self._heap)[1])
            self._held.difference_update(due)
            for id_ in [id_ for id_, (_, forget) in self._pauses.items() if forget <= now]:
                del self._pauses[id_]
            return due

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
