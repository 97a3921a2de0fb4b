"""Write what became of leased rows. Every write is fenced: it applies only where the lease token still matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from relay.store import arrays, operational
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    import sqlalchemy as sa

    from relay.store.arrays import Packed
    from relay.store.operational import Notice


class AttemptRow(NamedTuple):
    """One attempt and where it leaves its delivery: the columns of `delivery_attempts`, and the row's next state."""

    delivery_id: UUID
    lease_token: UUID
    #: The delivery's new status (model.Status).
    next_status: int
    reason: str | None
    #: Seconds from now to the next due time; None unless the next status is pending.
    wait_secs: float | None
    at: datetime
    number: int
    generation: int
    attempt_class: int
    code: str | None
    error: str | None
    http_status: int | None
    body_incomplete: bool
    sends: int
    dns_us: int
    connect_us: int
    tls_us: int
    first_byte_us: int
    total_us: int
    bytes_sent: int
    bytes_received: int
    remote_address: str | None
    worker: str
    reply_headers: str | None
    snippet: str | None


class UnsentRow(NamedTuple):
    """A leased row that was not sent: its attempt is given back."""

    delivery_id: UUID
    endpoint_id: UUID
    lease_token: UUID
    next_status: int
    #: Of a dead row.
    reason: str | None
    #: Seconds to the next due time; None pauses a pending row.
    wait_secs: float | None
    #: Why it was held back; None for a plain release.
    deferred_reason: str | None
    at: datetime
    generation: int
    worker: str
    #: It was its endpoint's probe, which another one may be now.
    probe: bool = False


class GivenBack(NamedTuple):
    """An unsent row that was written."""

    delivery_id: UUID
    workspace_id: UUID
    endpoint_id: UUID
    event_id: UUID
    event_type: str
    attempt_count: int
    deferred_reason: str | None
    #: Of a dead row.
    reason: str | None
    #: Whether it has a line in the log: the first of a run of deferrals does.
    logged: bool

    def notice(self) -> Notice | None:
        """Return what is told of a dead one."""
        return operational.death(
            workspace_id=self.workspace_id,
            endpoint_id=self.endpoint_id,
            delivery_id=self.delivery_id,
            event_id=str(self.event_id),
            event_type=self.event_type,
            reason=self.reason,
            attempt_count=self.attempt_count,
        )


# So that the primary key leads at every state of the statistics, the token is one more column of the unnest, and
# `status + 0` keeps the partial index of leased rows out of it: short as it may be, it would be read once a result.
_RECORD = sql.SQL("""
with r as (
    select * from unnest(
        %s::uuid[], %s::uuid[], %s::int2[], %s::text[], %s::float8[], %s::timestamptz[], %s::int4[], %s::int4[],
        %s::int2[], %s::text[], %s::text[], %s::int4[], %s::bool[], %s::int2[], %s::int4[], %s::int4[], %s::int4[],
        %s::int4[], %s::int4[], %s::int4[], %s::int4[], %s::text[], %s::text[], %s::text[], %s::text[]
    ) as r(id, token, next_status, reason, wait, at, number, generation, class, code, error, status, body_incomplete,
        sends, dns_us, connect_us, tls_us, first_byte_us, total_us, bytes_sent, bytes_received, remote_address,
        worker, reply_headers, snippet)
),
u as (
    update relay.deliveries d
    set status = r.next_status, reason = r.reason, lease_token = null, lease_until = null, announced_at = null,
        -- Never past its expiry, at which the claim ends it (`least` passes over a null).
        due_at = case when r.next_status = 0 then least(now() + make_interval(secs => r.wait), d.expires_at)
            else d.due_at end,
        finished_at = case when r.next_status = 0 then null else now() end,
        deferred_reason = null, deferred_since = null, deferred_count = 0,
        last_attempt = case when r.next_status = 3 then jsonb_build_object(
            'at', r.at, 'number', r.number, 'generation', r.generation, 'code', r.code, 'error', r.error,
            'status', r.status, 'remote_address', r.remote_address, 'total_us', r.total_us,
            'reply_headers', r.reply_headers, 'snippet', r.snippet) end
    from r
    where d.id = any(array[r.id]) and d.lease_token = r.token and d.status + 0 = 1
    -- All of r, so that the log is written without a join: one of two CTEs would be a loop within a loop.
    returning r.*
)
insert into relay.delivery_attempts (
    delivery_id, lease_token, at, number, generation, class, code, error, status, body_incomplete, sends,
    dns_us, connect_us, tls_us, first_byte_us, total_us, bytes_sent, bytes_received, remote_address, worker,
    reply_headers, snippet)
select id, token, at, number, generation, class, code, error, status, body_incomplete, sends,
    dns_us, connect_us, tls_us, first_byte_us, total_us, bytes_sent, bytes_received, remote_address, worker,
    reply_headers, snippet
from u
""")

# One for each column of AttemptRow.
_PACK: tuple[Callable[[Any], Packed], ...] = (
    arrays.uuids,
    arrays.uuids,
    arrays.int2s,
    arrays.texts,
    arrays.nullable_float8s,
    arrays.timestamps,
    arrays.int4s,
    arrays.int4s,
    arrays.int2s,
    arrays.texts,
    arrays.texts,
    arrays.nullable_int4s,
    arrays.bools,
    arrays.int2s,
    *(arrays.int4s,) * 7,
    *(arrays.texts,) * 4,
)

# The same for UnsentRow; whether it was a probe is the endpoint's, and not written here.
_PACK_UNSENT: tuple[Callable[[Any], Packed], ...] = (
    arrays.uuids,
    arrays.uuids,
    arrays.uuids,
    arrays.int2s,
    arrays.texts,
    arrays.nullable_float8s,
    arrays.texts,
    arrays.timestamps,
    arrays.int4s,
    arrays.texts,
)

_RECORDED = sql.SQL("""
select a.delivery_id, a.lease_token
from unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(ats)s::timestamptz[]) as r(id, token, at)
cross join lateral (
    select delivery_id, lease_token from relay.delivery_attempts
    where delivery_id = r.id and at = r.at and lease_token = r.token
    -- Kept apart by this, so that the log is asked by its key, and never read as a whole because it looks empty.
    offset 0
) a
""")

_UNSENT = sql.SQL("""
with r as (
    select r.*, d.deferred_reason as before
    from unnest(
        %s::uuid[], %s::uuid[], %s::uuid[], %s::int2[], %s::text[], %s::float8[], %s::text[], %s::timestamptz[],
        %s::int4[], %s::text[]
    ) as r(id, endpoint_id, token, next_status, reason, wait, deferred, at, generation, worker)
    join relay.deliveries d on d.id = any(array[r.id]) and d.lease_token = r.token and d.status + 0 = 1
),
u as (
    update relay.deliveries d
    set status = r.next_status, reason = r.reason, lease_token = null, lease_until = null, announced_at = null,
        attempt_count = d.attempt_count - 1,
        due_at = case when r.next_status <> 0 then d.due_at
            when r.wait is null then null
            else least(now() + make_interval(secs => r.wait), d.expires_at) end,
        finished_at = case when r.next_status = 0 then null else now() end,
        deferred_reason = r.deferred,
        deferred_since = case when r.deferred is null then null
            when r.deferred is distinct from r.before then now() else d.deferred_since end,
        deferred_count = case when r.deferred is null then 0
            when r.deferred is distinct from r.before then 1 else d.deferred_count + 1 end
    from r
    where d.id = any(array[r.id]) and d.lease_token = r.token and d.status + 0 = 1
    returning d.id, d.workspace_id, d.endpoint_id, d.event_id, d.event_type, d.attempt_count, r.token, r.at, r.generation,
        r.worker, r.deferred, r.before, r.reason
),
log as (
    -- One row for a run of deferrals, however long the run.
    insert into relay.delivery_attempts (delivery_id, lease_token, at, generation, class, code, worker)
    select id, token, at, generation, 3, deferred, worker from u
    where deferred is not null and deferred is distinct from before
)
select id, workspace_id, endpoint_id, event_id, event_type, attempt_count, deferred, reason,
    deferred is not null and deferred is distinct from before
from u
""")


def record(connection: sa.Connection, rows: Sequence[AttemptRow]) -> int:
    """Write finished attempts and their deliveries' next states; return how many the fence let through.

    A row whose token no longer matches writes nothing, not even an attempt.
    """
    columns = zip(*rows, strict=True)
    return run(
        connection, _RECORD, [arrays.column(pack, values) for pack, values in zip(_PACK, columns, strict=True)]
    ).rowcount


def recorded(connection: sa.Connection, rows: Sequence[AttemptRow]) -> set[tuple[UUID, UUID]]:
    """Return the (delivery, token) pairs of `rows` that stand in the log: those written before a reply was lost."""
    parameters = {
        "ids": [row.delivery_id for row in rows],
        "tokens": [row.lease_token for row in rows],
        "ats": [row.at for row in rows],
    }
    return {(row[0], row[1]) for row in run(connection, _RECORDED, parameters).fetchall()}


def record_unsent(connection: sa.Connection, rows: Sequence[UnsentRow]) -> list[GivenBack]:
    """Give leased rows back unsent, their attempt uncounted; return what became of those that the fence let through."""
    columns = list(zip(*rows, strict=True))
    cursor = run(
        connection, _UNSENT, [arrays.column(pack, values) for pack, values in zip(_PACK_UNSENT, columns, strict=False)]
    )
    return [GivenBack._make(row) for row in cursor.fetchall()]
