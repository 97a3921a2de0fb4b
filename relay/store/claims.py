"""Take the lease on due rows: the only way to a send."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    import sqlalchemy as sa

# One statement a batch. The lock comes first, in a query of its own, because window functions (the running sum
# of bytes) forbid one beside them; what is locked but over the bound is let go with the statement's transaction.
_CLAIM = sql.SQL("""
with locked as materialized (
    select id, due_at, event_id, endpoint_id from relay.deliveries
    where id = any(%(ids)s) and status = 0 and due_at <= now()
    for update skip locked
),
sized as materialized (
    select l.id, l.endpoint_id, e.content_type, e.payload,
        sum(octet_length(e.payload)) over w as running, row_number() over w as place
    from locked l join relay.events e on e.id = l.event_id
    window w as (order by l.due_at, l.id)
)
update relay.deliveries d
set status = 1, lease_token = %(token)s, lease_until = now() + make_interval(secs => %(lease)s),
    announced_at = null, attempt_count = d.attempt_count + 1
from sized s join relay.endpoints p on p.id = s.endpoint_id
where d.id = s.id and (s.running <= %(max_bytes)s or s.place = 1)
returning
    d.id, d.id::text, d.workspace_id, d.event_id::text, d.endpoint_id, d.event_type,
    d.attempt_count, d.budget_from, d.generation,
    case when d.deferred_reason = 'internal' then d.deferred_count else 0 end,
    s.content_type, s.payload,
    p.version, p.enabled, p.deleted_at is not null,
    extract(epoch from p.held_until - now())::float8,
    now()
""")

_STILL_DUE = sql.SQL("""
select id from relay.deliveries where id = any(%(ids)s) and status = 0 and due_at <= now()
""")


class Claimed(NamedTuple):
    """A leased delivery with all that its send needs, but for the endpoint's settings (see `endpoints.settings`)."""

    id: UUID
    #: The same as the receiver reads it: written by Postgres, at a tenth of what it costs here.
    id_text: str
    workspace_id: UUID
    event_id_text: str
    endpoint_id: UUID
    event_type: str
    #: Counts this attempt already.
    attempt_count: int
    budget_from: int
    generation: int
    #: How often in a row it was deferred for a fault of ours.
    internal_deferrals: int
    content_type: str
    payload: bytes
    endpoint_version: int
    endpoint_enabled: bool
    endpoint_deleted: bool
    #: Seconds until the endpoint's Retry-After hold ends; negative when over, None when there was none.
    held_secs: float | None
    #: The database's clock.
    claimed_at: datetime

    @property
    def spent(self) -> int:
        """How many attempts of this generation's budget are spent, this one included."""
        return self.attempt_count - self.budget_from


def claim(
    connection: sa.Connection, ids: Sequence[UUID], *, token: UUID, lease_secs: float, max_bytes: int
) -> list[Claimed]:
    """Lease those of `ids` that are pending, due and unlocked, under `token`, for `lease_secs`.

    Payloads come to `max_bytes` in all, but for a first one that is larger. Each claim counts an attempt.
    """
    cursor = run(
        connection,
        _CLAIM,
        {"ids": arrays.uuids(ids), "token": token, "lease": float(lease_secs), "max_bytes": max_bytes},
    )
    return [Claimed._make(row) for row in cursor.fetchall()]


def still_due(connection: sa.Connection, ids: Sequence[UUID]) -> list[UUID]:
    """Return which of `ids` wait to be claimed all the same: locked by somebody for a moment, or over the byte bound.

    Reads without locks, so it does not wait for whoever holds them.
    """
    return [row[0] for row in run(connection, _STILL_DUE, {"ids": arrays.uuids(ids)}).fetchall()]
