"""The sweeps: what they mend, what they leave alone, and that it does not matter how many run them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import redis

from relay.core.model import AttemptClass, Status
from relay.metrics import REGISTRY
from relay.outbox.stream import GROUP, Stream, connect
from relay.store.engine import make_engine
from relay.sweeps.reap import Reap
from relay.sweeps.reconcile import Reconcile
from relay.sweeps.runner import run_sweep
from relay.sweeps.stream_upkeep import StreamUpkeep
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    import sqlalchemy as sa

    from tests.rows import Rows

NO_REDIS = "redis://127.0.0.1:9/0"


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    """An ordinary pool."""
    made = make_engine(database, name="test", size=4)
    yield made
    made.dispose()


@contextmanager
def view(url: str, consumer: str = "sweeper") -> Iterator[Stream]:
    """See the stream as one process does."""
    with connect(url) as client:
        yield Stream(client, prefix="t", consumer=consumer)


@pytest.fixture
def stream(broker: str) -> Iterator[Stream]:
    """The stream, its group made."""
    with view(broker) as made:
        made.ensure_group()
        yield made


# --- reap (B-24) ---


def leased(rows: Rows, endpoint: UUID, *, attempts: int = 1, expired: bool = True, budget_from: int = 0) -> UUID:
    """Make a delivery whose worker took it, for the `attempts`-th time, and whose lease ran out (or did not)."""
    delivery = rows.delivery(endpoint)
    rows.sql(
        """
        update relay.deliveries set status = 1, lease_token = relay.uuid7(), attempt_count = %s, budget_from = %s,
            lease_until = now() + make_interval(secs => %s), announced_at = now()
        where id = %s
        """,
        [attempts, budget_from, -1.0 if expired else 60.0, delivery],
    )
    return delivery


def rescued_total() -> float:
    """Return what the counter of rescued deliveries stands at."""
    return REGISTRY.get_sample_value("relay_deliveries_rescued_total") or 0.0


def test_an_expired_lease_goes_back_with_its_attempt_spent_once(hot: sa.Engine, rows: Rows) -> None:
    """The delivery waits for its policy's next due time, unannounced, with a `worker_lost` line; counted once."""
    delivery = leased(rows, rows.endpoint(retry={"strategy": "fixed", "base_ms": 60_000, "jitter": 0.0}), attempts=2)
    token = rows.get(delivery)["lease_token"]
    before = rescued_total()

    assert Reap(hot=hot).run_once(since_last=5.0) == {"rescued": 1}

    row = rows.get(delivery)
    assert (row["status"], row["attempt_count"], row["lease_token"]) == (Status.PENDING, 2, None)
    assert (row["lease_until"], row["announced_at"]) == (None, None)
    assert 50 < row["due_in"] <= 60
    (line,) = rows.attempts(delivery)
    assert (line["number"], line["class"], line["code"]) == (2, AttemptClass.RETRYABLE_FAILURE, "worker_lost")
    assert line["lease_token"] == token
    assert rescued_total() - before == 1


def test_a_live_lease_is_left_alone(hot: sa.Engine, rows: Rows) -> None:
    """Leases that run, and rows that are not in flight, are none of the reaper's."""
    endpoint = rows.endpoint()
    alive = leased(rows, endpoint, expired=False)
    done = leased(rows, endpoint)
    rows.sql("update relay.deliveries set status = 2 where id = %s", [done])
    before = rows.sql("select * from relay.deliveries order by id")

    assert Reap(hot=hot).run_once(since_last=5.0) == {"rescued": 0}
    assert rows.sql("select * from relay.deliveries order by id") == before
    assert rows.attempts(alive) == rows.attempts(done) == []


def test_a_delivery_that_keeps_killing_its_worker_dies(hot: sa.Engine, rows: Rows) -> None:
    """The last attempt of the budget, lost, ends the delivery as exhausted, with the evidence; others go on (C-51)."""
    endpoint = rows.endpoint(retry={"strategy": "fixed", "base_ms": 1000, "max_attempts": 3})
    last = leased(rows, endpoint, attempts=3)
    replayed = leased(rows, endpoint, attempts=5, budget_from=3)

    assert Reap(hot=hot).run_once(since_last=5.0) == {"rescued": 2}

    row = rows.get(last)
    assert (row["status"], row["reason"], row["attempt_count"]) == (Status.DEAD, "attempts_exhausted", 3)
    assert row["last_attempt"]["code"] == "worker_lost"
    assert rows.get(replayed)["status"] == Status.PENDING


def test_more_than_one_batch_is_rescued(hot: sa.Engine, rows: Rows) -> None:
    """A fleet's worth of leases is returned in one run, whatever the batch."""
    endpoint = rows.endpoint()
    rows.deliveries(endpoint, 25)
    rows.sql(
        "update relay.deliveries set status = 1, attempt_count = 1, lease_token = relay.uuid7(),"
        " lease_until = now() - interval '1 s'"
    )
    assert Reap(hot=hot, batch=10).run_once(since_last=5.0) == {"rescued": 25}
    assert rows.statuses() == {Status.PENDING: 25}
    assert rows.value("select count(*) from relay.delivery_attempts") == 25


@pytest.mark.parametrize(
    ("since", "stands_down"), [(5.0, False), (14.0, False), (16.0, True), (3600.0, True), (float("inf"), False)]
)
def test_after_a_gap_recorders_come_first(hot: sa.Engine, rows: Rows, since: float, stands_down: bool) -> None:
    """After an outage the reaper waits a period, so that results that wait are written; a first run does not wait."""
    delivery = leased(rows, rows.endpoint())
    counts = Reap(hot=hot).run_once(since_last=since)
    assert counts == ({"rescued": 0, "stood_down": 1} if stands_down else {"rescued": 1})
    assert rows.get(delivery)["status"] == (Status.IN_FLIGHT if stands_down else Status.PENDING)


def test_the_gap_is_one_period_long(engine: sa.Engine, hot: sa.Engine, rows: Rows) -> None:
    """The run after the one that stood down rescues: standing down is paid once an outage."""
    delivery = leased(rows, rows.endpoint())
    reap = Reap(hot=hot)
    rows.sql("insert into relay.sweeps (name, started_at) values ('reap', now() - interval '10 min')")
    assert run_sweep(engine, reap) == {"rescued": 0, "stood_down": 1}
    rows.sql("update relay.sweeps set started_at = now() - interval '5 s'")
    assert run_sweep(engine, reap) == {"rescued": 1}
    assert rows.get(delivery)["status"] == Status.PENDING


# --- reconcile (B-25) ---


def test_a_lost_hint_is_announced_again(hot: sa.Engine, rows: Rows, stream: Stream) -> None:
    """With nothing unread, due rows announced long ago lose their mark; fresh ones and those not due keep it."""
    endpoint = rows.endpoint()
    lost = rows.delivery(endpoint, announced_ago=60.0)
    fresh = rows.delivery(endpoint, announced_ago=5.0)
    later = rows.delivery(endpoint, announced_ago=60.0, due_in=60.0)
    taken = leased(rows, endpoint, expired=False)

    assert Reconcile(hot=hot, stream=stream, after_secs=30).run_once(since_last=10.0) == {"unannounced": 1}

    marked = {id_: rows.get(id_)["announced_at"] is not None for id_ in (lost, fresh, later, taken)}
    assert marked == {lost: False, fresh: True, later: True, taken: True}
    assert stream.length() == 0


def test_a_flushed_redis_is_mended(hot: sa.Engine, rows: Rows, broker: str) -> None:
    """After a flush there is neither stream nor group: everything announced long ago counts as lost."""
    rows.deliveries(rows.endpoint(), 25, announced_ago=60.0)
    with view(broker) as stream:
        sweep = Reconcile(hot=hot, stream=stream, after_secs=30, batch=10)
        assert sweep.run_once(since_last=10.0) == {"unannounced": 25}


def test_a_backlog_is_not_fed_to_itself(hot: sa.Engine, rows: Rows, stream: Stream) -> None:
    """While no hint was read yet, rows may be marked for hours: theirs may still be unread, so none is announced (C-57)."""
    ids = rows.deliveries(rows.endpoint(), 50, announced_ago=3600.0)
    stream.announce(ids)
    assert Reconcile(hot=hot, stream=stream, after_secs=30).run_once(since_last=10.0) == {"unannounced": 0}
    assert rows.value("select count(*) from relay.deliveries where announced_at is null") == 0


def test_a_standing_backlog_keeps_no_lost_hint_lost(hot: sa.Engine, rows: Rows, stream: Stream, broker: str) -> None:
    """With entries unread, exactly the rows announced well before the last delivered id's time count as lost."""
    with redis.Redis.from_url(broker) as client:
        seconds, micros = client.time()
        delivered_ms = int((seconds + micros / 1e6 - 100) * 1000)
        # A hint that was read 100 s ago, and one that has waited since.
        client.xadd("t:hints", {"d": uuid4().bytes}, id=f"{delivered_ms}-0")
        client.xadd("t:hints", {"d": uuid4().bytes}, id=f"{delivered_ms + 1}-0")
    (read,) = stream.read(1, block_ms=1)
    assert read.entry == f"{delivered_ms}-0".encode()
    endpoint = rows.endpoint()
    lost = rows.delivery(endpoint, announced_ago=140.0)
    perhaps_unread = rows.delivery(endpoint, announced_ago=120.0)

    assert Reconcile(hot=hot, stream=stream, after_secs=30).run_once(since_last=10.0) == {"unannounced": 1}
    assert rows.get(lost)["announced_at"] is None
    assert rows.get(perhaps_unread)["announced_at"] is not None


def test_without_redis_nothing_is_unmarked(hot: sa.Engine, rows: Rows) -> None:
    """Where the stream cannot be seen nobody knows what is unread: the reconciler does nothing, and does not fail."""
    rows.delivery(rows.endpoint(), announced_ago=3600.0)
    with view(NO_REDIS) as stream:
        sweep = Reconcile(hot=hot, stream=stream, after_secs=30)
        assert sweep.run_once(since_last=10.0) == {"unannounced": 0}
    assert rows.value("select count(*) from relay.deliveries where announced_at is null") == 0


# --- upkeep of the stream (B-26) ---


def test_what_a_dead_worker_read_is_announced_again(hot: sa.Engine, rows: Rows, stream: Stream, broker: str) -> None:
    """Entries that nobody settles lose their rows' marks and leave the stream; a leased row keeps its lease."""
    endpoint = rows.endpoint()
    waiting = rows.deliveries(endpoint, 3, announced_ago=60.0)
    taken = leased(rows, endpoint, expired=False)
    with view(broker, "dead") as dead:
        dead.announce([*waiting, taken, uuid4()])
        dead.read(10, block_ms=1)
    upkeep = StreamUpkeep(hot=hot, stream=stream, idle_ms=0)

    assert upkeep.run_once(since_last=15.0) == {"reclaimed": 5, "forgotten_consumers": 0}
    assert [rows.get(id_)["announced_at"] for id_ in waiting] == [None] * 3
    assert rows.get(taken)["status"] == Status.IN_FLIGHT
    assert rows.get(taken)["lease_token"] is not None
    assert stream.length() == 0


def test_what_a_live_worker_has_just_read_stays_its_own(
    hot: sa.Engine, rows: Rows, stream: Stream, broker: str
) -> None:
    """Entries that were read a moment ago are not taken away."""
    delivery = rows.delivery(rows.endpoint(), announced_ago=1.0)
    with view(broker, "alive") as alive:
        alive.announce([delivery])
        alive.read(10, block_ms=1)
        upkeep = StreamUpkeep(hot=hot, stream=stream)
        assert upkeep.run_once(since_last=15.0) == {"reclaimed": 0, "forgotten_consumers": 0}
        assert len(alive.read_unacknowledged(10)) == 1
    assert rows.get(delivery)["announced_at"] is not None


def test_dead_consumers_are_forgotten(hot: sa.Engine, stream: Stream, broker: str) -> None:
    """The names of processes that are gone leave the group, once silent for long."""
    with redis.Redis.from_url(broker) as client:
        for name in ("gone-1", "gone-2"):
            client.xgroup_createconsumer("t:hints", GROUP, name)
        wait_until(lambda: all(c["idle"] > 20 for c in client.xinfo_consumers("t:hints", GROUP)))
        upkeep = StreamUpkeep(hot=hot, stream=stream, consumer_idle_ms=20)
        counts = upkeep.run_once(since_last=15.0)
        assert counts["forgotten_consumers"] >= 2
        names = {c["name"] for c in client.xinfo_consumers("t:hints", GROUP)}
        assert not names & {b"gone-1", b"gone-2"}


def test_without_redis_upkeep_does_nothing(hot: sa.Engine) -> None:
    """A stream that does not answer is no failure of the sweep."""
    with view(NO_REDIS) as stream:
        counts = StreamUpkeep(hot=hot, stream=stream).run_once(since_last=15.0)
    assert counts == {"reclaimed": 0, "forgotten_consumers": 0}


# --- all of them ---


class Counting:
    """A sweep that counts its runs, and how many ran at one time."""

    name = "counting"
    interval_secs = 60.0

    def __init__(self) -> None:
        self.runs = 0
        self.together = threading.Event()

    def run_once(self, *, since_last: float) -> dict[str, int]:
        """Count, and stay until told."""
        self.runs += 1
        self.together.wait(10)
        return {"runs": self.runs}


def test_two_runners_at_once_run_it_once(engine: sa.Engine) -> None:
    """While one runs a sweep another returns at once with nothing; right after it, too (C-54)."""
    sweep = Counting()
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.append(run_sweep(engine, sweep)))
    thread.start()
    wait_until(lambda: sweep.runs == 1)
    assert run_sweep(engine, sweep) is None
    sweep.together.set()
    thread.join()
    assert outcomes == [{"runs": 1}]
    assert run_sweep(engine, sweep) is None
    assert sweep.runs == 1


def test_ticks_that_piled_up_cost_nothing(engine: sa.Engine, rows: Rows) -> None:
    """Of twenty ticks at one time one runs; after half an interval by the database's clock the next one does."""
    sweep = Counting()
    sweep.together.set()
    assert [run_sweep(engine, sweep) is not None for _ in range(20)] == [True] + [False] * 19
    rows.sql("update relay.sweeps set started_at = started_at - interval '31 s'")
    assert run_sweep(engine, sweep) == {"runs": 2}
    assert rows.value("select counts from relay.sweeps") == {"runs": 2}


def test_a_sweep_that_fails_lets_go_of_its_lock(engine: sa.Engine, rows: Rows) -> None:
    """An error reaches the caller, and the sweep can run again when its time has come."""

    class Failing(Counting):
        def run_once(self, *, since_last: float) -> dict[str, int]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_sweep(engine, Failing())
    rows.sql("update relay.sweeps set started_at = started_at - interval '31 s'")
    sweep = Counting()
    sweep.together.set()
    assert run_sweep(engine, sweep) == {"runs": 1}


def test_two_reapers_at_once_rescue_each_row_once(hot: sa.Engine, rows: Rows) -> None:
    """Even without the sweeps' lock two reapers share the rows out: the fence and the row locks decide."""
    rows.deliveries(rows.endpoint(), 60)
    rows.sql(
        "update relay.deliveries set status = 1, attempt_count = 1, lease_token = relay.uuid7(),"
        " lease_until = now() - interval '1 s'"
    )
    counts: list[int] = []
    together = threading.Barrier(2)

    def run() -> None:
        together.wait()
        counts.append(Reap(hot=hot, batch=7).run_once(since_last=5.0)["rescued"])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What one had locked the other may have missed: that is for the next run.
    counts.append(Reap(hot=hot).run_once(since_last=5.0)["rescued"])
    assert sum(counts) == 60
    assert rows.value("select count(*) from relay.delivery_attempts") == 60
