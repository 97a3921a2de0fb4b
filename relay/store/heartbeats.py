"""Who is alive: a row a process, beaten every few seconds, judged by the database's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

#: Seconds between two beats.
BEAT_SECS = 5.0

_BEAT = sa.text("""
insert into relay.heartbeats (process_id, role, host, pid, release, details)
values (:process_id, :role, :host, :pid, :release, :details)
on conflict (process_id) do update set beat_at = now(), details = excluded.details
""")
_LEAVE = sa.text("delete from relay.heartbeats where process_id = :process_id")
_AGES = sa.text("""
select role, min(extract(epoch from now() - beat_at))::float8 from relay.heartbeats group by role
""")
_LIVE = sa.text("""
select role, host, pid, details from relay.heartbeats
where beat_at > now() - make_interval(secs => :within) order by role, host, pid
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a process says of itself."""

    process_id: UUID
    role: str
    host: str
    pid: int
    release: str


def beat(connection: sa.Connection, process: Process, details: Mapping[str, object]) -> None:
    """Say that `process` is alive."""
    connection.execute(
        _BEAT,
        {
            "process_id": process.process_id,
            "role": process.role,
            "host": process.host,
            "pid": process.pid,
            "release": process.release,
            "details": Jsonb(dict(details)),
        },
    )


def leave(connection: sa.Connection, process: Process) -> None:
    """Take the row of a process that ends in good order."""
    connection.execute(_LEAVE, {"process_id": process.process_id})


def youngest_ages(connection: sa.Connection) -> dict[str, float]:
    """Return, by role, the seconds since any process of that role last beat."""
    return {row[0]: float(row[1]) for row in connection.execute(_AGES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A process that beat lately, and what it said."""

    role: str
    host: str
    pid: int
    details: Mapping[str, object]


def live(connection: sa.Connection, *, within_secs: float) -> list[LiveProcess]:
    """Return the processes that beat within so many seconds."""
    rows = connection.execute(_LIVE, {"within": within_secs}).mappings()
    return [LiveProcess(**row) for row in rows]
