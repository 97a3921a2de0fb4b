"""Results become rows: one thread, one statement for up to 500 of them or a few milliseconds' worth.

Results wait here while the database does not answer, and are written when it does; the fence
decides which still count. A write whose COMMIT reply was lost is known by its own attempt rows.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy as sa

from relay import failpoints, metrics
from relay.core.backoff import RetryPolicy
from relay.core.decision import Dead, Retry, decide
from relay.core.model import AttemptClass, DeferReason, Status
from relay.core.observation import Fault
from relay.core.outcome import Outcome, judge
from relay.delivery.aftermath import Result
from relay.delivery.gate import Finished
from relay.delivery.tally import Tally
from relay.store import breakers, destinations, results
from relay.store.engine import transaction
from relay.store.results import AttemptRow, UnsentRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from relay.delivery.aftermath import Aftermath
    from relay.delivery.engine import Completed
    from relay.delivery.gate import Gate, Leased
    from relay.delivery.permits import Room, Slots

log = logging.getLogger(__name__)
#: One line a delivery attempt: the log that an operator greps by delivery id.
attempts_log = logging.getLogger("relay.attempts")

#: Rows in one statement, and how long a first result waits for company, in seconds.
BATCH = 500
GATHER_SECS = 0.008
#: Seconds between two tries while the database does not answer.
RETRY_SECS = 0.25
#: Characters kept of a reply's header block.
REPLY_HEADERS = 4096

#: Microseconds: the log's columns hold no more (36 minutes), a time-out may.
LONGEST_US = 2**31 - 1

_DATABASE_ERRORS = (sa.exc.SQLAlchemyError, psycopg.Error)


#: Of tests: what fails is not tried again.
ONCE = RetryPolicy(max_attempts=1)

#: A result: its delivery and the lease that it was made under.
_Key = tuple["UUID", "UUID"]


class _OutOfTimeError(Exception):
    """The process must end, and the database has not taken what waits."""


@dataclass(slots=True, kw_only=True)
class _Record:
    """A judged attempt, ready to be written."""

    row: AttemptRow
    leased: Leased
    verdict: Outcome
    #: Seconds for which the receiver wants its endpoint held.
    hold_s: float | None

    @property
    def key(self) -> _Key:
        return (self.row.delivery_id, self.row.lease_token)


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
    ) -> None:
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
        self._slots.give_back_all(
            [(done.request.key.row.endpoint_id, done.request.key.row.workspace_id) for done in completed]
        )
        for done in completed:
            leased: Leased = done.request.key
            if done.observation is None or done.abandoned:
                self._settle_unsent(leased, abandoned=done.abandoned)
            else:
                self._finished.append(Finished(leased=leased, observation=done.observation))
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
        records: list[_Record] = []
        now = time.time()
        for one in finished:
            leased = one.leased
            verdict = one.verdict or judge(
                one.observation,
                retry_statuses=leased.destination.retry.statuses,
                now=now,
                retry_after_max_s=self._retry_after_max_secs,
            )
            if verdict.cls is AttemptClass.DEFERRED:
                log.error(
                    "a send failed here, not at the receiver",
                    extra={"delivery_id": str(leased.row.id), "error": one.observation.text},
                )
                unsent.append(self._gate.internal(leased))
                continue
            records.append(_record_of(one, verdict, self._worker))
        self._writing = len(records) + len(unsent)
        if not records:
            return
        began = time.monotonic()
        failpoints.hit("record.before")
        stale = self._persist(records)
        persist_us = int((time.monotonic() - began) * 1e6)
        for record in records:
            if record.key not in stale:
                cls = record.verdict.cls
                metrics.attempt(cls)
                self._tally.add(record.leased.row.endpoint_id, cls, at=now)
        if stale:
            metrics.STALE_RESULTS.inc(len(stale))
        _log_attempts(records, stale, persist_us)

    def _persist(self, records: Sequence[_Record]) -> set[_Key]:
        """Write until it is written; return the keys of those that the fence kept out.

        Raises _OutOfTimeError when it is time to leave and it was not written.
        """
        unsure = False
        while True:
            try:
                with self._hot.connect() as connection:
                    stale = _record(connection, [record.row for record in records], unsure=unsure)
                    self._aftermath.apply(
                        connection,
                        [
                            Result(leased=record.leased, verdict=record.verdict, hold_s=record.hold_s)
                            for record in records
                            if not stale or record.key not in stale
                        ],
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
                break
            except _DATABASE_ERRORS as error:
                # Fenced by the token, so a try whose reply was lost and one more give the attempt back once.
                self._wait_for_database(error)
        now = time.time()
        for row in written:
            if row.deferred_reason is not None:
                metrics.deferred(DeferReason(row.deferred_reason), logged=row.logged)
                self._tally.add(row.endpoint_id, AttemptClass.DEFERRED, at=now)

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


def _record(connection: sa.Connection, rows: Sequence[AttemptRow], *, unsure: bool) -> set[tuple[UUID, UUID]]:
    if unsure:
        # The reply to an earlier try was lost: what stands in the log was written by it.
        written = results.recorded(connection, rows)
        rows = [row for row in rows if (row.delivery_id, row.lease_token) not in written]
    if not rows or results.record(connection, rows) == len(rows):
        return set()
    return {(row.delivery_id, row.lease_token) for row in rows} - results.recorded(connection, rows)


def _unless_enabled(row: UnsentRow, disabled: set[UUID]) -> UnsentRow:
    """Pause a row only if its endpoint is still disabled; an enable since makes it due at once."""
    if row.deferred_reason != DeferReason.PAUSED or row.endpoint_id in disabled:
        return row
    return row._replace(deferred_reason=None, wait_secs=0.0)


def _record_of(one: Finished, verdict: Outcome, worker: str) -> _Record:
    """Decide what becomes of the delivery."""
    leased, seen = one.leased, one.observation
    row = leased.row
    status, reason, wait, hold_s = Status.DELIVERED, None, None, None
    if verdict.cls is not AttemptClass.SUCCESS:
        policy = ONCE if leased.test else leased.destination.retry
        decision = decide(policy, spent=row.spent, outcome=verdict, random=random.random())
        if isinstance(decision, Dead):
            status, reason, hold_s = Status.DEAD, decision.reason.value, decision.hold_s
        elif isinstance(decision, Retry):
            status, wait, hold_s = Status.PENDING, decision.wait_s, decision.hold_s
    return _Record(
        row=AttemptRow(
            delivery_id=row.id,
            lease_token=leased.token,
            next_status=status,
            reason=reason,
            wait_secs=wait,
            at=row.claimed_at,
            number=row.attempt_count,
            generation=row.generation,
            attempt_class=verdict.cls,
            code=verdict.code,
            error=verdict.text,
            http_status=seen.status,
            body_incomplete=verdict.body_incomplete,
            sends=seen.sends,
            dns_us=seen.dns_us,
            connect_us=seen.connect_us,
            tls_us=seen.tls_us,
            first_byte_us=min(seen.first_byte_us, LONGEST_US),
            total_us=min(seen.total_us, LONGEST_US),
            bytes_sent=seen.bytes_sent,
            bytes_received=seen.bytes_received,
            # A refused address is nobody's business: the log must not map the inside of a network.
            remote_address=None if seen.fault is Fault.REFUSED else seen.remote_address,
            worker=worker,
            reply_headers=_header_text(seen.headers) if seen.headers else None,
            snippet=_display(seen.snippet) if seen.snippet else None,
        ),
        leased=leased,
        verdict=verdict,
        hold_s=hold_s,
    )


def _header_text(headers: Sequence[tuple[str, str]]) -> str:
    # Postgres's text holds no NUL.
    return "\n".join([": ".join(header) for header in headers]).replace("\0", "�")[:REPLY_HEADERS]


def _display(snippet: bytes) -> str:
    """Decode a reply's first bytes for showing, whatever they are."""
    return snippet.decode("utf-8", "replace").replace("\0", "�")


def _log_attempts(records: Sequence[_Record], stale: set[_Key], persist_us: int) -> None:
    if not stale and not attempts_log.isEnabledFor(logging.WARNING):
        return
    successes = attempts_log.isEnabledFor(logging.INFO)
    for record in records:
        row, verdict, leased = record.row, record.verdict, record.leased
        if verdict.cls is AttemptClass.SUCCESS and not successes and not stale:
            continue
        if stale and record.key in stale:
            log.warning(
                "a stale result was dropped: the lease had gone to another",
                extra={"delivery_id": str(row.delivery_id), "attempt": row.number, "outcome": verdict.cls.label},
            )
            continue
        level = logging.INFO if verdict.cls is AttemptClass.SUCCESS else logging.WARNING
        if not attempts_log.isEnabledFor(level):
            continue
        attempts_log.log(
            level,
            "delivery.attempted",
            extra={
                "delivery_id": str(row.delivery_id),
                "endpoint_id": str(leased.row.endpoint_id),
                "event_type": leased.row.event_type,
                "attempt": row.number,
                "outcome": verdict.cls.label,
                "code": verdict.code,
                "status": row.http_status,
                "reason": row.reason,
                "retry_in_s": None if row.wait_secs is None else round(row.wait_secs, 3),
                "claim_ms": leased.claim_us / 1000,
                "gate_ms": leased.gate_us / 1000,
                "send_ms": row.total_us / 1000,
                "persist_ms": persist_us / 1000,
            },
        )
