"""The tests' own databases: what is handed on from test to test is as good as new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.store.ids import new_id
from tests.rows import Rows

if TYPE_CHECKING:
    from tests.databases import Databases

_OID = "select oid from pg_database where datname = current_database()"
_TABLES = "select relname from pg_class where relnamespace = 'relay'::regnamespace and relkind in ('r', 'p')"


def _oid(url: str) -> int:
    with psycopg.connect(url) as connection:
        return int((connection.execute(_OID).fetchone() or (0,))[0])


def _counts(url: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        names = [name for (name,) in connection.execute(_TABLES)]
        return {
            name: (connection.execute(f"select count(*) from relay.{name}".encode()).fetchone() or (0,))[0]
            for name in names
        }


def test_a_used_database_is_handed_on_empty(databases: Databases) -> None:
    """The next one gets the same database, under another name and with its rows gone, while somebody was connected."""
    url = databases.take()
    fresh, oid = _counts(url), _oid(url)
    left = psycopg.connect(url)
    with Rows(url) as rows:
        # Few rows are deleted; more than fill ten pages are truncated.
        rows.deliveries(rows.endpoint(), 2000)
        rows.sql("insert into relay.sweeps (name, started_at) values ('x', now())")
    assert _counts(url) != fresh

    databases.give_back(url)
    again = databases.take()

    assert (_oid(again), _counts(again)) == (oid, fresh)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)
    with pytest.raises(psycopg.OperationalError):
        left.execute("select 1")
    left.close()
    databases.give_back(again)


@pytest.mark.parametrize(
    "change",
    [
        "alter table relay.deliveries rename to other; alter table relay.other rename to deliveries",
        "drop index relay.deliveries_leased",
        "analyze relay.workspaces",
        "vacuum relay.workspaces",
        "update relay.schema_info set version = 99",
        "do $$ begin execute format('alter database %I set synchronous_commit = off', current_database()); end $$",
    ],
)
def test_a_changed_database_is_dropped(databases: Databases, change: str) -> None:
    """Whatever emptying does not undo ends a database."""
    url = databases.take()
    oid = _oid(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into relay.workspaces (id, name) values (%s, 'a')", [new_id()])
        connection.execute(change.encode())

    databases.give_back(url)
    again = databases.take()

    assert _oid(again) != oid
    databases.give_back(again)
