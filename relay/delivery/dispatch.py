"""A batch of hints becomes sends: claim, gate, build, hand to the engine. It never waits for a receiver."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg
import sqlalchemy as sa

from relay import failpoints
from relay.core.errors import Unavailable
from relay.core.model import Signing
from relay.core.signing import signature_headers
from relay.delivery.engine import Engine, SendRequest
from relay.delivery.gate import Leased
from relay.store import claims, traces
from relay.tracing import HEADER, server_of, traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.delivery.destinations import Destinations
    from relay.delivery.gate import Gate, Gated
    from relay.delivery.jobs import JobDestinations
    from relay.delivery.permits import Room, Slots
    from relay.delivery.recorder import Recorder
    from relay.store.claims import Claimed
    from relay.tracing import Tracing

log = logging.getLogger(__name__)

#: Bytes of payload that one claim takes; what is over is hinted again.
CLAIM_BYTES = 8 * 1024 * 1024

#: What a claim can raise when the database does not answer: SQLAlchemy's for the connection, psycopg's for the rest.
DATABASE_ERRORS = (sa.exc.SQLAlchemyError, psycopg.Error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings that act on every send; sizes in bytes, times in milliseconds or seconds as named."""

    lease_secs: float
    #: Kept of the lease for recording: no request starts with less than its time-out and this left.
    lease_margin_secs: float
    connect_timeout_ms: int
    idle_timeout_ms: int


class Dispatcher:
    """Turns ids into sends for one process. `dispatch` may run in several threads at once."""

    def __init__(
        self,
        hot: sa.Engine,
        *,
        destinations: Destinations,
        jobs: JobDestinations,
        gate: Gate,
        sender: Engine,
        recorder: Recorder,
        room: Room,
        slots: Slots,
        limits: Limits,
        again: Callable[[Sequence[UUID]], None],
        tracing: Tracing | None = None,
    ) -> None:
        """`again` takes ids whose hint must come once more: locked or moved by somebody just then, or over the byte bound."""
        self._hot = hot
        self._destinations = destinations
        self._jobs = jobs
        self._gate = gate
        self._sender = sender
        self._recorder = recorder
        self._room = room
        self._slots = slots
        self._limits = limits
        self._again = again
        self._tracing = tracing
        self._destinations_lock = threading.Lock()
        self._closed = False
        #: Claims under way: the recorder must outlive them, or what they give back would stay leased.
        self._active = 0
        self._idle = threading.Condition()

    def close(self, deadline: float) -> None:
        """Begin no further claim, and wait until those under way are over, or until `deadline` (monotonic)."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._active, max(0.0, deadline - time.monotonic()))

    def dispatch(self, ids: Sequence[UUID]) -> int:
        """Claim what can be claimed of `ids` and send it; return how many sends began.

        The caller has reserved room for every id; room of ids that become no send is given back here, room of sends
        when they end. Raises one of DATABASE_ERRORS when the claim failed, and Unavailable once this is closed: then
        nothing was begun, and the room is given back all the same.
        """
        with self._idle:
            if self._closed:
                self._room.release(len(ids))
                raise Unavailable("The worker is stopping: it claims nothing more.")
            self._active += 1
        try:
            return self._dispatch(ids)
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _dispatch(self, ids: Sequence[UUID]) -> int:
        sends = 0
        batch: list[Leased] = []
        claimed: Sequence[Claimed] = ()
        token = uuid4()
        try:
            started = time.monotonic()
            failpoints.hit("claim.before")
            with self._hot.connect() as connection:
                claimed = claims.claim(
                    connection, ids, token=token, lease_secs=self._limits.lease_secs, max_bytes=CLAIM_BYTES
                )
                failpoints.hit("claim.after")
                left: list[UUID] = []
                if len(claimed) < len(ids):
                    got = {row.id for row in claimed}
                    left = claims.still_due(connection, [id_ for id_ in ids if id_ not in got])
                batch = self._with_destinations(connection, claimed, token)
                claim_us = int((time.monotonic() - started) * 1e6)
                gated = self._gate.admit(connection, batch)
                if self._tracing is not None:
                    self._trace_claims(self._tracing, connection, gated.sends, started)
            if left:
                self._again(left)
            sends = self._send(gated, started, claim_us)
        except DATABASE_ERRORS:
            # After the claim: what is leased goes back as soon as the database takes it, not when the lease runs out.
            probes = {leased.row.id for leased in batch if leased.probe}
            self._recorder.add([], [self._gate.release(row, token, probe=row.id in probes) for row in claimed])
            raise
        finally:
            self._room.release(len(ids) - sends)
        return sends

    def _with_destinations(self, connection: sa.Connection, claimed: Sequence[Claimed], token: UUID) -> list[Leased]:
        wanted = {(row.endpoint_id.int, row.endpoint_version): row.endpoint_id for row in claimed}
        with self._destinations_lock:
            found = self._destinations.find(connection, wanted)
        batch = [Leased(row, token, found[(row.endpoint_id.int, row.endpoint_version)]) for row in claimed]
        if diverted := [leased for leased in batch if leased.row.closer & claims.JOB_OR_TEST]:
            self._jobs.divert(connection, diverted)
        return batch

    @staticmethod
    def _trace_claims(tracing: Tracing, connection: sa.Connection, sends: Sequence[Leased], started: float) -> None:
        began = time.time() - (time.monotonic() - started)
        parents = traces.of(connection, [leased.row.id for leased in sends])
        for leased in sends:
            if (parent := parents.get(leased.row.id)) is not None:
                about: dict[str, str | int] = {
                    "relay.delivery_id": leased.row.id_text,
                    "relay.attempt": leased.row.attempt_count,
                }
                leased.claim_trace = tracing.record("relay.claim", parent, about, began=began)

    def _begin_span(self, leased: Leased, headers: list[str]) -> None:
        """Begin the send's span, and tell the receiver; not where it is an unsigned job's, nor a chat platform."""
        assert self._tracing is not None
        row, destination = leased.row, leased.destination
        leased.span = span = self._tracing.begin(
            "relay.send",
            leased.claim_trace,
            {
                "relay.delivery_id": row.id_text,
                "relay.endpoint_id": str(row.endpoint_id),
                "relay.event_type": row.event_type,
                "relay.attempt": row.attempt_count,
                **server_of(destination.url),
            },
            kind="client",
        )
        hidden = (leased.job and destination.signing is Signing.NONE) or destination.chat is not None
        if not hidden and not any(line.lower().startswith(f"{HEADER}:") for line in headers):
            headers.append(f"{HEADER}: {traceparent(span)}")

    def _send(self, gated: Gated, started: float, claim_us: int) -> int:
        """Build the requests of those that passed and hand them over; pass on what became of the others."""
        requests: list[SendRequest] = []
        holding = gated.sends
        try:
            # Of the whole batch, so read once: the time for the signatures, and the database's for secrets that end.
            timestamp = int(time.time())
            database_time = holding[0].row.claimed_at.timestamp() if holding else 0.0
            gate_us = int((time.monotonic() - started) * 1e6) - claim_us
            built: list[Leased] = []
            for leased in holding:
                leased.claim_us, leased.gate_us = claim_us, gate_us
                try:
                    requests.append(self._build(leased, started, timestamp, database_time))
                    built.append(leased)
                except Exception:  # one delivery's boundary: what cannot be built must not cost the others theirs
                    log.exception("a request could not be built", extra={"delivery_id": str(leased.row.id)})
                    self._slots.give_back(leased.row.endpoint_id, leased.row.workspace_id)
                    gated.unsent.append(self._gate.internal(leased))
            holding = built
            if requests:
                failpoints.hit("send.before")
                self._sender.submit(requests)
            holding = []
        except Unavailable:
            # The sender is shutting down: these never start, so their leases go back at once.
            gated.unsent += [self._gate.unsent(leased, wait=0.0) for leased in holding]
            requests = []
        finally:
            for leased in holding:
                self._slots.give_back(leased.row.endpoint_id, leased.row.workspace_id)
            if gated.unsent or gated.finished:
                self._recorder.add(gated.finished, gated.unsent)
        return len(requests)

    def _build(self, leased: Leased, started: float, timestamp: int, database_time: float) -> SendRequest:
        row, destination = leased.row, leased.destination
        failpoints.hit("send.build", row.event_type)
        url, body, content_type = destination.url, row.payload, row.content_type
        if (chat := destination.chat) is not None:
            built = chat.build(event_type=row.event_type, payload=row.payload, content_type=row.content_type)
            url, body, content_type = chat.url, built.body, built.content_type
        headers = [
            *destination.header_lines,
            *signature_headers(
                destination.signing,
                secrets=destination.keys(database_time),
                delivery_id=row.id_text,
                event_id=None if leased.job else row.event_id_text,
                event_type=None if leased.job else row.event_type,
                attempt=row.attempt_count,
                timestamp=timestamp,
                body=body,
            ),
        ]
        if not destination.says_content_type:
            headers.append(f"Content-Type: {content_type}")
        if leased.claim_trace is not None:
            self._begin_span(leased, headers)
        limits, timeout_ms = self._limits, destination.timeout_ms
        return SendRequest(
            leased,
            url,
            body,
            headers,
            timeout_ms,
            limits.connect_timeout_ms if limits.connect_timeout_ms < timeout_ms else timeout_ms,
            limits.idle_timeout_ms,
            # Read before the claim: by the time the database set the lease, this clock was already running.
            started + limits.lease_secs - limits.lease_margin_secs - timeout_ms / 1000,
            destination.certificate,
            destination.private_key,
        )
