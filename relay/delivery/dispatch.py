"""A batch of hints becomes sends: claim, gate, build, hand to the engine. It never waits for a receiver."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg
import sqlalchemy as sa

from relay import failpoints
from relay.core.errors import Unavailable
from relay.core.model import DeadReason, DeferReason, Status
from relay.core.observation import Fault, Observation
from relay.core.outcome import PAYLOAD_TOO_LARGE, internal_wait_seconds
from relay.core.signing import signature_headers
from relay.delivery.engine import Engine, SendRequest
from relay.delivery.recorder import Finished, Recorder
from relay.store import claims
from relay.store.results import UnsentRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.delivery.destinations import Destination, Destinations
    from relay.delivery.permits import Room, Slots
    from relay.store.claims import Claimed

log = logging.getLogger(__name__)

#: Bytes of payload that one claim takes; what is over is hinted again.
CLAIM_BYTES = 8 * 1024 * 1024
#: Seconds by which a hold's or pause's return is spread, so that a backlog does not come back as one.
SPREAD_SECS = 0.5

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
    max_payload_bytes: int


@dataclass(slots=True, kw_only=True)
class Leased:
    """A claimed delivery on its way through the process: what the recorder needs to end it."""

    row: Claimed
    token: UUID
    destination: Destination
    claim_us: int = 0
    gate_us: int = 0


class Dispatcher:
    """Turns ids into sends for one process. `dispatch` may run in several threads at once."""

    def __init__(
        self,
        hot: sa.Engine,
        *,
        destinations: Destinations,
        sender: Engine,
        recorder: Recorder,
        room: Room,
        slots: Slots,
        limits: Limits,
        worker: str,
        again: Callable[[Sequence[UUID]], None],
    ) -> None:
        """`again` takes ids whose hint must come once more: locked by somebody for a moment, or over the byte bound."""
        self._hot = hot
        self._destinations = destinations
        self._sender = sender
        self._recorder = recorder
        self._room = room
        self._slots = slots
        self._limits = limits
        self._worker = worker
        self._again = again
        self._destinations_lock = threading.Lock()

    def dispatch(self, ids: Sequence[UUID]) -> int:
        """Claim what can be claimed of `ids` and send it; return how many sends began.

        The caller has reserved room for every id; room of ids that become no send is given back here, room of sends
        when they end. Raises one of DATABASE_ERRORS when the claim failed: then nothing was begun, and the room is
        given back all the same.
        """
        sends = 0
        token = uuid4()
        claimed: Sequence[Claimed] = ()
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
                with self._destinations_lock:
                    destinations = self._destinations.find(
                        connection, {(row.endpoint_id.int, row.endpoint_version): row.endpoint_id for row in claimed}
                    )
            if left:
                self._again(left)
            sends = self._gate_and_send(claimed, token, destinations, started)
        except DATABASE_ERRORS:
            # After the claim: what is leased goes back as soon as the database takes it, not when the lease runs out.
            self._recorder.add([], [self._unsent(row, token, wait=0.0) for row in claimed])
            raise
        finally:
            self._room.release(len(ids) - sends)
        return sends

    def _gate_and_send(
        self,
        claimed: Sequence[Claimed],
        token: UUID,
        destinations: dict[tuple[int, int], Destination],
        started: float,
    ) -> int:
        claim_us = int((time.monotonic() - started) * 1e6)
        requests: list[SendRequest] = []
        unsent: list[UnsentRow] = []
        finished: list[Finished] = []
        # Of the whole batch, so read once: the time for the signatures, and the database's for secrets that end.
        timestamp = int(time.time())
        database_time = claimed[0].claimed_at.timestamp() if claimed else 0.0
        holding: list[Leased] = []
        try:
            for row in claimed:
                destination = destinations[(row.endpoint_id.int, row.endpoint_version)]
                leased = Leased(row=row, token=token, destination=destination, claim_us=claim_us)
                held_back = self._gate(leased)
                if isinstance(held_back, UnsentRow):
                    unsent.append(held_back)
                elif isinstance(held_back, Finished):
                    finished.append(held_back)
                else:
                    holding.append(leased)
                    try:
                        requests.append(self._build(leased, started, timestamp, database_time))
                    except Exception:  # one delivery's boundary: what cannot be built must not cost the others theirs
                        log.exception("a request could not be built", extra={"delivery_id": str(row.id)})
                        holding.pop()
                        self._slots.give_back(row.endpoint_id, row.workspace_id)
                        unsent.append(self._internal(row, token))
            gate_us = int((time.monotonic() - started) * 1e6) - claim_us
            for leased in holding:
                leased.gate_us = gate_us
            if requests:
                failpoints.hit("send.before")
                self._sender.submit(requests)
            holding = []
        except Unavailable:
            # The sender is shutting down: these never start, so their leases go back at once.
            unsent += [self._unsent(leased.row, token, wait=0.0) for leased in holding]
            requests = []
        finally:
            for leased in holding:
                self._slots.give_back(leased.row.endpoint_id, leased.row.workspace_id)
            if unsent or finished:
                self._recorder.add(finished, unsent)
        return len(requests)

    def _gate(self, leased: Leased) -> UnsentRow | Finished | None:
        """Say what holds a delivery back; None lets it through, with its slot taken."""
        row, destination, token = leased.row, leased.destination, leased.token
        if row.endpoint_deleted:
            return self._unsent(row, token, status=Status.DEAD, reason=DeadReason.ENDPOINT_DELETED)
        if not row.endpoint_enabled:
            # No wait: the recorder pauses it, if the endpoint is still disabled then.
            return self._unsent(row, token, deferred=DeferReason.PAUSED)
        if row.held_secs is not None and row.held_secs > 0:
            wait = row.held_secs + random.random() * SPREAD_SECS
            return self._unsent(row, token, deferred=DeferReason.HELD, wait=wait)
        if destination.fault is not None:
            return self._internal(row, token)
        if destination.refused:
            return Finished(leased=leased, observation=Observation(fault=Fault.REFUSED))
        if len(row.payload) > self._limits.max_payload_bytes:
            return Finished(leased=leased, observation=Observation(), verdict=PAYLOAD_TOO_LARGE)
        limit = destination.max_in_flight
        if not self._slots.try_take(row.endpoint_id, row.workspace_id, limit=limit):
            wait = self._slots.wait_secs(row.endpoint_id, limit=limit, random=random.random())
            return self._unsent(row, token, deferred=DeferReason.SLOT, wait=wait)
        return None

    def _internal(self, row: Claimed, token: UUID) -> UnsentRow:
        wait = internal_wait_seconds(row.internal_deferrals)
        return self._unsent(row, token, deferred=DeferReason.INTERNAL, wait=wait)

    def _unsent(
        self,
        row: Claimed,
        token: UUID,
        *,
        status: Status = Status.PENDING,
        reason: DeadReason | None = None,
        deferred: DeferReason | None = None,
        wait: float | None = None,
    ) -> UnsentRow:
        return UnsentRow(
            delivery_id=row.id,
            endpoint_id=row.endpoint_id,
            lease_token=token,
            next_status=status,
            reason=reason,
            wait_secs=wait,
            deferred_reason=deferred,
            at=row.claimed_at,
            generation=row.generation,
            worker=self._worker,
        )

    def _build(self, leased: Leased, started: float, timestamp: int, database_time: float) -> SendRequest:
        row, destination = leased.row, leased.destination
        failpoints.hit("send.build", row.event_type)
        headers = [
            *destination.header_lines,
            *signature_headers(
                destination.signing,
                secrets=destination.keys(database_time),
                delivery_id=row.id_text,
                event_id=row.event_id_text,
                event_type=row.event_type,
                attempt=row.attempt_count,
                timestamp=timestamp,
                body=row.payload,
            ),
        ]
        if not destination.says_content_type:
            headers.append(f"Content-Type: {row.content_type}")
        return SendRequest(
            key=leased,
            url=destination.url,
            body=row.payload,
            headers=headers,
            timeout_ms=destination.timeout_ms,
            connect_timeout_ms=min(self._limits.connect_timeout_ms, destination.timeout_ms),
            idle_timeout_ms=self._limits.idle_timeout_ms,
            # Read before the claim: by the time the database set the lease, this clock was already running.
            start_by=started + self._limits.lease_secs - self._limits.lease_margin_secs - destination.timeout_ms / 1000,
            certificate=destination.certificate,
            private_key=destination.private_key,
        )
