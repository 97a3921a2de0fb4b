"""Connection poolers: what Relay asks of a session holds only where the session is its own.

Time-outs, pinned plans, prepared statements and the locks under which one publisher works
belong to a session of Postgres. A pooler in session mode (PgBouncer's `pool_mode = session`)
gives a client one for as long as it is connected. In transaction mode each transaction runs in
whatever session is free: settings and locks would be somebody else's, and nothing would say so.
Startup parameters tell nothing, as poolers refuse them or drop them; so settings are made by a
statement, and a pooler is found by what it cannot know: the process behind its made-up key.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Connection = psycopg.Connection[tuple[Any, ...]]

#: What is wrong with pooling by transaction, and what to do: for whoever set DATABASE_URL.
REMEDY = (
    "DATABASE_URL leads through a connection pooler that does not keep a session for each connection (PgBouncer's "
    "pool_mode transaction or statement): Relay's time-outs, plans and locks would silently not hold there. Connect to "
    "Postgres directly, or set pool_mode=session for Relay's database or user in the pooler"
)


class Way(enum.StrEnum):
    """What stands between a client and Postgres."""

    #: Nothing that takes part in the protocol.
    DIRECT = "direct"
    #: A pooler that keeps a session for each client.
    SESSIONS = "sessions"
    #: A pooler that gives each transaction another session: Relay does not run through it.
    TRANSACTIONS = "transactions"


def way_through(connect: Callable[[], Connection]) -> Way:
    """Tell what is between here and Postgres, by two connections that `connect` makes; raises psycopg.Error."""
    with connect() as first:
        if not begin(first, {}):
            return Way.DIRECT
        with connect() as second:
            return Way.SESSIONS if keeps_sessions(first, second) else Way.TRANSACTIONS


def require_sessions(connect: Callable[[], Connection]) -> None:
    """Raise ConfigurationError where transactions of one connection run in several sessions; psycopg.Error as usual."""
    if way_through(connect) is Way.TRANSACTIONS:
        raise ConfigurationError(REMEDY)


def begin(connection: Connection, settings: Mapping[str, str]) -> bool:
    """Put the session's `settings` in force, in one round trip; return whether a pooler is in between.

    Postgres tells a client its process at login, for cancelling. A pooler has no process to tell when a client comes,
    and tells a number of its own.
    """
    asked = sql.SQL(", ").join(
        [
            sql.SQL("pg_catalog.pg_backend_pid()"),
            *(sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value) for name, value in settings.items()),
        ]
    )
    usual = connection.autocommit
    connection.autocommit = True
    row = connection.execute(sql.SQL("select {}").format(asked)).fetchone()
    connection.autocommit = usual
    return row is not None and row[0] != connection.pgconn.backend_pid


def keeps_sessions(first: Connection, second: Connection) -> bool:
    """Whether each of two connections stays with one session of Postgres over several transactions.

    Both hold a transaction at once, and end it in the one order and in the other. So where sessions go back to a pool
    in between, each gets the other's sooner or later, whether the pool hands out the last that came back or the first.
    """
    known: dict[int, int] = {}
    for last_to_end in (0, 0, 1, 1, 0, 1):
        pair = (first, second)
        for place, connection in enumerate(pair):
            connection.autocommit = True
            try:
                connection.execute("begin", prepare=False)
                # Not prepared: the other session would not know the statement.
                row = connection.execute("select pg_catalog.pg_backend_pid()", prepare=False).fetchone()
            except psycopg.errors.ProtocolViolation:
                # Pooling by statement knows no transactions.
                return False
            assert row is not None
            if known.setdefault(place, row[0]) != row[0]:
                return False
        pair[1 - last_to_end].execute("commit", prepare=False)
        pair[last_to_end].execute("commit", prepare=False)
    return True
