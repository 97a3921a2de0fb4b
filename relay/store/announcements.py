"""The outbox is a condition, not a table: pending, due, not yet announced.

Whatever makes a row pending or moves its due time clears `announced_at`, so new
rows, retries, deferrals and rescued rows all come through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from psycopg import sql

from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence

# What is locked stays where it is, so the update finds it by its place; what moved before the lock waits for the next look.
_MARK = sql.SQL("""
with due as (
    select ctid as spot from relay.deliveries
    where status = 0 and announced_at is null and due_at <= now() and (due_at, id) > (%(due)s, %(id)s)
    order by due_at, id limit %(limit)s
    for update skip locked
)
update relay.deliveries d set announced_at = now()
from due where d.ctid = due.spot
returning d.id, d.due_at
""")

# `status + 0`: by primary key, not by the index of all announced rows.
_UNMARK = sql.SQL("""
update relay.deliveries set announced_at = null
where id = any(%(ids)s) and status + 0 = 0 and announced_at is not null
""")

_OVERDUE_ANNOUNCED = sql.SQL("""
with stale as (
    select ctid as spot from relay.deliveries
    where status = 0 and announced_at is not null and announced_at < %(before)s
    order by announced_at limit %(limit)s
    for update skip locked
)
update relay.deliveries d set announced_at = null
from stale where d.ctid = stale.spot and d.due_at <= now()
returning d.id
""")

_DUE = sql.SQL("""
(select id, due_at from relay.deliveries
 where status = 0 and announced_at is null and due_at <= now() - make_interval(secs => %(late)s)
 order by due_at limit %(limit)s)
union all
(select id, due_at from relay.deliveries
 where status = 0 and announced_at is not null and announced_at <= now() - make_interval(secs => %(late)s)
   and due_at <= now() - make_interval(secs => %(late)s)
 order by announced_at limit %(limit)s)
order by due_at limit %(limit)s
""")

_UNANNOUNCED = sql.SQL("""
select extract(epoch from now() - due_at)::float8 from relay.deliveries
where status = 0 and announced_at is null and due_at <= now() order by due_at limit 1
""")


class Place(NamedTuple):
    """A place in the order of due rows."""

    due_at: datetime
    id: UUID


#: Before every row.
START = Place(datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """Rows marked as announced, and the place of the last among them (None when there were none)."""

    ids: list[UUID]
    last: Place | None


def mark(connection: sa.Connection, *, after: Place, limit: int) -> Marked:
    """Mark up to `limit` due rows as announced, the longest due first, looking only behind `after`.

    Rows that somebody holds a lock on are passed over: a later call that begins before them finds them.
    """
    rows = run(connection, _MARK, {"due": after.due_at, "id": after.id, "limit": limit}).fetchall()
    last = max(rows, key=lambda row: (row[1], row[0]), default=None)
    return Marked(ids=[row[0] for row in rows], last=None if last is None else Place(last[1], last[0]))


def unmark(connection: sa.Connection, ids: Sequence[UUID]) -> None:
    """Take the mark back from rows whose hint could not be sent."""
    run(connection, _UNMARK, {"ids": list(ids)})


def unmark_overdue(connection: sa.Connection, *, before: datetime, limit: int) -> int:
    """Take the mark from due rows announced before `before`, so that they are announced again; return how many."""
    return len(run(connection, _OVERDUE_ANNOUNCED, {"before": before, "limit": limit}).fetchall())


def due_ids(connection: sa.Connection, *, late_secs: float, limit: int) -> list[UUID]:
    """Return ids of pending rows that are late by at least `late_secs`, announced or not, the longest due first.

    Locks nothing: the claim decides.
    """
    return [row[0] for row in run(connection, _DUE, {"late": late_secs, "limit": limit}).fetchall()]


def unannounced_secs(connection: sa.Connection) -> float:
    """Return how late the oldest due row is that nobody has heard of, in seconds; 0.0 where there is none."""
    row = run(connection, _UNANNOUNCED).fetchone()
    return 0.0 if row is None else max(0.0, float(row[0]))


def database_now(connection: sa.Connection) -> datetime:
    """Return the database's clock, the only one that due times and leases are judged by."""
    value: datetime = connection.execute(sa.text("select clock_timestamp()")).scalar_one()
    return value


def lateness_secs(connection: sa.Connection) -> float | None:
    """Return how late the oldest due pending row is, in seconds; None when nothing is due."""
    value = connection.execute(
        sa.text("""
            select extract(epoch from now() - least(
                (select due_at from relay.deliveries
                 where status = 0 and announced_at is null and due_at <= now() order by due_at limit 1),
                (select min(due_at) from (
                    select due_at from relay.deliveries
                    where status = 0 and announced_at is not null order by announced_at limit 100) announced
                 where due_at <= now())
            ))::float8
        """)
    ).scalar_one()
    return None if value is None else max(0.0, float(value))
