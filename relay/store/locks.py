"""Advisory locks by name, and the clock of the sweeps: what runs once in the whole fleet."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Seconds after which the server ends a session that holds a lock and asks for nothing. Longer than a sweep works on
#: its other connections, and a worker that was frozen in the middle of one keeps no other from it for ever.
LONGEST_SILENCE_SECS = 120.0

_TRY = sa.text("""
with tried as materialized (select pg_try_advisory_lock(hashtextextended('relay:' || :name, 0)) as held)
select held, case when held then set_config('idle_session_timeout', :silence_ms, false) end from tried
""")
_RELEASE = sa.text("""
select pg_advisory_unlock(hashtextextended('relay:' || :name, 0)), set_config('idle_session_timeout', '0', false)
""")

# Judged by the database's clock, so that ticks which piled up, or came from two beats, cost one row read.
_START = sa.text("""
insert into relay.sweeps as s (name, started_at) values (:name, clock_timestamp())
on conflict (name) do update set started_at = excluded.started_at
where s.started_at < clock_timestamp() - make_interval(secs => :shortest)
    -- One that stopped before its end goes on at the next tick.
    or (s.finished_at > s.started_at and s.counts ->> 'yielded' = '1')
returning (select extract(epoch from clock_timestamp() - old.started_at)::float8
           from relay.sweeps old where old.name = :name)
""")
_FINISH = sa.text("update relay.sweeps set finished_at = clock_timestamp(), counts = :counts where name = :name")


@contextmanager
def advisory_lock(
    engine: sa.Engine, name: str, *, silence_secs: float = LONGEST_SILENCE_SECS
) -> Iterator[sa.Connection | None]:
    """Hold the session lock `name` on a connection of its own; yield that connection, or None where another has it.

    The lock ends with its connection: who works under it for long works on that connection, so as to notice. The server
    ends it once the holder has asked for nothing for `silence_secs`: a process that is frozen keeps its connections.
    """
    with engine.connect() as connection:
        row = connection.execute(_TRY, {"name": name, "silence_ms": str(int(silence_secs * 1000))}).one()
        connection.commit()
        held = bool(row[0])
        try:
            yield connection if held else None
        finally:
            if held and not connection.invalidated:
                try:
                    connection.rollback()
                    connection.execute(_RELEASE, {"name": name})
                    connection.commit()
                except sa.exc.DBAPIError:
                    # The session is gone or unsure: the lock must not live on in the pool.
                    connection.invalidate()


def start_sweep(connection: sa.Connection, name: str, *, interval_secs: float) -> float | None:
    """Note that sweep `name` starts; return the seconds since it last did (infinite: never).

    None where it started less than half an interval ago and came to its end: there is nothing to do.
    """
    row = connection.execute(_START, {"name": name, "shortest": interval_secs / 2}).one_or_none()
    connection.commit()
    if row is None:
        return None
    return float("inf") if row[0] is None else float(row[0])


def finish_sweep(connection: sa.Connection, name: str, counts: Mapping[str, int]) -> None:
    """Note what sweep `name` did."""
    connection.execute(_FINISH, {"name": name, "counts": Jsonb(dict(counts))})
    connection.commit()
