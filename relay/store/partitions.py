"""The day partitions of `delivery_attempts`: made ahead, so that an attempt never lacks its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from relay.core.days import bounds, days_ahead, partition_name

if TYPE_CHECKING:
    from datetime import date

#: Days made ahead of today.
DAYS_AHEAD = 14

_EXISTING = sa.text("""
select c.relname from pg_inherits i
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


def ensure_ahead(connection: sa.Connection) -> int:
    """Make and attach the partitions of today and the next fortnight that are missing; return how many.

    Call it within a transaction, under the sweep's lock. A table is made beside the parent and then attached, which
    lets inserts go on; a lock that does not come within the session's lock_timeout raises, to be tried again.
    """
    present = existing(connection)
    made = 0
    for day in days_ahead(today(connection), DAYS_AHEAD):
        name = partition_name(day)
        if name in present:
            continue
        start, end = bounds(day)
        connection.exec_driver_sql(f"create table relay.{name} (like relay.delivery_attempts including all)")
        connection.exec_driver_sql(
            f"alter table relay.delivery_attempts attach partition relay.{name} for values from ('{start}') to ('{end}')"
        )
        made += 1
    return made
