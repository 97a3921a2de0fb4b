"""What the servers say that they did: statements from pg_stat_statements, round trips from Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    import redis

    from relay.loadtest.accounting import Connection

# The load test's own statements carry its name in a comment and are left out.
_STATEMENTS = """
select coalesce(sum(s.calls), 0)::bigint from pg_stat_statements s join pg_database d on d.oid = s.dbid
where d.datname = current_database() and s.query not like '%relay loadtest%'
"""


def enable_statements(connection: Connection) -> bool:
    """Make pg_stat_statements readable in this database; False where the server did not load it."""
    try:
        connection.execute("create extension if not exists pg_stat_statements  -- relay loadtest")
        connection.execute(_STATEMENTS)
    except psycopg.Error:
        return False
    return True


def statements(connection: Connection) -> int | None:
    """How many statements this database has run, transaction control among them; None where that is not counted."""
    try:
        row = connection.execute(_STATEMENTS).fetchone()
    except psycopg.Error:
        return None
    return None if row is None else int(row[0])


def round_trips(broker: redis.Redis) -> int | None:
    """How many replies the server has written: what waiting clients saw as round trips.

    A script counts once, and so does a pipeline that was answered in one piece. All clients of the server count,
    Celery's among them. None where the server does not keep the number (before Redis 7).
    """
    value = broker.info("stats").get("total_writes_processed")
    return None if value is None else int(value)
