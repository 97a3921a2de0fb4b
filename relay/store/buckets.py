"""The fleet's token buckets: one narrow row an endpoint, taken from in one short statement of its own a batch.

On the endpoint's own row, inside the claim, the lock would serialise the workers; and a Redis that is flushed would grant
every burst anew. The table is unlogged, so taking waits for no disk; a crash empties it, and a missing row is an empty
bucket. What the statement must come to is written in relay/core/bucket.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from relay.core.bucket import ROUNDING, Demand, Grant
from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import sqlalchemy as sa

# In id order, so that two batches cannot wait for each other. A lock that was waited for shows the row as its holder
# left it, while now() is this statement's beginning: the seconds between may be negative, and count as none.
_TAKE = sql.SQL("""
with locked as materialized (
    select b.endpoint_id, b.tokens, b.refilled_at, b.slots_generation, w.rate, 1 / w.rate as gap, w.burst, w.waited,
        w.fresh, w.held, w.held_s, w.generation,
        case when w.generation > b.slots_generation or b.slots_until <= now() then null
            else extract(epoch from b.slots_until - now())::float8 end as ahead
    from unnest(
        %(ids)s::uuid[], %(rates)s::float8[], %(bursts)s::float8[], %(waited)s::int4[], %(fresh)s::int4[],
        %(held)s::int4[], %(held_s)s::float8[], %(generations)s::int8[]
    ) as w(id, rate, burst, waited, fresh, held, held_s, generation)
    join relay.endpoint_buckets b on b.endpoint_id = any(array[w.id])
    order by w.id for no key update of b
),
filled as (
    select *, least(burst, tokens + rate * greatest(0, extract(epoch from now() - refilled_at)::float8)) as level
    from locked
),
first as (
    select *, least(waited, greatest(0, floor(level + %(rounding)s)))::int4 as go_waited from filled
),
tokens as (
    select *, case when ahead is not null then 0
        else least(fresh, greatest(0, floor(level + %(rounding)s) - go_waited)) end::int4 as go_fresh
    from first
),
queue as (
    select *, level - go_waited - go_fresh as left_over, waited + fresh - go_waited - go_fresh as queued,
        greatest(greatest(0, 1 - (level - go_waited - go_fresh)) * gap, ahead + gap) as slot_s
    from tokens
),
after_queue as (
    select *, case when queued > 0 then slot_s + (queued - 1) * gap else ahead end as ahead_2 from queue
),
held as (
    select *, greatest(held_s, ahead_2 + gap) as first_held_s from after_queue
),
done as (
    select *, case when held > 0 then first_held_s + (held - 1) * gap else ahead_2 end as ahead_3 from held
)
update relay.endpoint_buckets b
set tokens = d.left_over, refilled_at = greatest(now(), b.refilled_at),
    slots_until = now() + make_interval(secs => d.ahead_3),
    slots_generation = greatest(d.generation, b.slots_generation)
from done d where b.endpoint_id = any(array[d.endpoint_id])
returning b.endpoint_id, d.go_waited, d.go_fresh, d.slot_s, d.first_held_s
""")

# The usual case, at half the cost: nothing queues, nothing is held, and there is a token for all. It waits for each
# row's lock as it comes to it, so the ids must come in their order, which is also that of the statement above.
_TAKE_ALL = sql.SQL("""
update relay.endpoint_buckets b
set tokens = least(w.burst, b.tokens + w.rate * greatest(0, extract(epoch from now() - b.refilled_at)::float8)) - w.fresh,
    refilled_at = greatest(now(), b.refilled_at),
    slots_until = null,
    slots_generation = greatest(w.generation, b.slots_generation)
from unnest(%(ids)s::uuid[], %(rates)s::float8[], %(bursts)s::float8[], %(fresh)s::int4[], %(generations)s::int8[])
    as w(id, rate, burst, fresh, generation)
where b.endpoint_id = any(array[w.id])
    and (b.slots_until is null or b.slots_until <= now() or w.generation > b.slots_generation)
    and least(w.burst, b.tokens + w.rate * greatest(0, extract(epoch from now() - b.refilled_at)::float8))
        + %(rounding)s >= w.fresh
returning b.endpoint_id, greatest(0, 1 - b.tokens) / w.rate
""")

_MAKE_EMPTY = sql.SQL("""
insert into relay.endpoint_buckets (endpoint_id, tokens, refilled_at)
select p.id, 0, now() from relay.endpoints p where p.id = any(%(ids)s)
order by p.id on conflict do nothing
""")

_QUEUE_UNTIL = sql.SQL("""
insert into relay.endpoint_buckets (endpoint_id, tokens, refilled_at, slots_until, slots_generation)
values (%(id)s, 0, now(), now() + make_interval(secs => %(secs)s), %(generation)s)
on conflict (endpoint_id) do update set slots_until = excluded.slots_until,
    slots_generation = greatest(endpoint_buckets.slots_generation, excluded.slots_generation)
""")


def take(connection: sa.Connection, demands: Mapping[UUID, Demand]) -> dict[UUID, Grant]:
    """Take tokens and slots for a batch, by endpoint; what is not in the answer has no endpoint any more.

    For an autocommit connection: the row locks end with the statement. There may be two, and where the second fails what
    the first took is gone: too few sends for a moment, and never too many.
    """
    plain = {id_: want for id_, want in demands.items() if not want.waited and not want.held}
    grants = _take_all(connection, plain) if plain else {}
    if len(grants) == len(demands):
        return grants
    grants |= _take(connection, {id_: want for id_, want in demands.items() if id_ not in grants})
    missing = [id_ for id_ in demands if id_ not in grants]
    if missing:
        # The database crashed, or an endpoint was deleted for good.
        run(connection, _MAKE_EMPTY, {"ids": arrays.uuids(missing)})
        grants |= _take(connection, {id_: demands[id_] for id_ in missing})
    return grants


def queue_until(connection: sa.Connection, endpoint_id: UUID, *, secs: float, generation: int) -> None:
    """Have new rows queue behind those that were just spread over the next `secs` seconds."""
    run(connection, _QUEUE_UNTIL, {"id": endpoint_id, "secs": float(secs), "generation": generation})


def _take_all(connection: sa.Connection, demands: Mapping[UUID, Demand]) -> dict[UUID, Grant]:
    """Take what fresh rows want, for those endpoints alone that have all of it; the others are as they were."""
    ids = sorted(demands, key=_number)
    wants = [demands[id_] for id_ in ids]
    rows = run(
        connection,
        _TAKE_ALL,
        {
            "ids": arrays.uuids(ids),
            "rates": arrays.column(arrays.nullable_float8s, [want.rate for want in wants]),
            "bursts": arrays.column(arrays.nullable_float8s, [want.burst for want in wants]),
            "fresh": arrays.int4s([want.fresh for want in wants]),
            "generations": arrays.column(arrays.int8s, [want.generation for want in wants]),
            "rounding": ROUNDING,
        },
    ).fetchall()
    return {id_: Grant(0, demands[id_].fresh, slot_s, demands[id_].held_s) for id_, slot_s in rows}


def _take(connection: sa.Connection, demands: Mapping[UUID, Demand]) -> dict[UUID, Grant]:
    wants = demands.values()
    rows = run(
        connection,
        _TAKE,
        {
            "ids": arrays.uuids(list(demands)),
            "rates": arrays.nullable_float8s([want.rate for want in wants]),
            "bursts": arrays.nullable_float8s([want.burst for want in wants]),
            "waited": arrays.int4s([want.waited for want in wants]),
            "fresh": arrays.int4s([want.fresh for want in wants]),
            "held": arrays.int4s([want.held for want in wants]),
            "held_s": arrays.nullable_float8s([want.held_s for want in wants]),
            "generations": arrays.int8s([want.generation for want in wants]),
            "rounding": ROUNDING,
        },
    ).fetchall()
    return {endpoint_id: Grant(waited, fresh, slot_s, held_s) for endpoint_id, waited, fresh, slot_s, held_s in rows}


def _number(id_: UUID) -> int:
    # As Postgres orders ids; comparing them as they are would be Python's work.
    return id_.int
