"""The publisher's look: whether any row is due that nobody has heard of, asked fifty times a second for ever.

Through a cursor this one question took most of an idle installation's time. So it is prepared once
and sent by the driver's lowest layer; and it marks nothing, as an update costs Postgres the more
even where it finds no row.
"""

from __future__ import annotations

import itertools
import select
from typing import TYPE_CHECKING, Final, cast

import psycopg
from psycopg.pq import ExecStatus

from relay.store.announcements import START
from relay.store.engine import SILENCE_SECS, Row

if TYPE_CHECKING:
    from datetime import datetime

    import sqlalchemy as sa
    from psycopg.pq.abc import PGresult

# A range of the partial index whose condition this repeats.
_ANY_DUE: Final = b"""
select 1 from relay.deliveries
where status = 0 and announced_at is null and due_at <= now() and due_at >= $1::timestamptz limit 1
"""
#: A pooled connection may know the statement from an earlier lookout, and takes no name twice.
_numbers: Final = itertools.count(1)


class Lookout:
    """Looks over the connection that it was made on, which no other thread uses meanwhile."""

    def __init__(self, connection: sa.Connection) -> None:
        """Prepare the question on `connection`. Raises psycopg.OperationalError as `any_due` does."""
        self._connection = connection
        self._raw = cast("psycopg.Connection[Row]", connection.connection.driver_connection)
        self._pgconn = self._raw.pgconn
        self._name = b"relay_lookout_%d" % next(_numbers)
        self._readable = select.poll()
        self._readable.register(self._pgconn.socket, select.POLLIN)
        self._since = START.due_at
        self._since_text = b"-infinity"
        self._pgconn.send_prepare(self._name, _ANY_DUE)
        self._result(ExecStatus.COMMAND_OK)

    def any_due(self, since: datetime) -> bool:
        """Say whether a pending row that nobody has heard of is due, among those due at `since` or later.

        A row that somebody holds a lock on counts. Raises psycopg.OperationalError, the connection closed, for
        whatever goes wrong, and for silence of SILENCE_SECS.
        """
        if since != self._since:
            self._since = since
            self._since_text = b"-infinity" if since == START.due_at else since.isoformat().encode()
        self._pgconn.send_query_prepared(self._name, (self._since_text,))
        return self._result(ExecStatus.TUPLES_OK).ntuples > 0

    def _result(self, wanted: ExecStatus) -> PGresult:
        """Wait for the answer to what was just sent."""
        try:
            # A few bytes on a connection where nothing else is under way: they go out at once, or it is broken.
            if self._pgconn.flush() != 0:
                raise psycopg.OperationalError("the connection takes nothing")
            result = last = self._next_result()
            while last is not None:
                last = self._next_result()
            if result is None or result.status != wanted:
                said = b"" if result is None else result.error_message
                raise psycopg.OperationalError(said.decode("utf-8", "replace").strip() or "no answer")
        except psycopg.Error:
            # In whatever state it is: a new one is cheap. SQLAlchemy must be told, as it saw nothing of this.
            self._raw.close()
            self._connection.invalidate()
            self._connection.engine.dispose()
            raise
        return result

    def _next_result(self) -> PGresult | None:
        while self._pgconn.is_busy():
            if not self._readable.poll(SILENCE_SECS * 1000):
                raise psycopg.OperationalError(f"the database was silent for {SILENCE_SECS} s")
            self._pgconn.consume_input()
        return self._pgconn.get_result()
