"""What is dropped, and when: rows by the batch, judged by the database's clock. Nothing that is owed is ever deleted.

No index is kept for this: each would cost every delivery on its way. Ids begin with the time they were made at
(RFC 9562 version 7), so the primary keys of deliveries, events and audit records are in the order of age, and a walk
from the low end looks at old rows alone. What it leaves there (pending rows, dead ones within their window) it passes
over again next time; that is an index scan.

Every function takes an autocommit connection of the hot pool and one batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from psycopg import sql

from relay.store.engine import run

if TYPE_CHECKING:
    import sqlalchemy as sa

#: Before every id.
START = UUID(int=0)

# The id that a row made so long ago would have at the least.
_BOUND = """
(lpad(to_hex((extract(epoch from now() - make_interval(days => {days})) * 1000)::bigint), 12, '0')
    || repeat('0', 20))::uuid
"""

_DELIVERIES = sql.SQL(f"""
with looked as materialized (
    select id, status, finished_at from relay.deliveries
    where id > %(after)s and id < {_BOUND.format(days="least(%(delivered)s::int, %(dead)s::int)")}
    order by id limit %(limit)s
),
gone as (
    delete from relay.deliveries d using looked l
    where d.id = l.id and (
        (l.status in (2, 4) and d.status + 0 = l.status and l.finished_at < now() - make_interval(days => %(delivered)s))
        or (l.status = 3 and d.status + 0 = 3 and l.finished_at < now() - make_interval(days => %(dead)s)))
    returning d.id
)
select (select count(*) from looked)::int, (select count(*) from gone)::int,
    (select id from looked order by id desc limit 1)
""")

_EVENTS = sql.SQL(f"""
with looked as materialized (
    select id, delivery_ids from relay.events
    where id > %(after)s and id < {_BOUND.format(days="%(days)s::int")}
    order by id limit %(limit)s
),
gone as (
    delete from relay.events e using looked l
    where e.id = l.id
      and not exists (select 1 from unnest(l.delivery_ids) as x(id) join relay.deliveries d on d.id = x.id)
    returning e.id
)
select (select count(*) from looked)::int, (select count(*) from gone)::int,
    (select id from looked order by id desc limit 1)
""")

_KEYS = sql.SQL("""
delete from relay.idempotency_keys k
using (
    select workspace_id, key from relay.idempotency_keys
    where created_at < now() - make_interval(secs => %(secs)s) order by created_at limit %(limit)s
) old
where k.workspace_id = old.workspace_id and k.key = old.key and k.created_at < now() - make_interval(secs => %(secs)s)
""")

_AUDIT = sql.SQL(f"""
delete from relay.audit_log where id in (
    select id from relay.audit_log where id < {_BOUND.format(days="%(days)s::int")} order by id limit %(limit)s)
""")

# By endpoint, along the primary key: the table is the endpoints' minutes, one after the other.
_MINUTES = sql.SQL("""
delete from relay.endpoint_minutes m
using (
    select o.endpoint_id, o.minute from relay.endpoints p
    cross join lateral (
        select endpoint_id, minute from relay.endpoint_minutes x
        where x.endpoint_id = p.id and x.minute < now() - make_interval(days => %(days)s)
        order by x.minute limit 2000
    ) o
    limit %(limit)s
) old
where m.endpoint_id = old.endpoint_id and m.minute = old.minute
""")

_SMALL = (
    sql.SQL("delete from relay.breaker_changes where at < now() - make_interval(days => %(days)s)"),
    sql.SQL("delete from relay.replays where finished_at < now() - make_interval(days => %(days)s)"),
    sql.SQL("delete from relay.heartbeats where beat_at < now() - make_interval(days => %(days)s)"),
)

# Implicit endpoints that no job has used, and deleted ones that nothing tells of any more.
_ENDPOINTS = sql.SQL("""
delete from relay.endpoints p
where (p.kind = 1 or p.deleted_at < now() - make_interval(days => %(days)s))
  and p.created_at < now() - make_interval(days => %(days)s)
  and not exists (select 1 from relay.deliveries d where d.endpoint_id = p.id)
  and not exists (select 1 from relay.replays r where r.endpoint_id = p.id)
""")


class Step(NamedTuple):
    """One batch of a walk."""

    looked: int
    deleted: int
    #: Where the next batch begins; None where nothing was left to look at.
    last: UUID | None


def drop_deliveries(connection: sa.Connection, *, after: UUID, delivered_days: int, dead_days: int, limit: int) -> Step:
    """Look at up to `limit` old deliveries behind `after`; delete those that ended longer ago than their window."""
    parameters = {"after": after, "delivered": delivered_days, "dead": dead_days, "limit": limit}
    return _step(connection, _DELIVERIES, parameters)


def drop_events(connection: sa.Connection, *, after: UUID, days: int, limit: int) -> Step:
    """Look at up to `limit` events older than `days`; delete those whose deliveries are all gone, or that had none."""
    return _step(connection, _EVENTS, {"after": after, "days": days, "limit": limit})


def drop_idempotency_keys(connection: sa.Connection, *, secs: float, limit: int) -> int:
    """Delete keys that are over. A key is judged when it is met, so this is for the room they take."""
    return run(connection, _KEYS, {"secs": float(secs), "limit": limit}).rowcount


def drop_audit(connection: sa.Connection, *, days: int, limit: int) -> int:
    """Delete audit records older than `days`."""
    return run(connection, _AUDIT, {"days": days, "limit": limit}).rowcount


def drop_minutes(connection: sa.Connection, *, days: int, limit: int) -> int:
    """Delete endpoints' counts of minutes older than `days`."""
    return run(connection, _MINUTES, {"days": days, "limit": limit}).rowcount


def drop_small(connection: sa.Connection, *, days: int) -> int:
    """Delete old changes of breakers, finished replay jobs and records of dead processes: few rows each."""
    return sum(run(connection, statement, {"days": days}).rowcount for statement in _SMALL)


def drop_endpoints(connection: sa.Connection, *, days: int) -> int:
    """Delete implicit endpoints that were not used for `days`, and deleted ones without deliveries."""
    return run(connection, _ENDPOINTS, {"days": days}).rowcount


def _step(connection: sa.Connection, statement: sql.SQL, parameters: dict[str, object]) -> Step:
    row = run(connection, statement, parameters).fetchone()
    return Step(0, 0, None) if row is None else Step._make(row)
