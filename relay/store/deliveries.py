"""Deliveries as their owners read them, with every attempt that is still in the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relay.core.model import AttemptClass, Status

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

#: What `from_row` reads, of deliveries as `d`.
COLUMNS: Final = """d.id, d.event_id, d.endpoint_id, d.event_type, d.status, d.reason, d.attempt_count, d.generation,
    d.due_at, d.created_at, d.finished_at, d.deferred_reason, d.deferred_since, d.deferred_count"""

# One statement, so that the row and its attempts are of one moment. No attempt is older than its delivery: that
# bound lets the partitions of the days before be left out.
_GET = sa.text(f"""
select {COLUMNS}, d.last_attempt,
    a.at, a.number, a.generation as attempt_generation, a.class as attempt_class, a.code, a.error,
    a.status as http_status, a.body_incomplete, a.sends, a.dns_us, a.connect_us, a.tls_us, a.first_byte_us, a.total_us,
    a.bytes_sent, a.bytes_received, a.remote_address, a.worker, a.reply_headers, a.snippet
from relay.deliveries d
left join relay.delivery_attempts a on a.delivery_id = d.id and a.at >= d.created_at
where d.id = :id and d.workspace_id = :workspace_id
order by a.at, a.number nulls first
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One line of a delivery's log. Durations are microseconds, 0 or None for a phase that did not take place."""

    #: When it was claimed, by the database's clock.
    at: datetime
    #: None for a deferral.
    number: int | None
    generation: int
    attempt_class: AttemptClass
    code: str | None
    error: str | None
    http_status: int | None
    body_incomplete: bool
    sends: int
    dns_us: int | None
    connect_us: int | None
    tls_us: int | None
    first_byte_us: int | None
    total_us: int | None
    bytes_sent: int | None
    bytes_received: int | None
    remote_address: str | None
    worker: str | None
    #: Lines of `name: value`, in the reply's order.
    reply_headers: str | None
    snippet: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A delivery, and where it was asked for its log, the oldest attempt first.

    Attempts beyond the log's window are counted, not listed.
    """

    id: UUID
    event_id: UUID
    endpoint_id: UUID
    event_type: str
    status: Status
    reason: str | None
    attempt_count: int
    generation: int
    #: None while it is paused.
    due_at: datetime | None
    created_at: datetime
    finished_at: datetime | None
    deferred_reason: str | None
    deferred_since: datetime | None
    deferred_count: int
    attempts: list[Attempt] = field(default_factory=list)
    #: What the row itself keeps of the attempt that it died of, which outlives the log: see store/results.py.
    last_attempt: dict[str, Any] | None = None


def get(connection: sa.Connection, *, workspace_id: UUID, delivery_id: UUID) -> Delivery | None:
    """Return the delivery with its attempts, or None where this workspace has no such one."""
    rows = connection.execute(_GET, {"id": delivery_id, "workspace_id": workspace_id}).all()
    if not rows:
        return None
    first = rows[0]
    attempts = [_attempt(row) for row in rows if row.at is not None]
    return from_row(first, attempts=attempts, last_attempt=first.last_attempt)


def from_row(
    row: sa.Row[Any], *, attempts: list[Attempt] | None = None, last_attempt: dict[str, Any] | None = None
) -> Delivery:
    """Make a delivery of a row with `COLUMNS`."""
    return Delivery(
        id=row.id,
        event_id=row.event_id,
        endpoint_id=row.endpoint_id,
        event_type=row.event_type,
        status=Status(row.status),
        reason=row.reason,
        attempt_count=row.attempt_count,
        generation=row.generation,
        due_at=row.due_at,
        created_at=row.created_at,
        finished_at=row.finished_at,
        deferred_reason=row.deferred_reason,
        deferred_since=row.deferred_since,
        deferred_count=row.deferred_count,
        attempts=attempts or [],
        last_attempt=last_attempt,
    )


def _attempt(row: sa.Row[Any]) -> Attempt:
    return Attempt(
        at=row.at,
        number=row.number,
        generation=row.attempt_generation,
        attempt_class=AttemptClass(row.attempt_class),
        code=row.code,
        error=row.error,
        http_status=row.http_status,
        body_incomplete=row.body_incomplete,
        sends=row.sends,
        dns_us=row.dns_us,
        connect_us=row.connect_us,
        tls_us=row.tls_us,
        first_byte_us=row.first_byte_us,
        total_us=row.total_us,
        bytes_sent=row.bytes_sent,
        bytes_received=row.bytes_received,
        remote_address=row.remote_address,
        worker=row.worker,
        reply_headers=row.reply_headers,
        snippet=row.snippet,
    )
