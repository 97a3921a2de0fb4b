"""Counts of what deliveries came to, by endpoint and minute: for an endpoint's page and the operator's plots.

They are added up in the workers and written some seconds late, so that a success writes nothing to its endpoint's row.
What a worker that is killed had not written is lost: the log of attempts is the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import sqlalchemy as sa

# In key order: two workers write the same endpoints' minutes. One that was deleted for good meanwhile is passed over;
# the `offset` keeps the look at each apart, so that they are never all read.
_ADD = sql.SQL("""
insert into relay.endpoint_minutes as m (endpoint_id, minute, successes, retryable_failures, permanent_failures,
    deferrals, last_success_at, last_failure_at)
select r.id, date_trunc('minute', to_timestamp(r.minute * 60), 'UTC'), r.successes, r.retryable, r.permanent,
    r.deferrals, to_timestamp(r.success_at), to_timestamp(r.failure_at)
from unnest(%s::uuid[], %s::int4[], %s::int4[], %s::int4[], %s::int4[], %s::int4[], %s::float8[], %s::float8[])
    as r(id, minute, successes, retryable, permanent, deferrals, success_at, failure_at)
cross join lateral (select from relay.endpoints where id = r.id offset 0) p
order by r.id, r.minute
on conflict (endpoint_id, minute) do update set
    successes = m.successes + excluded.successes,
    retryable_failures = m.retryable_failures + excluded.retryable_failures,
    permanent_failures = m.permanent_failures + excluded.permanent_failures,
    deferrals = m.deferrals + excluded.deferrals,
    last_success_at = greatest(m.last_success_at, excluded.last_success_at),
    last_failure_at = greatest(m.last_failure_at, excluded.last_failure_at)
""")


class MinuteCounts(NamedTuple):
    """What to add to one endpoint's minute."""

    endpoint_id: UUID
    #: Minutes since the Unix epoch.
    minute: int
    successes: int
    retryable_failures: int
    permanent_failures: int
    deferrals: int
    #: Unix seconds; None where there was none.
    last_success_at: float | None
    last_failure_at: float | None


def add(connection: sa.Connection, counts: Sequence[MinuteCounts]) -> None:
    """Add to the counts."""
    columns = list(zip(*counts, strict=True))
    packed = [arrays.uuids(columns[0]), *(arrays.int4s(column) for column in columns[1:6])]
    run(connection, _ADD, [*packed, *(arrays.nullable_float8s(column) for column in columns[6:])])
