"""The outbox: what is committed and due becomes a hint, through every mishap of Redis and Postgres."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg
import pytest
import redis

from relay.outbox import stream as stream_module
from relay.outbox.publisher import Pace, Publisher
from relay.outbox.stream import GROUP, Stream, connect
from relay.store.engine import make_hot_engine
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from tests.rows import Rows

#: Where nothing listens: the discard port, which a connection to is refused at once.
NO_REDIS = "redis://127.0.0.1:9/0"


@pytest.fixture
def client(broker: str) -> Iterator[redis.Redis]:
    """A client to look at Redis with."""
    with redis.Redis.from_url(broker) as made:
        yield made


@contextmanager
def view(url: str, consumer: str = "one", *, block_secs: float = 0.0) -> Iterator[Stream]:
    """See the stream as one process does."""
    with connect(url, block_secs=block_secs) as client:
        yield Stream(client, prefix="t", consumer=consumer)


@pytest.fixture
def stream(broker: str) -> Iterator[Stream]:
    """The stream, its group made."""
    with view(broker) as made:
        made.ensure_group()
        yield made


def pending(client: redis.Redis) -> int:
    """Return how many entries are read and not settled."""
    count: int = client.xpending("t:hints", GROUP)["pending"]
    return count


def announced(stream: Stream) -> list[UUID]:
    """Take and settle all hints that wait."""
    hints = stream.read(1000, block_ms=1)
    if hints:
        stream.acknowledge([hint.entry for hint in hints])
    return [hint.delivery_id for hint in hints]


# --- the stream ---


def test_hints_are_read_once_and_deleted_when_settled(stream: Stream, client: redis.Redis) -> None:
    """Each hint goes to one reader, in order, and an acknowledged entry leaves the stream (B-26, C-56)."""
    ids = [uuid4() for _ in range(5)]
    stream.announce(ids)

    first = stream.read(3, block_ms=1)
    second = stream.read(3, block_ms=1)

    assert [hint.delivery_id for hint in first + second] == ids
    assert stream.read(3, block_ms=1) == []
    assert pending(client) == 5
    stream.acknowledge([hint.entry for hint in first])
    assert (pending(client), stream.length()) == (2, 2)
    stream.acknowledge([hint.entry for hint in second])
    assert (pending(client), stream.length()) == (0, 0)


def test_a_hint_is_sixteen_bytes_and_nothing_else(stream: Stream, client: redis.Redis) -> None:
    """What reaches Redis is the row's id: no payload, header or secret."""
    id_ = uuid4()
    stream.announce([id_])
    ((_, fields),) = client.xrange("t:hints") or [(b"", None)]
    assert fields == {b"d": id_.bytes}


def test_two_readers_share_the_hints(stream: Stream, broker: str) -> None:
    """Two workers get different hints; together they get all."""
    ids = [uuid4() for _ in range(10)]
    stream.announce(ids)
    with view(broker, "two") as other:
        got = stream.read(5, block_ms=1) + other.read(5, block_ms=1)
    assert sorted(hint.delivery_id for hint in got) == sorted(ids)


def test_a_reader_finds_its_unsettled_hints_again(stream: Stream, broker: str) -> None:
    """What a consumer read and did not settle it can read once more; others' it does not see."""
    ids = [uuid4() for _ in range(4)]
    stream.announce(ids)
    mine = stream.read(2, block_ms=1)
    with view(broker, "two") as other:
        other.read(2, block_ms=1)
    assert stream.read_unacknowledged(10) == mine
    assert stream.read_unacknowledged(1) == mine[:1]
    stream.acknowledge([mine[0].entry])
    assert stream.read_unacknowledged(10) == mine[1:]


@pytest.mark.parametrize("mishap", ["flushall", "del", "xgroup destroy", "never made"])
def test_a_lost_group_is_made_again_from_the_start(stream: Stream, client: redis.Redis, mishap: str) -> None:
    """After a flush, a delete or a destroyed group reading goes on, and what is in the stream is still read (C-55)."""
    id_ = uuid4()
    if mishap in {"flushall", "never made"}:
        client.flushall()
    elif mishap == "del":
        client.delete("t:hints")
    if mishap == "xgroup destroy":
        stream.announce([id_])
        client.xgroup_destroy("t:hints", GROUP)
    else:
        stream.announce([id_])

    assert stream.read(10, block_ms=1) == []
    assert announced(stream) == [id_]


def test_a_new_stream_is_no_fault(broker: str, client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Who comes first finds no group, which is no warning; one that was there and is gone is."""
    caplog.set_level(logging.INFO)
    with view(broker) as first, view(broker, "another") as another:
        first.unread()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        client.flushall()
        first.unread()
        client.xgroup_destroy("t:hints", GROUP)
        another.unread()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]


@pytest.mark.parametrize("call", ["unacknowledged", "reclaim", "idle", "unread"])
def test_every_call_mends_a_lost_group(stream: Stream, client: redis.Redis, call: str) -> None:
    """No call fails for want of the group; each makes it again."""
    client.flushall()
    answer: object = {
        "unacknowledged": lambda: stream.read_unacknowledged(5),
        "reclaim": lambda: stream.reclaim(idle_ms=0, count=5),
        "idle": lambda: stream.remove_idle_consumers(idle_ms=0),
        "unread": stream.unread_since,
    }[call]()
    assert not answer
    assert [group["name"] for group in client.xinfo_groups("t:hints")] == [GROUP.encode()]


def test_a_blocked_reader_survives_a_flush(broker: str, client: redis.Redis) -> None:
    """A reader that waits while the stream is flushed away reads what is announced afterwards."""
    id_ = uuid4()
    got: list[UUID] = []
    with view(broker, block_secs=1.0) as reader, view(broker, "publisher") as publisher:
        reader.ensure_group()

        def read() -> None:
            while not got:
                got.extend(hint.delivery_id for hint in reader.read(10, block_ms=1000))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: client.info("clients")["blocked_clients"] == 1)
        client.flushall()
        publisher.announce([id_])
        thread.join(10)
    assert got == [id_]


def test_strange_entries_are_dropped(stream: Stream, client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Entries that are no hints are settled and reported once a read, and those around them are read."""
    good = uuid4()
    client.xadd("t:hints", {"d": b"short"})
    client.xadd("t:hints", {"other": b"x" * 16})
    stream.announce([good])
    client.xadd("t:hints", {"d": b"x" * 17})
    with caplog.at_level(logging.WARNING):
        hints = stream.read(10, block_ms=1)
    assert [hint.delivery_id for hint in hints] == [good]
    assert (stream.length(), pending(client)) == (1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_trimmed_entries_are_no_hints(stream: Stream, client: redis.Redis) -> None:
    """Entries that were trimmed away while they were pending come to nothing, in a re-read and in a reclaim."""
    stream.announce([uuid4(), uuid4()])
    stream.read(10, block_ms=1)
    client.xtrim("t:hints", maxlen=0)
    assert stream.read_unacknowledged(10) == []
    assert stream.reclaim(idle_ms=0, count=10) == []
    assert pending(client) == 0


def test_what_a_dead_reader_left_is_taken_over(stream: Stream, broker: str, client: redis.Redis) -> None:
    """Entries read long ago and never settled go to whoever reclaims, once idle for long enough."""
    ids = [uuid4() for _ in range(3)]
    stream.announce(ids)
    stream.read(3, block_ms=1)
    with view(broker, "rescuer") as rescuer:
        assert rescuer.reclaim(idle_ms=60_000, count=10) == []
        hints = rescuer.reclaim(idle_ms=0, count=2) + rescuer.reclaim(idle_ms=0, count=10)
        assert {hint.delivery_id for hint in hints} == set(ids)
        assert {entry["consumer"] for entry in client.xpending_range("t:hints", GROUP, "-", "+", 10)} == {b"rescuer"}


def test_idle_consumers_go_only_when_they_hold_nothing(stream: Stream, broker: str, client: redis.Redis) -> None:
    """A silent consumer with an unsettled entry stays, one without goes, and a fresh one stays (B-26)."""
    id_ = uuid4()
    stream.announce([id_])
    with view(broker, "holds") as holds, view(broker, "empty") as empty:
        holds.read(1, block_ms=1)
        empty.read(1, block_ms=1)
        assert stream.remove_idle_consumers(idle_ms=60_000) == 0
        wait_until(lambda: all(c["idle"] > 20 for c in client.xinfo_consumers("t:hints", GROUP)))
        assert stream.remove_idle_consumers(idle_ms=20) == 1
        assert [c["name"] for c in client.xinfo_consumers("t:hints", GROUP)] == [b"holds"]
        assert [hint.delivery_id for hint in holds.read_unacknowledged(1)] == [id_]


def test_unread_since_tells_the_last_delivered_time_while_hints_wait(stream: Stream, client: redis.Redis) -> None:
    """None while nothing waits; else the time in the last delivered id: the beginning of time before the first."""
    assert stream.unread_since() is None
    stream.announce([uuid4(), uuid4()])
    assert stream.unread_since() == datetime.fromtimestamp(0, tz=UTC)

    (first,) = stream.read(1, block_ms=1)
    at = datetime.fromtimestamp(int(first.entry.split(b"-")[0]) / 1000, tz=UTC)
    assert stream.unread_since() == at
    # Settled entries leave gaps before the last delivered id, and none after: the answer is about the latter.
    stream.acknowledge([first.entry])
    assert stream.unread_since() == at
    announced(stream)
    assert stream.unread_since() is None


def test_unread_since_is_not_fooled_by_deletes_and_trims(stream: Stream, client: redis.Redis) -> None:
    """An unread entry that was deleted or trimmed away does not count as waiting."""
    stream.announce([uuid4(), uuid4()])
    for entry, _ in (client.xrange("t:hints") or [])[1:]:
        assert isinstance(entry, bytes)
        client.xdel("t:hints", entry)
    assert stream.unread_since() is not None
    client.xtrim("t:hints", maxlen=0)
    assert stream.unread_since() is None


def test_a_blocking_read_is_shorter_than_the_sockets_patience(broker: str) -> None:
    """A read that waits in vain returns nothing, without a time-out of the socket (C-58)."""
    with connect(broker, block_secs=1.0) as client:
        reader = Stream(client, prefix="t", consumer="one")
        reader.ensure_group()
        assert client.connection_pool.connection_kwargs["socket_timeout"] > 1.0
        began = time.monotonic()
        assert reader.read(1, block_ms=300) == []
        assert time.monotonic() - began >= 0.29


def test_a_redis_that_does_not_listen_raises_soon() -> None:
    """Every call fails with a redis error within its time-out, and does not retry by itself."""
    with view(NO_REDIS) as stream:
        began = time.monotonic()
        with pytest.raises(redis.RedisError):
            stream.announce([uuid4()])
        assert time.monotonic() - began < stream_module.ANSWER_TIMEOUT_SECS + stream_module.CONNECT_TIMEOUT_SECS


# --- the publisher ---


def publish(hot: sa.Engine, publisher: Publisher) -> int:
    """Let a publisher look once."""
    with hot.connect() as connection:
        return publisher.run_once(connection)


def test_due_rows_become_hints_once(hot: sa.Engine, rows: Rows, stream: Stream) -> None:
    """Due rows are marked and announced, the longest due first; rows that are not due, paused or done are not."""
    endpoint = rows.endpoint()
    second = rows.delivery(endpoint, due_in=-1.0)
    first = rows.delivery(endpoint, due_in=-2.0)
    rows.delivery(endpoint, due_in=60.0)
    for change in ("due_at = null", "status = 1", "status = 3", "announced_at = now()"):
        other = rows.delivery(endpoint)
        rows.connection.execute(f"update relay.deliveries set {change} where id = '{other}'")
    publisher = Publisher(hot, stream)

    assert publish(hot, publisher) == 2
    assert publish(hot, publisher) == 0
    assert announced(stream) == [first, second]
    assert publisher.announced == 2
    assert rows.get(first)["announced_at"] is not None


def test_a_row_is_marked_before_its_hint_can_be_read(
    hot: sa.Engine, rows: Rows, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the hint goes out the mark is committed and the row unlocked: no hint overtakes its commit."""
    delivery = rows.delivery(rows.endpoint())
    seen: list[object] = []
    announce = stream.announce

    def spy(ids: list[UUID]) -> None:
        seen.append(rows.get(delivery)["announced_at"])
        rows.sql("select from relay.deliveries where id = %s for update nowait", [delivery])
        announce(ids)

    monkeypatch.setattr(stream, "announce", spy)
    publish(hot, Publisher(hot, stream))
    assert len(seen) == 1
    assert seen[0] is not None


def test_an_earlier_row_that_commits_later_is_announced(
    hot: sa.Engine, rows: Rows, stream: Stream, database: str
) -> None:
    """Rows are found by their state, never by a position: one that was made first and committed last is not skipped (C-48)."""
    endpoint = rows.endpoint()
    late = rows.delivery(endpoint, due_in=-30.0)
    publisher = Publisher(hot, stream, pace=Pace(full_scan_secs=0.0))
    with psycopg.connect(database) as other:
        # Not seen by anybody until this commits, its due time long past by then.
        other.execute("delete from relay.deliveries where id = %s", [late])
        other.rollback()
        other.execute("update relay.deliveries set announced_at = null where id = %s", [late])
        early = rows.delivery(endpoint)
        assert publish(hot, publisher) == 1
        assert announced(stream) == [early]
        other.commit()
    assert publish(hot, publisher) == 1
    assert announced(stream) == [late]


def test_between_full_scans_old_due_times_wait(hot: sa.Engine, rows: Rows, stream: Stream) -> None:
    """A look starts at the last due time seen less a margin; a full one, now and then, finds what is older."""
    endpoint = rows.endpoint()
    publisher = Publisher(hot, stream, pace=Pace(full_scan_secs=0.4, margin_secs=5.0))
    rows.delivery(endpoint)
    publish(hot, publisher)
    old = rows.delivery(endpoint, due_in=-60.0)
    near = rows.delivery(endpoint, due_in=-2.0)
    announced(stream)

    assert publish(hot, publisher) == 1
    assert announced(stream) == [near]
    wait_until(lambda: publish(hot, publisher) == 1)
    assert announced(stream) == [old]


def test_a_backlog_of_old_rows_is_announced_without_waiting_between_batches(
    hot: sa.Engine, rows: Rows, stream: Stream
) -> None:
    """After a full scan that filled its batch the next look is full as well: a flushed backlog is back at once."""
    endpoint = rows.endpoint()
    publisher = Publisher(hot, stream, pace=Pace(batch=10, full_scan_secs=60.0, margin_secs=5.0))
    publisher._next_full_scan = time.monotonic() + 60
    rows.delivery(endpoint)
    publish(hot, publisher)
    rows.deliveries(endpoint, 35, due_in=-600.0)

    publisher._next_full_scan = 0.0
    assert [publish(hot, publisher) for _ in range(5)] == [10, 10, 10, 5, 0]


def test_a_failed_hint_takes_the_mark_back(hot: sa.Engine, rows: Rows, broker: str) -> None:
    """When Redis fails in the middle the rows are unmarked, and nothing is marked while it does not answer."""
    delivery = rows.delivery(rows.endpoint())
    with view(NO_REDIS) as dead:
        publisher = Publisher(hot, dead)
        assert publish(hot, publisher) == 0
        assert rows.get(delivery)["announced_at"] is None

        rows.connection.execute(
            "create table marks (id uuid); create function note() returns trigger language plpgsql as"
            " $$ begin insert into marks values (new.id); return new; end $$;"
            " create trigger note after update of announced_at on relay.deliveries for each row execute function note()"
        )
        assert [publish(hot, publisher) for _ in range(3)] == [0, 0, 0]
        assert rows.sql("select * from marks") == []

        with view(broker) as alive:
            publisher._stream = alive
            assert publish(hot, publisher) == 1
            assert rows.get(delivery)["announced_at"] is not None


def test_a_redis_that_refuses_writes_takes_the_mark_back(
    hot: sa.Engine, rows: Rows, stream: Stream, client: redis.Redis
) -> None:
    """A full Redis answers pings and refuses hints: rows stay unmarked, and go out once it takes them."""
    delivery = rows.delivery(rows.endpoint())
    publisher = Publisher(hot, stream)
    client.config_set("maxmemory", 1)
    try:
        assert publish(hot, publisher) == 0
        assert publish(hot, publisher) == 0
        assert rows.get(delivery)["announced_at"] is None
    finally:
        client.config_set("maxmemory", 0)
    assert publish(hot, publisher) == 1
    assert announced(stream) == [delivery]


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


def test_of_two_publishers_one_works_and_the_other_takes_over(database: str, rows: Rows, broker: str) -> None:
    """One leads while its connection lives; when that is cut the other takes over, and nothing is announced twice."""
    engines = [make_hot_engine(database, name=f"publisher-{n}", size=2) for n in (1, 2)]
    endpoint = rows.endpoint()
    with view(broker, "a") as first, view(broker, "b") as second:
        first.ensure_group()
        pace = Pace(retry_secs=0.2)
        one, two = (Publisher(e, s, pace=pace) for e, s in zip(engines, (first, second), strict=True))
        try:
            with running(one):
                wait_until(lambda: one.leading)
                with running(two):
                    ids = rows.deliveries(endpoint, 50)
                    wait_until(lambda: one.announced == 50)
                    assert (two.leading, two.announced) == (False, 0)
                    # Whoever's connection is free again first works on: cut until it is the second.
                    deadline = time.monotonic() + 20
                    while not two.leading:
                        assert time.monotonic() < deadline
                        rows.sql(
                            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'relay publisher-1'"
                            " and datname = current_database()"
                        )
                        time.sleep(0.02)
                    wait_until(lambda: not one.leading)
                    more = rows.deliveries(endpoint, 20)
                    wait_until(lambda: one.announced + two.announced == 70)
                    assert two.announced == 20
                    assert sorted(announced(first)) == sorted(ids + more)
        finally:
            for engine in engines:
                engine.dispose()


def test_a_publisher_goes_on_after_redis_comes_back(database: str, rows: Rows, broker: str) -> None:
    """A running publisher that lost Redis announces what waited, once it answers, without help."""
    engine = make_hot_engine(database, name="publisher", size=2)
    with view(broker) as alive, view(NO_REDIS) as dead:
        alive.ensure_group()
        publisher = Publisher(engine, dead, pace=Pace(retry_secs=0.05))
        try:
            with running(publisher):
                ids = rows.deliveries(rows.endpoint(), 5)
                wait_until(lambda: not publisher._redis_answers)
                wait_until(lambda: rows.value("select count(*) from relay.deliveries where announced_at is null") == 5)
                publisher._stream = alive
                wait_until(lambda: publisher.announced == 5)
            assert sorted(announced(alive)) == sorted(ids)
        finally:
            engine.dispose()


def test_the_margin_covers_clock_steps_and_locked_rows(
    hot: sa.Engine, rows: Rows, stream: Stream, database: str
) -> None:
    """A due row that was locked during a look is announced by a later one."""
    endpoint = rows.endpoint()
    locked, free = rows.deliveries(endpoint, 2, due_in=-1.0)
    publisher = Publisher(hot, stream, pace=Pace(full_scan_secs=3600.0))
    with psycopg.connect(database) as other:
        other.execute("select from relay.deliveries where id = %s for update", [locked])
        assert publish(hot, publisher) == 1
        assert announced(stream) == [free]
    assert publish(hot, publisher) == 1
    assert announced(stream) == [locked]
    assert publisher._after.due_at < datetime.now(UTC) - timedelta(seconds=4)
