"""Workspaces' ingest rates: a token bucket each, shared by all API processes.

Taken from in a short statement of its own, before the ingest's, so that events do not wait for each other's commits.
The table is unlogged: nothing waits for the disk, and a crash of the database forgets who had spent what. A missing row
is a full bucket: this limit is a convenience, and to err on the side of taking an event costs little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from relay.store.engine import run

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

# now() is the statement's beginning, and may be before the time that a holder of the lock left: then nothing flowed in.
# The bucket holds a second's worth, one event at least. A batch goes in where there are as many tokens as it has
# events, or the bucket is full; its debt is what the next ones wait for. So in any span of t seconds no more go in than
# rate * t, a full bucket, and one batch.
_TAKE = sql.SQL("""
insert into relay.ingest_buckets as b (workspace_id, tokens, refilled_at)
values (
    %(workspace_id)s, greatest(%(rate)s::float8, 1) - %(count)s::int4, now()
)
on conflict (workspace_id) do update set
    tokens = least(greatest(%(rate)s::float8, 1),
        b.tokens + %(rate)s::float8 * greatest(0, extract(epoch from now() - b.refilled_at)::float8)) - %(count)s::int4,
    refilled_at = greatest(b.refilled_at, now())
where least(greatest(%(rate)s::float8, 1),
        b.tokens + %(rate)s::float8 * greatest(0, extract(epoch from now() - b.refilled_at)::float8))
    >= least(%(count)s::int4, greatest(%(rate)s::float8, 1))
returning true
""")
_WAIT = sql.SQL("""
select (least(%(count)s::int4, greatest(%(rate)s::float8, 1)) - tokens) / %(rate)s::float8
    - extract(epoch from now() - refilled_at)::float8
from relay.ingest_buckets where workspace_id = %(workspace_id)s
""")


def take(connection: sa.Connection, *, workspace_id: UUID, rate: float, count: int) -> float | None:
    """Take `count` events' tokens from the workspace's bucket, which fills at `rate` a second.

    Returns None when they were taken; else nothing was, and the seconds are returned after which they could be. For an
    autocommit connection: the row's lock must not be held while anything else is done.
    """
    parameters = {"workspace_id": workspace_id, "rate": rate, "count": count}
    if run(connection, _TAKE, parameters).fetchone() is not None:
        return None
    row = run(connection, _WAIT, parameters).fetchone()
    return 0.0 if row is None else max(0.0, float(row[0]))
