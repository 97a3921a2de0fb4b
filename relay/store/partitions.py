"""The day partitions of `delivery_attempts`: made ahead, so that an attempt never lacks its place, and dropped when old.

A default partition takes what has no day: it should stay empty, because a day whose rows lie in it cannot be made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import sqlalchemy as sa

from relay.core.days import bounds, days_ahead, parse_partition_name, partition_name

if TYPE_CHECKING:
    from datetime import date

#: Days made ahead of today.
DAYS_AHEAD = 14
DEFAULT = "delivery_attempts_default"
#: What waits for an exclusive lock on the log holds up all recording behind it: it gives up soon, to be tried again.
LOCK_TIMEOUT = "500ms"
#: For moving rows out of the default partition, during which recording waits, as long as its own lock time-out lets it.
MOVE_TIMEOUT = "60s"

_EXISTING = sa.text("""
select c.relname from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'relay.delivery_attempts'::regclass
""")


_SIZES = sa.text("""
select c.relname, pg_total_relation_size(c.oid) as bytes from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'relay.delivery_attempts'::regclass
""")


def existing(connection: sa.Connection) -> set[str]:
    """Return the names of the attached partitions, the default one among them."""
    return {row[0] for row in connection.execute(_EXISTING)}


def today(connection: sa.Connection) -> date:
    """Return the day in UTC by the database's clock."""
    value: date = connection.execute(sa.text("select (now() at time zone 'UTC')::date")).scalar_one()
    return value


def sizes(connection: sa.Connection) -> dict[str, int]:
    """Return the bytes of each attached partition with its indexes, the default one among them."""
    return {row.relname: row.bytes for row in connection.execute(_SIZES)}


def default_rows(connection: sa.Connection) -> int:
    """Return how many rows lie in the default partition: 0 when all is well."""
    return int(connection.execute(sa.text(f"select count(*) from relay.{DEFAULT}")).scalar_one())


def older_than(connection: sa.Connection, days: int) -> list[str]:
    """Return the partitions all of whose attempts are older than `days`, the oldest first."""
    first_kept = today(connection) - timedelta(days=days)
    named = ((parse_partition_name(name), name) for name in existing(connection))
    return [name for day, name in sorted((day, name) for day, name in named if day is not None) if day < first_kept]


def drop(connection: sa.Connection, name: str) -> None:
    """Drop a partition, within a transaction. Raises OperationalError where its lock does not come soon."""
    assert parse_partition_name(name) is not None, "only days are dropped"
    connection.exec_driver_sql(f"set local lock_timeout = '{LOCK_TIMEOUT}'")
    # The parent first, as recording takes them.
    connection.exec_driver_sql("lock table relay.delivery_attempts in access exclusive mode")
    connection.exec_driver_sql(f"drop table relay.{name}")


def empty_default(connection: sa.Connection) -> int:
    """Move what lies in the default partition into its days, within one transaction; return how many rows.

    Detach, make the days, move, attach: with the default partition attached, Postgres refuses to make a day of which it
    holds rows. Recording waits meanwhile. Raises OperationalError where the lock does not come soon.
    """
    if not connection.execute(sa.text(f"select exists (select 1 from relay.{DEFAULT})")).scalar_one():
        return 0
    connection.exec_driver_sql(f"set local lock_timeout = '{LOCK_TIMEOUT}'")
    connection.exec_driver_sql(f"set local statement_timeout = '{MOVE_TIMEOUT}'")
    connection.exec_driver_sql("lock table relay.delivery_attempts in access exclusive mode")
    connection.exec_driver_sql(f"alter table relay.delivery_attempts detach partition relay.{DEFAULT}")
    days = connection.execute(sa.text(f"select distinct (at at time zone 'UTC')::date from relay.{DEFAULT}")).scalars()
    present = existing(connection)
    for day in days.all():
        if partition_name(day) not in present:
            _make(connection, day)
    moved = connection.exec_driver_sql(
        f"insert into relay.delivery_attempts select * from relay.{DEFAULT} on conflict do nothing"
    ).rowcount
    connection.exec_driver_sql(f"truncate relay.{DEFAULT}")
    connection.exec_driver_sql(f"alter table relay.delivery_attempts attach partition relay.{DEFAULT} default")
    return moved


def ensure_ahead(connection: sa.Connection) -> int:
    """Make and attach the partitions of today and the next fortnight that are missing; return how many.

    Call it within a transaction, under the sweep's lock. A table is made beside the parent and then attached, which
    lets inserts go on; a lock that does not come within the session's lock_timeout raises, to be tried again.
    """
    present = existing(connection)
    made = 0
    for day in days_ahead(today(connection), DAYS_AHEAD):
        if partition_name(day) in present:
            continue
        _make(connection, day)
        made += 1
    return made


def _make(connection: sa.Connection, day: date) -> None:
    name = partition_name(day)
    start, end = bounds(day)
    connection.exec_driver_sql(f"create table relay.{name} (like relay.delivery_attempts including all)")
    connection.exec_driver_sql(
        f"alter table relay.delivery_attempts attach partition relay.{name} for values from ('{start}') to ('{end}')"
    )
