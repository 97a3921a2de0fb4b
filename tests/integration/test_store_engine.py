"""Connections that do not wait for ever, and pools that get over what became of theirs."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
import sqlalchemy as sa

from relay.store import engine as engines
from relay.store.engine import make_engine, make_hot_engine, patiently, run, way_to
from relay.store.pooler import Way

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("make", [make_engine, make_hot_engine])
def test_a_frozen_session_is_given_up(
    make: Callable[..., sa.Engine], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server process that stands still costs a statement the bound, and the next one has a new connection (F-14)."""
    monkeypatch.setattr(engines, "SILENCE_SECS", 1)
    pool = make(database, name="frozen", size=1)
    frozen = 0
    try:
        with pool.connect() as connection:
            frozen = run(connection, "select pg_backend_pid()").fetchall()[0][0]
            os.kill(frozen, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(psycopg.OperationalError, match="silent"):
                run(connection, "select 1")
            assert time.monotonic() - started < 5
        with pool.connect() as connection:
            assert run(connection, "select pg_backend_pid()").fetchall()[0][0] != frozen
    finally:
        os.kill(frozen, signal.SIGCONT)
        pool.dispose()


@pytest.mark.parametrize("make", [make_engine, make_hot_engine])
def test_sessions_that_take_no_writes_are_given_up(
    make: Callable[..., sa.Engine], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover to where nothing can be written, one refused write makes the whole pool anew; a session that is
    new itself is kept, so that a database which takes none is not stormed (C-71)."""
    monkeypatch.setattr(engines, "READ_ONLY_SECS", 0.0)
    pool = make(database, name="moved", size=2)
    write = "insert into relay.sweeps (name, started_at) values ('moved', now())"

    def pids() -> set[int]:
        with pool.connect() as one, pool.connect() as other:
            return {run(each, "select pg_backend_pid()").fetchall()[0][0] for each in (one, other)}

    def refused(raised: type[Exception], attempt: Callable[[sa.Connection], object]) -> None:
        with pool.connect() as connection:
            connection.exec_driver_sql("set default_transaction_read_only = on")
            connection.commit()
            with pytest.raises(raised):
                attempt(connection)

    try:
        old = pids()
        refused(psycopg.errors.ReadOnlySqlTransaction, lambda connection: run(connection, write))
        new = pids()
        assert not old & new
        refused(sa.exc.InternalError, lambda connection: connection.exec_driver_sql(write))
        newest = pids()
        assert not new & newest
        monkeypatch.setattr(engines, "READ_ONLY_SECS", 600.0)
        refused(psycopg.errors.ReadOnlySqlTransaction, lambda connection: run(connection, write))
        refused(sa.exc.InternalError, lambda connection: connection.exec_driver_sql(write))
        assert pids() == newest
    finally:
        pool.dispose()


def test_settings_are_in_force_in_every_session(database: str) -> None:
    """Time-outs everywhere, pinned plans in hot sessions alone; a patient statement has all the time, and the rest not."""
    asked = (
        "select current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('timezone'),"
        " current_setting('idle_in_transaction_session_timeout'), current_setting('plan_cache_mode'),"
        " current_setting('enable_seqscan'), current_setting('synchronous_commit')"
    )
    plain = make_engine(database, name="plain", size=2)
    hot = make_hot_engine(database, name="hot", size=2, may_forget=True, patience_secs=4)
    try:
        with plain.connect() as one, plain.connect() as other:
            for connection in (one, other):
                found = run(connection, asked).fetchall()
                assert found == [("15s", "5s", "UTC", "1min", "auto", "on", "on")]
            assert not one.connection.driver_connection.autocommit  # type: ignore[union-attr]  # psycopg's
        with hot.connect() as connection:
            usual = ("3s", "2s", "UTC", "1min", "force_generic_plan", "off", "off")
            assert run(connection, asked).fetchall() == [usual]
            with patiently(connection):
                assert run(connection, asked).fetchall() == [("15s", *usual[1:])]
            assert run(connection, asked).fetchall() == [usual]
    finally:
        plain.dispose()
        hot.dispose()


def test_a_direct_way_is_told(database: str) -> None:
    """Without a pooler in between the database is reached directly."""
    assert way_to(database) is Way.DIRECT
