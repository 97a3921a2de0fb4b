"""The publisher's look, and the lock that it holds: cheap, exact, and given up by whoever stands still."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.outbox import publisher as publishing
from relay.outbox.publisher import Pace, Publisher
from relay.outbox.stream import Stream, connect
from relay.store import announcements, lookout
from relay.store.announcements import START
from relay.store.engine import make_hot_engine
from relay.store.locks import advisory_lock
from relay.store.lookout import Lookout
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from tests.rows import Rows

#: Ends every session of the named application, in the test's database.
_CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where application_name = %s and datname = current_database()"
)


@pytest.fixture
def stream(broker: str) -> Iterator[Stream]:
    """The stream, its group made."""
    with connect(broker) as client:
        made = Stream(client, prefix="t", consumer="publisher")
        made.ensure_group()
        yield made


@contextmanager
def running(publisher: Publisher) -> Iterator[None]:
    """Run a publisher in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def test_a_look_sees_what_a_mark_would_find(hot: sa.Engine, rows: Rows) -> None:
    """True for a pending row that is due, unannounced, and due at the given time or later; for no other row."""
    endpoint = rows.endpoint()
    now = datetime.now(UTC)
    with hot.connect() as connection:
        look = Lookout(connection)
        assert not look.any_due(START.due_at)
        id_ = rows.delivery(endpoint, due_in=-60.0)
        for since, seen in (
            (START.due_at, True),
            (now - timedelta(seconds=90), True),
            (now - timedelta(seconds=30), False),
            (START.due_at, True),
        ):
            assert look.any_due(since) is seen
        for change in ("announced_at = now()", "due_at = now() + interval '1 h'", "due_at = null", "status = 2"):
            rows.sql("update relay.deliveries set announced_at = null, status = 0, due_at = now() where id = %s", [id_])
            assert look.any_due(START.due_at)
            rows.sql(f"update relay.deliveries set {change} where id = %s", [id_])
            assert not look.any_due(START.due_at), change
        # Statements of the driver's own in between, and a second lookout on the same connection, disturb nothing.
        assert announcements.mark(connection, after=START, limit=10).ids == []
        assert not Lookout(connection).any_due(START.due_at)
        assert not look.any_due(START.due_at)


def test_a_look_uses_the_outbox_index(hot: sa.Engine, rows: Rows) -> None:
    """It reads the partial index and nothing else, whatever the table holds."""
    with hot.connect() as connection:
        Lookout(connection)
        name = connection.exec_driver_sql(
            "select name from pg_prepared_statements where name like 'relay_lookout%%'"
        ).scalar_one()
        plan = "\n".join(
            row[0] for row in connection.exec_driver_sql(f"explain (costs off) execute {name} ('-infinity')")
        )
    assert "deliveries_unannounced" in plan
    assert "Seq Scan" not in plan


def test_a_look_over_a_lost_connection_raises_and_the_next_connection_works(hot: sa.Engine, rows: Rows) -> None:
    """A session that was ended is noticed by the look itself; the pool hands out a new one."""
    with hot.connect() as connection:
        look = Lookout(connection)
        rows.sql(_CUT, ["relay test"])
        with pytest.raises(psycopg.OperationalError):
            look.any_due(START.due_at)
        assert connection.invalidated
    with hot.connect() as connection:
        assert not Lookout(connection).any_due(START.due_at)


def test_a_look_that_gets_no_answer_ends(hot: sa.Engine, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent database costs a look its bound and no more; the connection is given up with it."""
    monkeypatch.setattr(lookout, "SILENCE_SECS", 0.3)
    with hot.connect() as connection, psycopg.connect(database) as other:
        look = Lookout(connection)
        other.execute("lock table relay.deliveries in access exclusive mode")
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="silent"):
            look.any_due(START.due_at)
        assert 0.25 < time.monotonic() - began < 3
        assert connection.invalidated


def test_with_a_lookout_nothing_is_marked_where_there_is_nothing(
    hot: sa.Engine, rows: Rows, stream: Stream, database: str
) -> None:
    """A look that finds none costs no update; one that finds some marks at once, and a locked row comes later."""
    endpoint = rows.endpoint()
    publisher = Publisher(hot, stream, pace=Pace(full_scan_secs=0.0))
    with hot.connect() as connection:
        look = Lookout(connection)
        marks = (
            "select count(*) from pg_stat_activity where application_name = 'relay test' and query like '%%update%%'"
        )
        assert publisher.run_once(connection, look) == 0
        assert rows.value(marks) == 0
        first, second = rows.deliveries(endpoint, 2)
        with psycopg.connect(database) as other:
            other.execute("select from relay.deliveries where id = %s for update", [first])
            assert publisher.run_once(connection, look) == 1
            assert [publisher.run_once(connection, look) for _ in range(3)] == [0, 0, 0]
        assert publisher.run_once(connection, look) == 1
        assert rows.value("select count(*) from relay.deliveries where announced_at is null") == 0
    assert {hint.delivery_id for hint in stream.read(10, block_ms=1)} == {first, second}


def test_a_holder_that_stands_still_loses_its_lock(hot: sa.Engine, rows: Rows) -> None:
    """The server ends the session of a holder that asks for nothing; one that does keeps it; none keeps the time-out."""
    with advisory_lock(hot, "a", silence_secs=0.4) as connection:
        assert connection is not None
        deadline = time.monotonic() + 0.8
        while time.monotonic() < deadline:
            connection.exec_driver_sql("select 1")
            time.sleep(0.05)
        held = _holder(hot)
        assert not held, "it asks, and keeps it"
        wait_until(lambda: _holder(hot))
    with hot.connect() as connection:
        assert connection.exec_driver_sql("show idle_session_timeout").scalar_one() == "0"
    with advisory_lock(hot, "a") as connection:
        assert connection is not None
    with hot.connect() as connection:
        assert connection.exec_driver_sql("show idle_session_timeout").scalar_one() == "0"


def _holder(hot: sa.Engine) -> bool:
    with advisory_lock(hot, "a") as connection:
        return connection is not None


def test_a_leader_that_stands_still_is_replaced_and_goes_on_in_the_second_row(
    database: str,
    rows: Rows,
    broker: str,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A publisher frozen in the middle of its work loses the lock to another within seconds; awake again it waits for
    the lock like any other. Meanwhile whoever waits says that due rows do (F-14)."""
    monkeypatch.setattr(publishing, "LEADERS_SILENCE_SECS", 1.0)
    engines = [make_hot_engine(database, name=f"publisher-{n}", size=2) for n in (1, 2)]
    frozen, asleep = threading.Event(), threading.Event()
    announce = stream.announce

    def freeze(ids: object) -> None:
        asleep.set()
        frozen.wait(20)
        announce(ids)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(stream, "announce", freeze)
    endpoint = rows.endpoint()
    with connect(broker) as client:
        pace = Pace(retry_secs=0.05, complain_secs=0.3)
        one = Publisher(engines[0], stream, pace=pace)
        two = Publisher(engines[1], Stream(client, prefix="t", consumer="b"), pace=pace)
        try:
            with running(one):
                wait_until(lambda: one.leading)
                rows.delivery(endpoint)
                assert asleep.wait(5)
                rows.delivery(endpoint)
                with running(two):
                    wait_until(lambda: two.leading)
                    wait_until(lambda: two.announced == 1)
                    assert one.looked_secs > 0.5 > two.looked_secs
                    frozen.set()
                    wait_until(lambda: not one.leading)
                    assert one.announced == 1
                    assert two.leading
        finally:
            frozen.set()
            for engine in engines:
                engine.dispose()
    said = [record.getMessage() for record in caplog.records]
    assert "another publisher holds the lock, and due rows wait; workers look for themselves" in said
