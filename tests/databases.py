"""A database for each test: migrated, empty and under a name of its own, most often one that an earlier test had.

To make a database takes the system some hundred new files, half a second of its time; to empty a small one takes
milliseconds. So a database is made once and handed on for as long as nothing tells it from a new one.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa
from psycopg import sql

from relay.store.migrate import upgrade

if TYPE_CHECKING:
    from collections.abc import Iterable

_TEMPLATE = "relay_template"
#: The most pages that a table keeps. The planner takes a table that nobody analysed for ten pages at least: up to there
#: it plans for a used table as for a new one.
_MAX_PAGES = 10
#: Seconds for sessions to end that somebody left behind.
_END_SECS = 10.0

#: Writes down in the database itself that its schema was changed, unless that was rolled back.
_WATCH = """
create schema tests;
create table tests.changes (tag text);
create function tests.note_change() returns event_trigger language plpgsql security definer as $$
begin
    insert into tests.changes values (tg_tag);
end
$$;
create event trigger note_change on ddl_command_end execute function tests.note_change();
create event trigger note_drop on sql_drop execute function tests.note_change();
"""
#: What emptying does not undo: another schema, settings of the database, statistics that the planner goes by, sequences.
_CHANGED = """
select exists (select from tests.changes)
    or exists (select from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase
        where d.datname = current_database())
    or exists (select from pg_statistic s join pg_class c on c.oid = s.starelid
        where c.relnamespace = 'relay'::regnamespace)
    or exists (select from pg_class where relnamespace = 'relay'::regnamespace and relkind in ('r', 't') and reltuples >= 0)
    or exists (select from pg_sequences where last_value is not null)
"""
#: Tables that hold something, or did, with their pages.
_USED = """
select relname, pg_relation_size(oid) / current_setting('block_size')::int from pg_class
where relnamespace = 'relay'::regnamespace and relkind = 'r' and pg_relation_size(oid) > 0
"""


class Databases:
    """The databases of one server; `url` is a database of it that nothing else is done in."""

    def __init__(self, url: str) -> None:
        self._url = sa.make_url(url)
        self._admin = psycopg.connect(url, autocommit=True)
        self._numbers = itertools.count(1)
        self._spare: list[str] = []
        #: What each table that is not empty from the start holds.
        self._seeds: dict[str, list[tuple[Any, ...]]] = {}

    def close(self) -> None:
        """Leave the server; what was made stays."""
        self._admin.close()

    def bare(self) -> str:
        """Make a database that nothing was done to yet; return its URL."""
        name = self._name()
        self._run("create database {} strategy file_copy", name)
        return self._url_of(name)

    def take(self) -> str:
        """Return the URL of an empty, migrated database that nobody else has."""
        if self._spare:
            return self._url_of(self._spare.pop())
        if not self._seeds:
            self._make_template()
        name = self._name()
        self._run("create database {} template {} strategy file_copy", name, _TEMPLATE)
        return self._url_of(name)

    def give_back(self, url: str) -> None:
        """End what is still connected, and keep the database for the next test if it can be made as good as new."""
        self._end_sessions(url)
        # Under another name, so that what a test left running finds no database instead of the next test's.
        name = self._name()
        try:
            self._run("alter database {} rename to {}", str(sa.make_url(url).database), name)
        except psycopg.errors.ObjectInUse:
            # What was left running connects again and again.
            self.drop(url)
            return
        if self._emptied(name):
            self._spare.append(name)
        else:
            self.drop(self._url_of(name))

    def drop(self, url: str) -> None:
        """Drop a database, whoever is connected."""
        self._run("drop database {} with (force)", str(sa.make_url(url).database))

    def _end_sessions(self, url: str) -> None:
        end = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
        deadline = time.monotonic() + _END_SECS
        while self._admin.execute(end, [sa.make_url(url).database]).fetchall() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _make_template(self) -> None:
        self._run("create database {} strategy file_copy", _TEMPLATE)
        url = self._url_of(_TEMPLATE)
        upgrade(url)
        with psycopg.connect(url, autocommit=True) as connection:
            used = [name for name, _pages in connection.execute(_USED)]
            self._seeds = _contents(connection, used)
            connection.execute(_WATCH)
            (changed,) = connection.execute(_CHANGED).fetchone() or (True,)
            assert not changed, "no database could be handed on: the template itself looks changed"

    def _emptied(self, name: str) -> bool:
        """Empty a database; false where that would not make it what it was."""
        with psycopg.connect(self._url_of(name), autocommit=True) as connection:
            (changed,) = connection.execute(_CHANGED).fetchone() or (True,)
            if changed or _contents(connection, self._seeds) != self._seeds:
                return False
            # Without triggers and foreign keys, in any order.
            connection.execute("set session_replication_role = replica")
            for table, pages in connection.execute(_USED).fetchall():
                if table not in self._seeds:
                    statement = "truncate relay.{} cascade" if pages > _MAX_PAGES else "delete from relay.{}"
                    connection.execute(sql.SQL(statement).format(sql.Identifier(table)))
        return True

    def _run(self, statement: str, *names: str) -> None:
        self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _name(self) -> str:
        return f"relay_test_{os.getpid()}_{next(self._numbers)}"

    def _url_of(self, name: str) -> str:
        return self._url.set(database=name).render_as_string(hide_password=False)


def _contents(connection: psycopg.Connection, tables: Iterable[str]) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of tables as text, in order."""
    query = "select t::text from relay.{} t order by 1"
    return {table: connection.execute(sql.SQL(query).format(sql.Identifier(table))).fetchall() for table in tables}
