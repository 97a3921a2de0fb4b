"""The attempt log's day partitions: there before they are needed (B-160)."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest
import sqlalchemy as sa

from relay.cli.partitions import show
from relay.config_sources import load_settings
from relay.core.days import days_ahead, partition_name
from relay.store import partitions
from relay.store.engine import make_engine
from relay.sweeps.partitions_ahead import PartitionsAhead
from relay.sweeps.runner import run_sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"moved": 0, "made": 0}


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

    assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"moved": 0, "made": 3}
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

    assert sorted(outcomes, key=str) == sorted([{"moved": 0, "made": 10}, None], key=str)
    with engine.connect() as connection:
        assert partitions.existing(connection) == {"delivery_attempts_default", *names}


def _attempt(rows: Rows, moment: str) -> None:
    rows.sql(
        "insert into relay.delivery_attempts (delivery_id, at, lease_token, generation, class)"
        " values (relay.uuid7(), %s, relay.uuid7(), 0, 0)",
        [moment],
    )


def test_rows_in_the_default_partition_are_moved_to_their_days(engine: sa.Engine, rows: Rows) -> None:
    """Days that lack, ahead or long past, are made around the rows that wait for them, whatever zone the session has."""
    with engine.connect() as connection:
        days = days_ahead(partitions.today(connection), 20)
    _drop(rows, partition_name(days[1]))
    rows.connection.execute("set timezone = 'Asia/Kolkata'")
    for moment in (
        f"{days[1]} 00:00:00+00",
        f"{days[1]} 23:59:59.999999+00",
        f"{days[20]} 12:00:00+00",
        "2020-02-29 12:00:00+00",
    ):
        _attempt(rows, moment)
    with engine.connect() as connection:
        assert partitions.default_rows(connection) == 4

    assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"moved": 4, "made": 0}
    places = rows.sql("select tableoid::regclass::text as place from relay.delivery_attempts order by at")
    assert [row["place"].split(".")[-1] for row in places] == [
        "delivery_attempts_20200229",
        *[partition_name(days[1])] * 2,
        partition_name(days[20]),
    ]
    with engine.connect() as connection:
        assert partitions.default_rows(connection) == 0
        assert partitions.DEFAULT in partitions.existing(connection)


def test_a_maintainer_that_gets_no_lock_gives_up_and_recording_goes_on(
    engine: sa.Engine, rows: Rows, database: str
) -> None:
    """While a transaction holds the log, the sweep fails within a second, changes nothing, and succeeds afterwards."""
    with engine.connect() as connection:
        days = days_ahead(partitions.today(connection), 20)
    _attempt(rows, f"{days[20]} 12:00:00+00")
    with psycopg.connect(database) as holder:
        holder.execute("select * from relay.delivery_attempts")
        with pytest.raises(sa.exc.OperationalError):
            PartitionsAhead(engine=engine).run_once(since_last=0.0)
        _attempt(rows, f"{days[0]} 12:00:00+00")
    assert PartitionsAhead(engine=engine).run_once(since_last=0.0)["moved"] == 1


def test_the_status_command_tells_what_is_wrong(
    engine: sa.Engine, rows: Rows, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 while all is well; 1, naming them, while a day lacks or rows lie in the default partition."""
    settings = load_settings({"DATABASE_URL": database})
    assert show(settings, as_json=True) == 0
    with engine.connect() as connection:
        days = days_ahead(partitions.today(connection), 20)
    _drop(rows, partition_name(days[3]))
    _attempt(rows, f"{days[20]} 12:00:00+00")
    capsys.readouterr()

    assert show(settings, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["missing"], said["default_rows"]) == ([partition_name(days[3])], 1)
    assert show(settings, as_json=False) == 1
    assert "1 rows lie in the default partition" in capsys.readouterr().out
