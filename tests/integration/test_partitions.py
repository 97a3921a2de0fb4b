"""The attempt log's day partitions: there before they are needed (B-160)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from relay.core.days import days_ahead, partition_name
from relay.store import partitions
from relay.store.engine import make_engine
from relay.sweeps.partitions_ahead import PartitionsAhead
from relay.sweeps.runner import run_sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from tests.rows import Rows


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    """An ordinary pool."""
    made = make_engine(database, name="test", size=3)
    yield made
    made.dispose()


def _drop(rows: Rows, *names: str) -> None:
    for name in names:
        rows.connection.execute(f"drop table relay.{name}")


def test_a_fresh_schema_lacks_nothing(engine: sa.Engine) -> None:
    """Right after the migration there is nothing to make."""
    assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"made": 0}


def test_what_is_missing_is_made_like_the_others(engine: sa.Engine, rows: Rows) -> None:
    """After days without a maintainer each missing day is made, keys and bounds as the migration makes them."""
    with engine.connect() as connection:
        days = days_ahead(partitions.today(connection), partitions.DAYS_AHEAD)
    missing = [partition_name(day) for day in days[-3:]]
    describe = (
        "select c.relname, pg_get_expr(c.relpartbound, c.oid) as bound, (select string_agg(a.attname || a.attnotnull, ','"
        " order by a.attnum) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0) as columns,"
        " (select pg_get_constraintdef(k.oid) from pg_constraint k where k.conrelid = c.oid and k.contype = 'p') as key"
        " from pg_class c where c.relname = any(%s) order by 1"
    )
    before = rows.sql(describe, [missing])
    _drop(rows, *missing)

    assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"made": 3}
    assert rows.sql(describe, [missing]) == before


def test_an_attempt_lands_in_its_day(engine: sa.Engine, rows: Rows) -> None:
    """Around midnight UTC each row goes to its day's partition and none to the default one (C-60)."""
    with engine.connect() as connection:
        today, tomorrow = days_ahead(partitions.today(connection), 1)
    _drop(rows, partition_name(tomorrow))
    PartitionsAhead(engine=engine).run_once(since_last=0.0)

    for moment in (f"{today} 23:59:59.999999+00", f"{tomorrow} 00:00:00+00"):
        rows.sql(
            "insert into relay.delivery_attempts (delivery_id, at, lease_token, generation, class)"
            " values (relay.uuid7(), %s, relay.uuid7(), 0, 0)",
            [moment],
        )
    found = rows.sql("select tableoid::regclass::text as place from relay.delivery_attempts order by at")
    assert [row["place"].split(".")[-1] for row in found] == [partition_name(today), partition_name(tomorrow)]


def test_two_makers_at_once_do_no_harm(engine: sa.Engine, rows: Rows) -> None:
    """Two beats' partition sweeps at the same moment: one makes what is missing, the other nothing, neither fails."""
    with engine.connect() as connection:
        names = [partition_name(day) for day in days_ahead(partitions.today(connection), 14)]
    _drop(rows, *names[5:])
    outcomes: list[object] = []
    together = threading.Barrier(2)

    def run() -> None:
        together.wait()
        try:
            outcomes.append(run_sweep(engine, PartitionsAhead(engine=engine)))
        except Exception as error:  # noqa: BLE001 - handed to the test
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes, key=str) == sorted([{"made": 10}, None], key=str)
    with engine.connect() as connection:
        assert partitions.existing(connection) == {"delivery_attempts_default", *names}
