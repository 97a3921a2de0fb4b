"""Advisory locks and the sweeps' clock: one at a time in the fleet, however many ask (C-54)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from relay.store.engine import make_engine
from relay.store.locks import advisory_lock, finish_sweep, start_sweep
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rows import Rows


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    """An ordinary pool."""
    made = make_engine(database, name="test", size=3)
    yield made
    made.dispose()


def _holders(rows: Rows) -> int:
    # Of this database only: others of the same server hold locks of their own.
    count: int = rows.value(
        "select count(*) from pg_locks where locktype = 'advisory' and granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return count


def test_one_holds_and_the_others_see_it(engine: sa.Engine, rows: Rows) -> None:
    """While one holds a name another gets None, for other names a connection; afterwards the name is free."""
    with advisory_lock(engine, "a") as first:
        assert first is not None
        with advisory_lock(engine, "a") as second, advisory_lock(engine, "b") as other:
            assert second is None
            assert other is not None
    with advisory_lock(engine, "a") as again:
        assert again is not None
    assert _holders(rows) == 0


def test_a_hot_pool_locks_as_well(hot: sa.Engine, rows: Rows) -> None:
    """In autocommit the lock lasts as long as the block, too: the publisher works that way."""
    with advisory_lock(hot, "a") as connection:
        assert connection is not None
        connection.exec_driver_sql("select 1")
        assert _holders(rows) == 1
        with advisory_lock(hot, "a") as second:
            assert second is None
    assert _holders(rows) == 0


def test_the_lock_is_let_go_whatever_is_raised(engine: sa.Engine, rows: Rows) -> None:
    """An error in the block, and one of the database within a transaction, leave no lock behind."""
    with pytest.raises(ZeroDivisionError), advisory_lock(engine, "a"):
        raise ZeroDivisionError
    with pytest.raises(sa.exc.DBAPIError), advisory_lock(engine, "a") as connection:
        assert connection is not None
        connection.exec_driver_sql("select 1 / 0")
    assert _holders(rows) == 0


@pytest.mark.parametrize("kind", ["ordinary", "hot"])
def test_a_lock_dies_with_its_connection(engine: sa.Engine, hot: sa.Engine, rows: Rows, kind: str) -> None:
    """When the server ends the session the holder's next statement raises, and the name is free at once."""
    pool = engine if kind == "ordinary" else hot
    with pytest.raises(sa.exc.DBAPIError), advisory_lock(pool, "a") as connection:
        assert connection is not None
        pid = connection.exec_driver_sql("select pg_backend_pid()").scalar_one()
        rows.sql("select pg_terminate_backend(%s)", [pid])
        wait_until(lambda: _holders(rows) == 0)
        connection.exec_driver_sql("select 1")
    with advisory_lock(pool, "a") as again:
        assert again is not None


def test_a_sweep_that_just_started_does_not_start_again(engine: sa.Engine, rows: Rows) -> None:
    """A tick within half the interval is dropped; later ones are told how long ago the last was, by the database."""
    with engine.connect() as connection:
        assert start_sweep(connection, "s", interval_secs=10.0) == float("inf")
        assert start_sweep(connection, "s", interval_secs=10.0) is None
        assert start_sweep(connection, "other", interval_secs=10.0) == float("inf")

        rows.sql("update relay.sweeps set started_at = started_at - interval '6 s' where name = 's'")
        since = start_sweep(connection, "s", interval_secs=10.0)
        assert since is not None
        assert 6 <= since < 10
        assert start_sweep(connection, "s", interval_secs=10.0) is None


def test_counts_of_a_sweep_are_kept(engine: sa.Engine, rows: Rows) -> None:
    """What a sweep did can be read from its row."""
    with engine.connect() as connection:
        start_sweep(connection, "s", interval_secs=10.0)
        finish_sweep(connection, "s", {"rescued": 3})
    (row,) = rows.sql("select counts, finished_at >= started_at as in_order from relay.sweeps")
    assert row == {"counts": {"rescued": 3}, "in_order": True}


def test_of_many_ticks_at_once_one_starts(engine: sa.Engine) -> None:
    """Of three beats that tick at the same moment exactly one sweep starts."""
    started: list[float | None] = []
    together = threading.Barrier(3)

    def tick() -> None:
        with engine.connect() as connection:
            together.wait()
            started.append(start_sweep(connection, "s", interval_secs=60.0))

    threads = [threading.Thread(target=tick) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started, key=str) == sorted([float("inf"), None, None], key=str)
