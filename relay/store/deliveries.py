"""Deliveries as their owners read them, with every attempt that is still in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from relay.core.model import AttemptClass, Status

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

# One statement, so that the row and its attempts are of one moment. No attempt is older than its delivery: that
# bound lets the partitions of the days before be left out.
_GET = sa.text("""
select d.id, d.event_id, d.endpoint_id, d.event_type, d.status, d.reason, d.attempt_count, d.generation, d.due_at,
    d.created_at, d.finished_at, d.deferred_reason, d.deferred_since, d.deferred_count,
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
    """A delivery with its log, the oldest attempt first. Attempts beyond the log's window are counted, not listed."""

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
    attempts: list[Attempt]


def get(connection: sa.Connection, *, workspace_id: UUID, delivery_id: UUID) -> Delivery | None:
    """Return the delivery with its attempts, or None where this workspace has no such one."""
    rows = connection.execute(_GET, {"id": delivery_id, "workspace_id": workspace_id}).all()
    if not rows:
        return None
    first = rows[0]
    return Delivery(
        id=first.id,
        event_id=first.event_id,
        endpoint_id=first.endpoint_id,
        event_type=first.event_type,
        status=Status(first.status),
        reason=first.reason,
        attempt_count=first.attempt_count,
        generation=first.generation,
        due_at=first.due_at,
        created_at=first.created_at,
        finished_at=first.finished_at,
        deferred_reason=first.deferred_reason,
        deferred_since=first.deferred_since,
        deferred_count=first.deferred_count,
        attempts=[_attempt(row) for row in rows if row.at is not None],
    )


def _attempt(row: sa.Row[tuple[object, ...]]) -> Attempt:
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
