"""Connections: how they are made, pooled and kept honest.

Two kinds. `make_engine` is for everything. `make_hot_engine` is for announcing,
claiming and recording: its sessions may only use index scans and nested loops,
and one generic plan a statement, so that a table that was empty, is full, or
was never analysed gets the same plan. (With free choice, a recording of 500
rows under stale statistics became a sequential scan in a loop: 2 s.)

That generic plan outlives the table it was made for: one made when the table held
sixty rows must not read all of it. So where a hot statement joins by key it says
`x.id = any(array[r.id])`. A plain equality would make the order of x's own index worth
something to the planner, and for a small table it then reads all of x and looks
through `r` for each row; of an array it expects one row, and has only the look-up, but
for tables of a row or two, where all ways cost the same. (A range, `between r.id and
r.id`, will not do: it is taken for a part of the table, and at a million rows another
index that has the id further back looked cheaper, and was read whole for each row.)

Settings of a session are made by a statement, as poolers do not pass on startup parameters.
"""

from __future__ import annotations

import select
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, LiteralString, cast

import psycopg
import sqlalchemy as sa

from relay.store import arrays, pooler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence
    from contextlib import AbstractContextManager

    from psycopg import sql

#: Seconds that connecting may take, and a statement, by the server's own clock.
CONNECT_TIMEOUT_SECS = 5
STATEMENT_TIMEOUT_SECS = 15
#: Seconds a statement may wait for a lock somebody else holds.
LOCK_TIMEOUT_SECS = 5
#: Seconds after which a silent database is given up on, by this side's clock: the two above are the server's, and a
#: frozen server keeps none. Longer than they are.
SILENCE_SECS = 18
#: A frozen peer (no FIN, no RST) is noticed after this many milliseconds of unacknowledged bytes (Linux).
TCP_USER_TIMEOUT_MS = 20_000
#: A session that takes no writes is given up when it is so many seconds old. The next one may be led elsewhere, or be told
#: otherwise; and a database that takes no writes at all is not stormed with logins.
READ_ONLY_SECS = 2.0

_SESSION = {
    "timezone": "UTC",
    "statement_timeout": f"{STATEMENT_TIMEOUT_SECS}s",
    "lock_timeout": f"{LOCK_TIMEOUT_SECS}s",
    "idle_in_transaction_session_timeout": "60s",
}
_HOT_SESSION = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "enable_material": "off",
    "jit": "off",
}

#: Where a pooled connection's `info` says when it was made (monotonic).
_MADE_AT = "made_at"

Row = tuple[Any, ...]


class BoundedConnection(psycopg.Connection[Row]):
    """A connection that waits for no answer longer than its bound: then it closes itself and raises OperationalError.

    What became of the statement is not known. Whoever used the connection goes on with another one.
    """

    #: Seconds; None for SILENCE_SECS.
    patience_secs: int | None = None

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Run one exchange with the server."""
        bound = SILENCE_SECS if self.patience_secs is None else self.patience_secs
        try:
            return super().wait(gen, interval, bound if timeout is None else timeout)
        except psycopg.errors._WaitTimeout as error:  # noqa: SLF001 - what this method raises, by its documentation
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the database was silent for {bound} s") from error


def make_engine(url: str, *, name: str, size: int, patience_secs: int | None = None) -> sa.Engine:
    """Make a pool of at most `size` connections, called `relay <name>` in pg_stat_activity.

    A connection is tried before use, so that a restart of the database costs no request. With `patience_secs` (four at
    least) a silent database is given up on sooner than after SILENCE_SECS: for those whom somebody waits for. All other
    waits are cut to fit.
    """
    return _engine(url, name=name, size=size, session=_SESSION, try_first=True, patience_secs=patience_secs)


def make_hot_engine(
    url: str,
    *,
    name: str,
    size: int,
    try_first: bool = False,
    may_forget: bool = False,
    patience_secs: int | None = None,
) -> sa.Engine:
    """Make a pool like `make_engine`'s, in autocommit, whose plans are pinned (see the module).

    Without `try_first` a connection is used as it is: where work comes again anyway, a round trip before each statement
    would be as dear as the statement. With `may_forget` a commit does not wait for the disk, and the last half second
    of them may be lost when the database crashes: for the publisher's marks alone, which are then made once more.
    """
    session = _SESSION | _HOT_SESSION
    if may_forget:
        session["synchronous_commit"] = "off"
    engine = _engine(url, name=name, size=size, session=session, try_first=try_first, patience_secs=patience_secs)
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def run(
    connection: sa.Connection,
    statement: LiteralString | sql.SQL,
    parameters: Mapping[str, object] | Sequence[object] | None = None,
) -> psycopg.Cursor[Row]:
    """Run a hot statement on the driver's own connection: prepared at once, binary both ways.

    Same transaction as `connection`; errors are the driver's, as SQLAlchemy wraps only its own calls.
    """
    raw = cast("psycopg.Connection[Row]", connection.connection.driver_connection)
    try:
        return raw.execute(statement, parameters, prepare=True, binary=True)
    except psycopg.OperationalError:
        if raw.closed:
            # SQLAlchemy did not see it. Where one connection is gone the others are, most likely: a fresh pool for all.
            connection.invalidate()
            connection.engine.dispose()
        raise
    except psycopg.errors.ReadOnlySqlTransaction:
        if _is_old(connection.info):
            connection.invalidate()
            connection.engine.dispose()
        raise


@contextmanager
def patiently(connection: sa.Connection) -> Iterator[None]:
    """Let statements of an autocommit connection take as long as they may anywhere, whatever its pool's patience."""
    raw = cast("BoundedConnection", connection.connection.driver_connection)
    usual = raw.patience_secs
    if usual is None:
        yield
        return
    raw.patience_secs = None
    run(connection, f"set statement_timeout = '{STATEMENT_TIMEOUT_SECS}s'")
    try:
        yield
    finally:
        raw.patience_secs = usual
        if not raw.closed:
            run(connection, f"set statement_timeout = '{_statement_secs(usual)}s'")


def is_alive(connection: sa.Connection) -> bool:
    """Whether an idle connection looks usable, without asking the server: nothing came in that was not asked for.

    What comes unasked is the server's farewell. A server that vanished without one is not noticed.
    """
    raw = cast("psycopg.Connection[Row]", connection.connection.driver_connection)
    if raw.closed:
        return False
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return not poll.poll(0)


def transaction(connection: sa.Connection) -> AbstractContextManager[psycopg.Transaction]:
    """Put several hot statements of an autocommit connection into one transaction."""
    return cast("psycopg.Connection[Row]", connection.connection.driver_connection).transaction()


def way_to(url: str) -> pooler.Way:
    """Tell what is between here and the database at `url`: no process runs where that is `TRANSACTIONS`.

    Raises psycopg.Error where the database does not answer.
    """
    target = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)

    def login() -> BoundedConnection:
        made = BoundedConnection.connect(target, connect_timeout=CONNECT_TIMEOUT_SECS, application_name="relay way")
        made.patience_secs = CONNECT_TIMEOUT_SECS
        return made

    return pooler.way_through(login)


def _is_old(info: MutableMapping[Any, Any]) -> bool:
    """Whether a session that takes no writes is to be given up: a failover, or a role's setting, outlives it."""
    made_at: float = info[_MADE_AT]
    return time.monotonic() - made_at > READ_ONLY_SECS


def _on_error(context: sa.engine.ExceptionContext) -> None:
    """Tell SQLAlchemy of it, for the statements that it runs itself: then the whole pool is made anew."""
    if context.connection is not None and isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
        context.is_disconnect = _is_old(context.connection.info)


def _on_connect(connection: Any, record: sa.pool.ConnectionPoolEntry) -> None:
    record.info[_MADE_AT] = time.monotonic()
    arrays.register(connection)


def _statement_secs(patience_secs: int) -> int:
    """The server's bound for a statement whose caller has so much patience: it ends first."""
    return min(STATEMENT_TIMEOUT_SECS, patience_secs - 1)


def _engine(
    url: str, *, name: str, size: int, session: Mapping[str, str], try_first: bool, patience_secs: int | None
) -> sa.Engine:
    connect_secs = CONNECT_TIMEOUT_SECS
    if patience_secs is not None:
        connect_secs = min(connect_secs, patience_secs // 2)
        # The server's own bounds end first: a statement that was given up on might still be committed.
        session = {
            **session,
            "statement_timeout": f"{_statement_secs(patience_secs)}s",
            "lock_timeout": f"{min(LOCK_TIMEOUT_SECS, patience_secs - 2)}s",
        }
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"),
        pool_size=size,
        max_overflow=0,
        pool_timeout=connect_secs,
        pool_pre_ping=try_first,
        # Seconds. After a failover, connections to the old primary are let go within this time.
        pool_recycle=300,
        # An error's text goes to the log: what the statement was given (metadata, digests, sealed secrets) does not.
        hide_parameters=True,
        connect_args={
            "application_name": f"relay {name}",
            "connect_timeout": connect_secs,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": TCP_USER_TIMEOUT_MS,
            "prepare_threshold": 2,
        },
    )

    judged = False

    def connect(_dialect: object, _record: object, arguments: Any, parameters: Any) -> BoundedConnection:
        nonlocal judged

        def login() -> BoundedConnection:
            made = BoundedConnection.connect(*arguments, **parameters)
            made.patience_secs = connect_secs
            return made

        connection = login()
        try:
            if pooler.begin(connection, session) and not judged:
                pooler.require_sessions(login)
                judged = True
        except BaseException:
            connection.close()
            raise
        connection.patience_secs = patience_secs
        return connection

    usual_ping = engine.dialect.do_ping

    def ping(connection: Any) -> bool:
        if patience_secs is not None:
            connection.patience_secs = patience_secs // 2
        try:
            return usual_ping(connection)
        finally:
            connection.patience_secs = patience_secs

    # Half the patience: where a connection is dead, another is still to be made, and the statement to be run.
    engine.dialect.do_ping = ping  # type: ignore[assignment]  # the pool asks its dialect, and there is no event
    sa.event.listen(engine, "do_connect", connect)
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "handle_error", _on_error)
    return engine
