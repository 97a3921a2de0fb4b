"""Circuit breakers on their endpoints' rows: read, moved and written under the row's lock, rows in id order.

NO KEY UPDATE, because FOR UPDATE would wait for every ingest transaction's foreign key. A success on a healthy
endpoint writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from relay.core.breaker import Breaker
from relay.core.model import BreakerState
from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import sqlalchemy as sa

_LOCK = sql.SQL("""
select id, workspace_id, kind, url, deleted_at is not null, breaker_state, breaker_failures, breaker_trips,
    breaker_generation, extract(epoch from breaker_open_until - now())::float8,
    extract(epoch from probe_deadline - now())::float8, extract(epoch from held_until - now())::float8,
    failing_attempts, extract(epoch from now() - failing_since)::float8
from relay.endpoints where id = any(%(ids)s) order by id for no key update
""")

# Where a time did not change it stays as it was, to the microsecond; a new one is counted from now.
_SAVE = sql.SQL("""
with r as (
    select * from unnest(
        %s::uuid[], %s::int2[], %s::int4[], %s::int4[], %s::int8[], %s::float8[], %s::int4[], %s::bool[]
    ) as r(id, state, failures, trips, generation, open_s, failing_attempts, failing_begins)
),
changed as (
    insert into relay.breaker_changes (endpoint_id, generation, state, open_until)
    select r.id, r.generation, r.state, now() + make_interval(secs => r.open_s)
    from r join relay.endpoints p on p.id = any(array[r.id])
    where r.generation <> p.breaker_generation
    on conflict do nothing
)
update relay.endpoints p
set breaker_state = r.state, breaker_failures = r.failures, breaker_trips = r.trips,
    breaker_open_until = case when r.generation = p.breaker_generation then p.breaker_open_until
        else now() + make_interval(secs => r.open_s) end,
    probe_delivery_id = case when r.generation = p.breaker_generation then p.probe_delivery_id end,
    probe_deadline = case when r.generation = p.breaker_generation then p.probe_deadline end,
    breaker_generation = r.generation, failing_attempts = r.failing_attempts,
    failing_since = case when r.failing_attempts = 0 then null when r.failing_begins then now() else p.failing_since end
from r where p.id = any(array[r.id])
""")

_CLEAR_COUNTS = sql.SQL("""
with r as materialized (
    select p.id, r.succeeded, r.generation, r.succeeded and p.failing_attempts >= %(many)s as recovers
    from unnest(%(ids)s::uuid[], %(generations)s::int8[], %(succeeded)s::bool[]) as r(id, generation, succeeded)
    join relay.endpoints p on p.id = any(array[r.id])
    where (p.breaker_failures > 0 and p.breaker_state = 0 and p.breaker_generation = r.generation)
        or (r.succeeded and p.failing_attempts > 0)
    order by r.id for no key update of p
),
u as (
    update relay.endpoints p
    set breaker_failures = case when p.breaker_generation = r.generation then 0 else p.breaker_failures end,
        failing_attempts = case when r.succeeded then 0 else p.failing_attempts end,
        failing_since = case when r.succeeded then null else p.failing_since end
    from r where p.id = any(array[r.id]) and not r.recovers
)
select id from r where recovers
""")

_TRY_PROBE = sql.SQL("""
with p as (
    update relay.endpoints set breaker_state = 2, breaker_generation = breaker_generation + 1,
        probe_delivery_id = %(delivery)s, probe_deadline = now() + make_interval(secs => %(secs)s)
    where id = %(id)s
      and ((breaker_state = 1 and breaker_open_until <= now()) or (breaker_state = 2 and probe_deadline <= now()))
    returning id, breaker_generation
),
noted as (
    insert into relay.breaker_changes (endpoint_id, generation, state) select id, breaker_generation, 2 from p
    on conflict do nothing
)
select breaker_generation from p
""")

_HAND_BACK = sql.SQL("""
with b as (
    select id from relay.endpoints
    where id = any(%(ids)s) and breaker_state = 2 and probe_delivery_id = any(%(deliveries)s)
    order by id for no key update
),
p as (
    update relay.endpoints p set breaker_state = 1, breaker_open_until = now(), probe_delivery_id = null,
        probe_deadline = null, breaker_generation = p.breaker_generation + 1
    from b where p.id = any(array[b.id])
    returning p.id, p.breaker_generation
)
insert into relay.breaker_changes (endpoint_id, generation, state, open_until)
select id, breaker_generation, 1, now() from p on conflict do nothing
""")


class Answered(NamedTuple):
    """An endpoint that was answered for by results without a failure among them."""

    endpoint_id: UUID
    generation: int
    #: Whether one of the answers was a success.
    succeeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How an endpoint stands, its row locked."""

    endpoint_id: UUID
    workspace_id: UUID
    #: Made by its owner, and not implied by jobs.
    owned: bool
    url: str
    deleted: bool
    breaker: Breaker
    #: Seconds that a Retry-After hold lasts on; None or negative where there is none.
    held_s: float | None
    #: Attempts since its last success, none of which succeeded, and for how many seconds that has gone on.
    failing_attempts: int
    failing_s: float


def lock(connection: sa.Connection, endpoint_ids: Sequence[UUID]) -> list[Standing]:
    """Lock the endpoints' rows, in id order, until the transaction ends; return how they stand."""
    return [_standing(row) for row in run(connection, _LOCK, {"ids": arrays.uuids(endpoint_ids)}).fetchall()]


def save(connection: sa.Connection, states: Mapping[UUID, tuple[Breaker, int, bool]]) -> None:
    """Write states back: by endpoint the breaker, the failing attempts, and whether they begin now.

    The caller holds the rows' locks. A new generation is a change of state and goes into the history.
    """
    rows = [(id_, *state) for id_, state in states.items()]
    run(
        connection,
        _SAVE,
        [
            arrays.uuids([row[0] for row in rows]),
            arrays.int2s([row[1].state for row in rows]),
            arrays.int4s([row[1].failures for row in rows]),
            arrays.int4s([row[1].trips for row in rows]),
            arrays.int8s([row[1].generation for row in rows]),
            arrays.nullable_float8s([row[1].open_s for row in rows]),
            arrays.int4s([row[2] for row in rows]),
            arrays.bools([row[3] for row in rows]),
        ],
    )


def clear_counts(connection: sa.Connection, answered: Sequence[Answered], *, many: int) -> list[UUID]:
    """Set the counts of failures back for endpoints that answered. Touches rows whose counts are above 0 only.

    Returns the endpoints that succeeded after `many` attempts or more that failed, and leaves those as they are: what
    there is to tell of them belongs into one transaction with the change.
    """
    found = run(
        connection,
        _CLEAR_COUNTS,
        {
            "ids": arrays.uuids([one.endpoint_id for one in answered]),
            "generations": arrays.int8s([one.generation for one in answered]),
            "succeeded": arrays.bools([one.succeeded for one in answered]),
            "many": many,
        },
    )
    return [row[0] for row in found.fetchall()]


def try_probe(connection: sa.Connection, endpoint_id: UUID, *, delivery_id: UUID, secs: float) -> int | None:
    """Make a delivery the endpoint's one probe for so many seconds; return its generation, None where it is not to be.

    It is not where another got there first, or the cooldown is not over after all.
    """
    row = run(connection, _TRY_PROBE, {"id": endpoint_id, "delivery": delivery_id, "secs": float(secs)}).fetchone()
    return None if row is None else int(row[0])


def hand_back(connection: sa.Connection, probes: Mapping[UUID, UUID]) -> None:
    """Let another delivery probe: these (delivery to endpoint) were not sent, or what came says nothing."""
    run(
        connection,
        _HAND_BACK,
        {"ids": arrays.uuids(list(set(probes.values()))), "deliveries": arrays.uuids(list(probes))},
    )


def _standing(row: Sequence[Any]) -> Standing:
    id_, workspace_id, kind, url, deleted, state, failures, trips, generation, open_s, probe_s = row[:11]
    held_s, attempts, failing_s = row[11:]
    return Standing(
        endpoint_id=id_,
        workspace_id=workspace_id,
        owned=kind == 0,
        url=str(url),
        deleted=bool(deleted),
        breaker=Breaker(
            state=BreakerState(state),
            failures=failures,
            trips=trips,
            generation=generation,
            open_s=open_s,
            probe_s=probe_s,
        ),
        held_s=held_s,
        failing_attempts=attempts,
        failing_s=failing_s or 0.0,
    )
