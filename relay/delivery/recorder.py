"""Results become rows: one thread, one statement for up to 500 of them or a few milliseconds' worth.

Results wait here while the database does not answer, and are written when it does; the fence
decides which still count. A write whose COMMIT reply was lost is known by its own attempt rows.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy as sa

from relay import failpoints, metrics
from relay.core.model import AttemptClass, DeadReason, DeferReason, Status
from relay.core.outcome import judge
from relay.delivery.attempt import log_attempts, record_of
from relay.delivery.gate import Finished
from relay.delivery.tally import Tally
from relay.store import breakers, destinations, operational, results
from relay.store.engine import transaction
from relay.tracing import traceparent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from relay.delivery.aftermath import Aftermath
    from relay.delivery.attempt import Key, Record
    from relay.delivery.engine import Completed
    from relay.delivery.gate import Gate, Leased
    from relay.delivery.permits import Room, Slots
    from relay.store.operational import Notice
    from relay.store.results import UnsentRow
    from relay.tracing import Tracing

log = logging.getLogger(__name__)

#: Rows in one statement, and how long a first result waits for company, in seconds.
BATCH = 500
GATHER_SECS = 0.008
#: Seconds between two tries while the database does not answer.
RETRY_SECS = 0.25
_DATABASE_ERRORS = (sa.exc.SQLAlchemyError, psycopg.Error)


class _OutOfTimeError(Exception):
    """The process must end, and the database has not taken what waits."""


class Recorder:
    """Writes what became of leased deliveries, in batches, in a thread of its own."""

    def __init__(
        self,
        hot: sa.Engine,
        *,
        room: Room,
        slots: Slots,
        gate: Gate,
        aftermath: Aftermath,
        retry_after_max_secs: float,
        worker: str,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._hot = hot
        self._gate = gate
        self._aftermath = aftermath
        self._tally = Tally()
        self._room = room
        self._slots = slots
        self._retry_after_max_secs = retry_after_max_secs
        self._worker = worker
        self._finished: deque[Finished] = deque()
        self._unsent: deque[UnsentRow] = deque()
        self._arrived = threading.Event()
        self._stop_at: float | None = None
        self._writing = 0
        #: Given up at the end of the grace: their leases expire.
        self._unwritten = 0
        #: Since when (monotonic) results wait without one being written; None at rest.
        self._idle_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="relay-recorder", daemon=True)

    @property
    def waiting(self) -> int:
        """How many results are not written yet, those under way among them: 0 at rest."""
        return self.queued + self._writing + self._unwritten

    @property
    def queued(self) -> int:
        """How many results wait for their turn to be written: they pile up while the database is away."""
        return len(self._finished) + len(self._unsent)

    @property
    def oldest_secs(self) -> float:
        """Seconds that results have waited without one being written: more than a few mean that the database is away."""
        since = self._idle_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, finished: Sequence[Finished], unsent: Sequence[UnsentRow]) -> None:
        """Take results to write. Never blocks."""
        self._finished.extend(finished)
        self._unsent.extend(unsent)
        self._announce()

    def on_done(self, completed: Sequence[Completed]) -> None:
        """Take what the engine finished: return slots and room, and pass the results on. Runs in the engine's loop."""
        slots: list[tuple[UUID, UUID]] = []
        for done in completed:
            leased: Leased = done.request.key
            row = leased.row
            slots.append((row.endpoint_id, row.workspace_id))
            if done.observation is None or done.abandoned:
                self._settle_unsent(leased, abandoned=done.abandoned)
            else:
                self._finished.append(Finished(leased, done.observation))
        self._slots.give_back_all(slots)
        self._room.release(len(completed))
        self._announce()

    def release(self, leased: Sequence[Leased]) -> None:
        """Give back leases whose request never started (shutdown): slots, room and the attempt return."""
        self._slots.give_back_all([(one.row.endpoint_id, one.row.workspace_id) for one in leased])
        for one in leased:
            self._settle_unsent(one, abandoned=False)
        self._room.release(len(leased))
        self._announce()

    def stop(self, deadline: float) -> bool:
        """Write what waits until `deadline` (monotonic); return whether all of it was written."""
        self._stop_at = deadline
        self._arrived.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.waiting == 0

    def _settle_unsent(self, leased: Leased, *, abandoned: bool) -> None:
        if abandoned:
            # The receiver may have it: the attempt stays spent, and the reaper finds the lease.
            return
        self._unsent.append(self._gate.unsent(leased, wait=0.0))

    def _announce(self) -> None:
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        # Setting it takes its lock, and this runs for every few replies.
        if not self._arrived.is_set():
            self._arrived.set()

    def _run(self) -> None:
        while True:
            self._arrived.wait(0.5)
            if self._stop_at is not None and (self.waiting == 0 or time.monotonic() > self._stop_at):
                self._write_tally()
                return
            if self._stop_at is None and len(self._finished) + len(self._unsent) < BATCH:
                time.sleep(GATHER_SECS)
            self._arrived.clear()
            try:
                self._write_some()
            except Exception:  # the thread's own boundary: a bug must not end all recording
                log.exception("recording failed")
                time.sleep(RETRY_SECS)
            # In this order: what arrives after the look is announced by who brought it.
            self._idle_since = None
            if self._finished or self._unsent:
                self._announce()
            if self._tally.is_due():
                self._write_tally()

    def _write_some(self) -> None:
        finished = [self._finished.popleft() for _ in range(min(BATCH, len(self._finished)))]
        unsent = [self._unsent.popleft() for _ in range(min(BATCH, len(self._unsent)))]
        self._writing = len(finished) + len(unsent)
        try:
            if finished:
                self._write_finished(finished, unsent)
            self._writing = len(unsent)
            if unsent:
                self._write_unsent(unsent)
        except _OutOfTimeError:
            self._unwritten += self._writing
        finally:
            self._writing = 0

    # --- attempts ---

    def _write_finished(self, finished: list[Finished], unsent: list[UnsentRow]) -> None:
        records: list[Record] = []
        now = time.time()
        for one in finished:
            leased = one.leased
            wait_s = None
            if (chat := leased.destination.chat) is not None:
                one.observation, wait_s = chat.read(one.observation, now)
            verdict = one.verdict or judge(
                one.observation,
                retry_statuses=leased.destination.retry.statuses,
                now=now,
                retry_after_max_s=self._retry_after_max_secs,
                asked_s=wait_s,
            )
            if verdict.cls is AttemptClass.DEFERRED:
                log.error(
                    "a send failed here, not at the receiver",
                    extra={"delivery_id": str(leased.row.id), "error": one.observation.text},
                )
                unsent.append(self._gate.internal(leased))
                continue
            records.append(record_of(one, verdict, self._worker))
        self._writing = len(records) + len(unsent)
        if not records:
            return
        began = time.monotonic()
        if self._tracing is not None:
            for record in records:
                _end_span(record)
        failpoints.hit("record.before")
        stale = self._persist(records)
        persist_us = int((time.monotonic() - began) * 1e6)
        if self._tracing is not None:
            _trace_persist(self._tracing, records, stale, persist_us)
        self._count(records if not stale else [record for record in records if record.key not in stale], now)
        if stale:
            metrics.STALE_RESULTS.inc(len(stale))
        log_attempts(records, stale, persist_us)

    def _count(self, records: Sequence[Record], now: float) -> None:
        """Count what was recorded, a class at a time: that is quicker than an attempt at a time."""
        by_class: dict[AttemptClass, list[int]] = {}
        for record in records:
            endpoints = by_class.get(record.verdict.cls)
            if endpoints is None:
                endpoints = by_class[record.verdict.cls] = []
            endpoints.append(record.leased.row.endpoint_id.int)
            if record.row.reason is not None:
                metrics.dead(DeadReason(record.row.reason))
        for cls, endpoints in by_class.items():
            metrics.attempt(cls, len(endpoints))
            self._tally.add(cls, Counter(endpoints), at=now)
        metrics.DURATION.observe([record.row.total_us / 1e6 for record in records])
        # A delivery's id begins with its commit's time in milliseconds (RFC 9562, version 7).
        metrics.LATENCY.observe(
            [
                max(0.0, now - (record.row.delivery_id.int >> 80) / 1000)
                for record in records
                if record.row.number == 1 and record.row.http_status is not None
            ]
        )

    def _persist(self, records: Sequence[Record]) -> set[Key]:
        """Write until it is written; return the keys of those that the fence kept out.

        Raises _OutOfTimeError when it is time to leave and it was not written.
        """
        unsure = False
        while True:
            since = time.monotonic()
            try:
                with self._hot.connect() as connection:
                    stale = _record(connection, records, unsure=unsure)
                    self._aftermath.apply(
                        connection,
                        records if not stale else [record for record in records if record.key not in stale],
                        since=since,
                    )
                    return stale
            except psycopg.DataError:
                # A value that the database will not take: find the one row, so that it costs no other its record.
                if len(records) == 1:
                    log.exception(
                        "an attempt cannot be recorded", extra={"delivery_id": str(records[0].row.delivery_id)}
                    )
                    return {records[0].key}
                half = len(records) // 2
                return self._persist(records[:half]) | self._persist(records[half:])
            except _DATABASE_ERRORS as error:
                unsure = True
                self._wait_for_database(error)

    # --- rows that were not sent ---

    def _write_unsent(self, rows: list[UnsentRow]) -> None:
        paused = {row.endpoint_id for row in rows if row.deferred_reason == DeferReason.PAUSED}
        probes = {row.delivery_id: row.endpoint_id for row in rows if row.probe}
        while True:
            try:
                with self._hot.connect() as connection, transaction(connection):
                    disabled = destinations.lock_disabled(connection, list(paused)) if paused else set()
                    written = results.record_unsent(connection, [_unless_enabled(row, disabled) for row in rows])
                    if probes:
                        breakers.hand_back(connection, probes)
                    operational.tell(connection, [row.notice() for row in written if row.reason is not None])
                break
            except _DATABASE_ERRORS as error:
                # Fenced by the token, so a try whose reply was lost and one more give the attempt back once.
                self._wait_for_database(error)
        for row in written:
            if row.reason is not None:
                metrics.dead(DeadReason(row.reason))
            if row.deferred_reason is not None:
                metrics.deferred(DeferReason(row.deferred_reason), logged=row.logged)
        deferred = Counter([row.endpoint_id.int for row in written if row.deferred_reason is not None])
        self._tally.add(AttemptClass.DEFERRED, deferred, at=time.time())

    def _write_tally(self) -> None:
        try:
            with self._hot.connect() as connection:
                self._tally.write(connection)
        except _DATABASE_ERRORS as error:
            log.warning("an endpoint's counts were lost", extra={"error": str(error).strip()[:200]})

    def _wait_for_database(self, error: Exception) -> None:
        said = {"waiting": self.waiting, "error": str(error).strip()[:200]}
        if isinstance(error, psycopg.ProgrammingError):
            # No outage: a privilege, or a bug. Waiting is right all the same, as only that loses nothing.
            log.error("results cannot be written; they are kept and tried again", extra=said)
        else:
            log.warning("results wait for the database", extra=said)
        wait = RETRY_SECS * (0.5 + random.random())
        if self._stop_at is not None and time.monotonic() + wait > self._stop_at:
            raise _OutOfTimeError
        time.sleep(wait)


def _record(connection: sa.Connection, records: Sequence[Record], *, unsure: bool) -> set[Key]:
    """Write attempts, and tell of deliveries that are given up in the same transaction; return what the fence kept out."""
    if unsure:
        # The reply to an earlier try was lost: what stands in the log was written by it.
        written = results.recorded(connection, [record.row for record in records])
        records = [record for record in records if record.key not in written]
    rows = [record.row for record in records]
    if not rows:
        return set()
    dead = [record for record in records if record.row.next_status == Status.DEAD]
    if not dead:
        if results.record(connection, rows) == len(rows):
            return set()
        return {record.key for record in records} - results.recorded(connection, rows)
    with transaction(connection):
        stale: set[Key] = set()
        if results.record(connection, rows) != len(rows):
            stale = {record.key for record in records} - results.recorded(connection, rows)
        operational.tell(connection, [_death(record) for record in dead if record.key not in stale])
    return stale


def _end_span(record: Record) -> None:
    span = record.leased.span
    if span is not None:
        span.set_attribute("relay.outcome", record.verdict.cls.label)
        if record.row.http_status is not None:
            span.set_attribute("http.response.status_code", record.row.http_status)
        if record.row.code is not None:
            span.set_attribute("error.type", record.row.code)
        span.end()


def _trace_persist(tracing: Tracing, records: Sequence[Record], stale: set[Key], persist_us: int) -> None:
    began = time.time() - persist_us / 1e6
    for record in records:
        if (span := record.leased.span) is not None:
            about: dict[str, str | int] = {
                "relay.delivery_id": record.leased.row.id_text,
                "relay.stale": int(record.key in stale),
            }
            tracing.record("relay.persist", traceparent(span), about, began=began)


def _death(record: Record) -> Notice | None:
    row = record.leased.row
    return operational.death(
        workspace_id=row.workspace_id,
        endpoint_id=row.endpoint_id,
        delivery_id=row.id,
        event_id=row.event_id_text,
        event_type=row.event_type,
        reason=record.row.reason,
        attempt_count=row.attempt_count,
        code=record.row.code,
        status=record.row.http_status,
    )


def _unless_enabled(row: UnsentRow, disabled: set[UUID]) -> UnsentRow:
    """Pause a row only if its endpoint is still disabled; an enable since makes it due at once."""
    if row.deferred_reason != DeferReason.PAUSED or row.endpoint_id in disabled:
        return row
    return row._replace(deferred_reason=None, wait_secs=0.0)
