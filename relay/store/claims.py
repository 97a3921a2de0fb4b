"""Take the lease on due rows: the only way to a send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from relay.core.breaker import Breaker
from relay.core.model import BreakerState, EventSource
from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    import sqlalchemy as sa

# One statement a batch. The lock comes first, in a query of its own, because window functions (the running sum
# of bytes) forbid one beside them; what is locked but over the bound is let go with the statement's transaction.
# A locked row stays where it is, so the update finds it by its place (ctid), which no index has to be asked for; one that
# moved between the statement's snapshot and the lock is passed over, and `still_due` finds it.
# What seldom holds is one number, 0 for nearly every row, so that a batch that just goes carries none of it.
_CLAIM = sql.SQL("""
with locked as materialized (
    select ctid as spot, id, due_at, event_id, endpoint_id from relay.deliveries
    where id = any(%(ids)s) and status = 0 and due_at <= now()
    for update skip locked
),
sized as materialized (
    select l.spot, l.endpoint_id, e.source, e.content_type, e.payload,
        sum(octet_length(e.payload)) over w as running, row_number() over w as place
    from locked l join relay.events e on e.id = any(array[l.event_id])
    window w as (order by l.due_at, l.id)
)
update relay.deliveries d
set status = 1, lease_token = %(token)s, lease_until = now() + make_interval(secs => %(lease)s),
    announced_at = null, attempt_count = d.attempt_count + 1
from sized s join relay.endpoints p on p.id = any(array[s.endpoint_id])
where d.ctid = s.spot and (s.running <= %(max_bytes)s or s.place = 1)
returning
    d.id, d.id::text, d.workspace_id, d.event_id::text, d.endpoint_id, d.event_type,
    d.attempt_count, d.budget_from, d.generation,
    s.content_type, s.payload,
    p.version, p.breaker_generation,
    case when p.enabled and p.deleted_at is null and p.breaker_state = 0
            and (p.held_until is null or p.held_until <= now()) then 0 else 1 end
        + case when d.deferred_reason is null then 0 else 2 end
        + case when d.expires_at <= now() then 4 else 0 end
        + case when s.source in (1, 3) then 8 else 0 end,
    now()
""")

#: The bit of `closer` that says that the event is a job's or a test's.
JOB_OR_TEST: Final = 8

# By the primary key and with the lease in hand: nobody else moves these rows meanwhile. The endpoints' may move.
_LOOK_CLOSER = sql.SQL("""
select d.id, d.deferred_reason, d.deferred_count, d.expires_at <= now(), e.source, p.enabled, p.deleted_at is not null,
    extract(epoch from p.held_until - now())::float8, p.breaker_state, p.breaker_failures, p.breaker_trips,
    p.breaker_generation, extract(epoch from p.breaker_open_until - now())::float8,
    extract(epoch from p.probe_deadline - now())::float8
from relay.deliveries d join relay.events e on e.id = any(array[d.event_id])
    join relay.endpoints p on p.id = any(array[d.endpoint_id])
where d.id = any(%(ids)s)
""")

_STILL_DUE = sql.SQL("""
select id from relay.deliveries where id = any(%(ids)s) and status = 0 and due_at <= now()
""")


class Claimed(NamedTuple):
    """A leased delivery with all that its send needs, but for the endpoint's settings (see `destinations.load`)."""

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
    content_type: str
    payload: bytes
    endpoint_version: int
    breaker_generation: int
    #: 0 where nothing stands in the way; else `look_closer` says what may.
    closer: int
    #: The database's clock.
    claimed_at: datetime

    @property
    def spent(self) -> int:
        """How many attempts of this generation's budget are spent, this one included."""
        return self.attempt_count - self.budget_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What may hold a claimed delivery back, and what it has waited for before."""

    #: The gate that held it back last (model.DeferReason), and how often in a row.
    deferred_reason: str | None
    deferred_count: int
    expired: bool
    source: EventSource
    endpoint_enabled: bool
    endpoint_deleted: bool
    #: Seconds until the endpoint's Retry-After hold ends; negative when over, None when there was none.
    held_s: float | None
    breaker: Breaker


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


def look_closer(connection: sa.Connection, ids: Sequence[UUID]) -> dict[UUID, Circumstances]:
    """Return what may hold the claimed `ids` back: for those whose `closer` is not 0."""
    return {
        row[0]: Circumstances(
            deferred_reason=row[1],
            deferred_count=row[2],
            expired=bool(row[3]),
            source=EventSource(row[4]),
            endpoint_enabled=row[5],
            endpoint_deleted=row[6],
            held_s=row[7],
            breaker=Breaker(
                state=BreakerState(row[8]),
                failures=row[9],
                trips=row[10],
                generation=row[11],
                open_s=row[12],
                probe_s=row[13],
            ),
        )
        for row in run(connection, _LOOK_CLOSER, {"ids": arrays.uuids(ids)}).fetchall()
    }


def still_due(connection: sa.Connection, ids: Sequence[UUID]) -> list[UUID]:
    """Return which of `ids` wait to be claimed all the same: locked or moved by somebody just then, or over the byte bound.

    Reads without locks, so it does not wait for whoever holds them.
    """
    return [row[0] for row in run(connection, _STILL_DUE, {"ids": arrays.uuids(ids)}).fetchall()]
