"""Requests to move an endpoint's waiting rows: asked for with what makes it due, carried out by the sweep `wake`.

A call that enables an endpoint, resets its breaker or raises its rate may have a hundred thousand rows to move. It
asks in its own transaction, so that the request is there exactly if the change is, and the rows move in batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import sqlalchemy as sa
from psycopg import sql

from relay.core.model import DeadReason, Status
from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

# One request an endpoint; a second one adds to the first. What ends rows wins over what brings them forward.
_ASK = sa.text("""
insert into relay.wakes (endpoint_id, retries_too, ends_as) values (:endpoint_id, :retries_too, :ends_as)
on conflict (endpoint_id) do update set
    retries_too = wakes.retries_too or excluded.retries_too,
    ends_as = coalesce(excluded.ends_as, wakes.ends_as),
    -- What is to end was pending when that was asked for, whatever is asked for since.
    asked_at = case when excluded.ends_as is null and wakes.ends_as is not null then wakes.asked_at
        else clock_timestamp() end
""")

_ASKED = sa.text("""
select w.endpoint_id, w.retries_too, w.ends_as, w.asked_at, p.enabled and p.deleted_at is null as active,
    p.rate_per_second, p.breaker_generation,
    greatest(0, extract(epoch from p.held_until - now()),
        case p.breaker_state when 1 then extract(epoch from p.breaker_open_until - now()) end)::float8 as from_s
from relay.wakes w join relay.endpoints p on p.id = w.endpoint_id
order by w.asked_at limit :limit
""")

_ANY = sql.SQL("select 1 from relay.wakes limit 1")

_DONE = sa.text("delete from relay.wakes where endpoint_id = :endpoint_id and asked_at = :asked_at")

# Paused rows first, then in the order that they would have come back in.
_WAITING = sql.SQL("""
select id from relay.deliveries
where endpoint_id = %(id)s and status = 0 and (attempt_count > 0 or deferred_reason is not null)
  and (due_at > now() or due_at is null) and (%(retries_too)s or deferred_reason is not null)
order by due_at nulls first, id limit %(limit)s
""")

_MOVE = sql.SQL("""
with r as (
    select d.id, r.wait from unnest(%(ids)s::uuid[], %(waits)s::float8[]) as r(id, wait)
    join relay.deliveries d on d.id = any(array[r.id])
    where d.status + 0 = 0 and (d.due_at > now() or d.due_at is null)
    order by r.id for no key update of d
)
update relay.deliveries d
set due_at = least(now() + make_interval(secs => r.wait), d.expires_at), announced_at = null, lease_token = null
from r where d.id = any(array[r.id])
""")

# All that is pending: what waits, by its endpoint; what has only just come, among all that has, by the indexes of the
# outbox. Rows that somebody holds are passed over: they are being claimed, or marked, and the next run finds them.
_PENDING = """
    (select id from relay.deliveries
     where endpoint_id = %(id)s and status = 0 and (attempt_count > 0 or deferred_reason is not null)
       and created_at <= %(before)s limit %(limit)s)
    union all
    (select id from relay.deliveries
     where status = 0 and announced_at is null and endpoint_id = %(id)s and attempt_count = 0
       and deferred_reason is null and created_at <= %(before)s limit %(limit)s)
    union all
    (select id from relay.deliveries
     where status = 0 and announced_at is not null and endpoint_id = %(id)s and attempt_count = 0
       and deferred_reason is null and created_at <= %(before)s limit %(limit)s)
"""
_STILL_PENDING = sql.SQL(_PENDING)
_END = sql.SQL(f"""
with pending as ({_PENDING}),
locked as (
    select id from relay.deliveries
    where id = any(array(select id from pending)) and status + 0 = 0
    order by id limit %(limit)s for no key update skip locked
)
update relay.deliveries d
set status = %(status)s, reason = %(reason)s, finished_at = now(), announced_at = null, lease_token = null
from locked l where d.id = any(array[l.id])
returning d.id
""")

_SLEEPERS = sa.text("""
select p.id from relay.endpoints p
where p.enabled and p.deleted_at is null and exists (
    select 1 from relay.deliveries d
    where d.endpoint_id = p.id and d.status = 0 and (d.attempt_count > 0 or d.deferred_reason is not null)
      and d.due_at is null)
limit :limit
""")


# A paused row has no due time, so nothing else would come upon its expiry.
_RIPEN = sql.SQL("""
with over as (
    select x.id from relay.endpoints p
    cross join lateral (
        select d.id from relay.deliveries d
        where d.endpoint_id = p.id and d.status = 0 and (d.attempt_count > 0 or d.deferred_reason is not null)
          and d.due_at is null and d.expires_at <= now()
        limit %(limit)s
    ) x
    where not p.enabled and p.deleted_at is null
    limit %(limit)s
),
locked as (
    select d.id from relay.deliveries d join over o on d.id = any(array[o.id])
    where d.status + 0 = 0 and d.due_at is null order by o.id for no key update of d skip locked
)
update relay.deliveries d set due_at = now(), announced_at = null, lease_token = null
from locked l where d.id = any(array[l.id])
""")


class Wake(NamedTuple):
    """A request, and what its endpoint says to it."""

    endpoint_id: UUID
    retries_too: bool
    #: The status that pending rows end in; None: they are brought forward.
    ends_as: Status | None
    asked_at: datetime
    #: Whether the endpoint is enabled and not deleted.
    active: bool
    rate_per_second: float
    breaker_generation: int
    #: Seconds from now before which nothing may go: a hold, or an open breaker.
    from_s: float


def ask_to_bring_forward(connection: sa.Connection, endpoint_id: UUID, *, retries_too: bool = False) -> None:
    """Have the endpoint's held-back rows come back at its rate from now on; `retries_too` takes all that wait."""
    connection.execute(_ASK, {"endpoint_id": endpoint_id, "retries_too": retries_too, "ends_as": None})


def ask_to_end(connection: sa.Connection, endpoint_id: UUID, status: Status) -> None:
    """Have the endpoint's pending rows ended: dead with `endpoint_deleted`, or canceled."""
    connection.execute(_ASK, {"endpoint_id": endpoint_id, "retries_too": True, "ends_as": int(status)})


def any_asked(connection: sa.Connection) -> bool:
    """Say whether there is any request."""
    return run(connection, _ANY).fetchone() is not None


def asked(connection: sa.Connection, *, limit: int) -> list[Wake]:
    """Return up to `limit` requests, the oldest first."""
    wakes = map(Wake._make, connection.execute(_ASKED, {"limit": limit}))
    return [wake._replace(ends_as=None if wake.ends_as is None else Status(wake.ends_as)) for wake in wakes]


def done(connection: sa.Connection, wake: Wake) -> None:
    """Take a request away, unless it was made again since."""
    connection.execute(_DONE, {"endpoint_id": wake.endpoint_id, "asked_at": wake.asked_at})


def waiting_ids(connection: sa.Connection, wake: Wake, *, limit: int) -> list[UUID]:
    """Return the rows to bring forward, in the order that they should come back in."""
    parameters = {"id": wake.endpoint_id, "retries_too": wake.retries_too, "limit": limit}
    return [row[0] for row in run(connection, _WAITING, parameters).fetchall()]


def move(connection: sa.Connection, ids: Sequence[UUID], waits: Sequence[float]) -> int:
    """Make rows that wait due in so many seconds each; return how many still waited."""
    parameters = {"ids": arrays.uuids(ids), "waits": arrays.nullable_float8s(waits)}
    return run(connection, _MOVE, parameters).rowcount


def end(connection: sa.Connection, wake: Wake, *, limit: int) -> int:
    """End up to `limit` rows that were pending when it was asked for; return how many."""
    assert wake.ends_as is not None
    reason = DeadReason.ENDPOINT_DELETED.value if wake.ends_as is Status.DEAD else None
    parameters = {
        "id": wake.endpoint_id,
        "limit": limit,
        "before": wake.asked_at,
        "status": int(wake.ends_as),
        "reason": reason,
    }
    return len(run(connection, _END, parameters).fetchall())


def is_pending(connection: sa.Connection, wake: Wake) -> bool:
    """Say whether a row that was to be ended is pending still: somebody held it for a moment."""
    parameters = {"id": wake.endpoint_id, "limit": 1, "before": wake.asked_at}
    return run(connection, _STILL_PENDING, parameters).fetchone() is not None


def sleepers(connection: sa.Connection, *, limit: int) -> list[UUID]:
    """Return enabled endpoints that have paused rows: an enable was lost on them, or overtook their pause."""
    return list(connection.execute(_SLEEPERS, {"limit": limit}).scalars())


def ripen_expired(connection: sa.Connection, *, limit: int) -> int:
    """Make paused rows due whose time is over, so that the next claim ends them as expired; return how many."""
    return run(connection, _RIPEN, {"limit": limit}).rowcount
