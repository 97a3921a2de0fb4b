"""Redis is a hint: flushed, killed, frozen or restarted, it costs neither an event nor the delivery of one."""

from __future__ import annotations

import random
import signal
import time

import pytest

from relay.core.model import Status
from tests.stack import LONG, Stack, freeze, freeze_end, kill_redis, own_redis, wait_until
from tests.traffic import SEED, Traffic, at_rest, check, duplicates, settle, still_works

#: Seconds that Redis stays away.
OUTAGE_SECS = 30.0 if LONG else 5.0
#: Seconds within which ingest answers, whatever Redis does, on a machine that everything shares.
USUAL_SECS = 2.0
ALL = ("api", "publisher", "worker", "worker", "beat")


def test_flushed_three_times_under_load_nothing_is_lost(database: str, broker: str) -> None:
    """FLUSHALL at three random moments: the group is made again, every delivery arrives, none twice (B-26)."""
    chance = random.Random(SEED)
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.endpoint("/ok")
        stack.start(*ALL)
        with stack.redis() as client, Traffic(stack) as traffic:
            for _ in range(3):
                traffic.wait_accepted(chance.randrange(60, 140))
                client.flushall()
            traffic.wait_accepted(50)
        settle(stack, 30)
        accounts = check(stack, traffic)
        assert set(traffic.answers) == {202}
        assert duplicates(accounts) == []
        for role in stack.live("worker"):
            assert len(role.said("the stream's consumer group was gone: it is made again")) <= 20
        stack.sweeps_run()
        at_rest(stack)


def test_stream_or_group_deleted_is_mended(database: str, broker: str) -> None:
    """DEL of the stream and XGROUP DESTROY under load: reading goes on, and what is in the stream is still read."""
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.endpoint("/ok")
        stack.start(*ALL)
        with stack.redis() as client, Traffic(stack) as traffic:
            traffic.wait_accepted(80)
            client.delete("relay:hints")
            traffic.wait_accepted(80)
            client.xgroup_destroy("relay:hints", "workers")
            traffic.wait_accepted(80)
        settle(stack, 30)
        assert duplicates(check(stack, traffic)) == []
        at_rest(stack)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_away_for_long_delivery_and_rescue_go_on(how: str, database: str) -> None:
    """Redis killed (and back empty) or frozen: ingest answers in its usual time, workers find due rows themselves,
    a worker started meanwhile too, a dead worker's rows are rescued, a SIGTERM is obeyed; afterwards all is as before.
    """
    with own_redis() as server, Stack(database_url=database, broker_url=server.url) as stack:
        stack.endpoint("/slow/away?ms=300")
        _, _, victim, leaver, _, _ = stack.start("api", "publisher", "worker", "worker", "worker", "beat")
        stack.sweeps_run()
        with Traffic(stack) as traffic:
            traffic.wait_accepted(100)
            began = time.monotonic()
            freeze(server) if how == "frozen" else kill_redis(server, empty=True)
            late = stack.launch("worker")
            for role in (victim, leaver):
                role.wait_said("Redis does not answer: looking in Postgres instead", 10)
            before = stack.delivered()
            wait_until(lambda: stack.delivered() > before + 100, 15, "deliveries go on without Redis")

            # Its last answer is older than a send takes: what it holds has been claimed, and stays so.
            wait_until(lambda: victim.metrics()["relay_sends_in_flight"] >= 1, 10, "the victim is at work")
            victim.kill()
            wait_until(lambda: stack.end_leases(older_secs=1.5), 10, "the victim's leases are found")
            if not LONG:
                # In the long form the leases run out by themselves, within the outage as well.
                wait_until(lambda: rescued(stack), 12, "a stand-in rescues")
            leaver.signal(signal.SIGTERM)
            assert leaver.wait(13) == 0, leaver.tail()
            started = 'relay_delivery_attempts_total{outcome="success"}'
            wait_until(lambda: late.scrape().get(started, 0) > 0, 30, "a worker started without Redis delivers")
            wait_until(lambda: time.monotonic() > began + OUTAGE_SECS, OUTAGE_SECS, "the outage was long enough")
            assert rescued(stack)
            ended = time.monotonic()
            freeze_end(server) if how == "frozen" else server.start()
            traffic.wait_accepted(100)
        assert set(traffic.answers) == {202}
        assert (traffic.unknown, traffic.not_connected) == ([], 0)
        assert traffic.slowest(began, ended) < USUAL_SECS
        settle(stack, 40)
        accounts = check(stack, traffic)
        assert all(one.lost for one in duplicates(accounts)), duplicates(accounts)
        assert all(one.attempts == 1 + one.lost for one in accounts.values() if one.status is Status.DELIVERED)
        stack.sweeps_run()
        for role in stack.live("worker"):
            role.wait_said("reading hints from the stream", 20)
        at_rest(stack)
        still_works(stack, traffic)


def test_full_delivery_goes_on(database: str) -> None:
    """A Redis that takes no more writes: ingest and delivery go on, a dead worker's rows are rescued, a worker started
    meanwhile lives and works; once there is room all is as before."""
    with own_redis() as server, Stack(database_url=database, broker_url=server.url) as stack:
        stack.endpoint("/slow/full?ms=300")
        _, _, victim, _, _ = stack.start(*ALL)
        with stack.redis() as client, Traffic(stack) as traffic:
            traffic.wait_accepted(50)
            client.config_set("maxmemory", 1)
            began = time.monotonic()
            stack.live("publisher")[0].wait_said("Redis takes no hints; workers look for themselves", 10)
            before = stack.delivered()
            wait_until(lambda: stack.delivered() > before + 150, 30, "deliveries go on")
            late = stack.launch("worker")
            wait_until(lambda: victim.metrics()["relay_sends_in_flight"] >= 1, 20, "the victim is at work")
            victim.kill()
            wait_until(lambda: stack.end_leases(older_secs=1.5), 20, "the victim's leases are found")
            wait_until(lambda: rescued(stack), 30, "a stand-in rescues")
            started = 'relay_delivery_attempts_total{outcome="success"}'
            wait_until(lambda: late.scrape().get(started, 0) > 0, 30, "a worker started meanwhile delivers")
            assert late.alive, late.tail()
            ended = time.monotonic()
            assert not stack.live("publisher")[0].said("Redis takes hints again"), "a full one answers, and takes none"
            client.config_set("maxmemory", 0)
            traffic.wait_accepted(50)
        print(f"150 in {ended - began:.1f} s")
        assert set(traffic.answers) == {202}
        assert traffic.slowest(began, ended) < USUAL_SECS
        settle(stack, 30)
        accounts = check(stack, traffic)
        assert all(one.lost for one in duplicates(accounts)), duplicates(accounts)
        assert stack.live("worker")[1:], "a worker ended"
        late.wait_said("reading hints from the stream", 20)
        stack.sweeps_run()
        at_rest(stack)


def test_restarted_under_load_three_times_every_worker_lives_and_works(database: str) -> None:
    """A broker that comes and goes ends no worker; control tasks run, and each worker reads the stream afterwards."""
    with own_redis() as server, Stack(database_url=database, broker_url=server.url) as stack:
        stack.endpoint("/ok")
        stack.start(*ALL)
        workers = stack.live("worker")
        with Traffic(stack) as traffic:
            for _ in range(3):
                traffic.wait_accepted(100)
                kill_redis(server, empty=False)
                server.start()
            traffic.wait_accepted(100)
        settle(stack, 30)
        assert set(traffic.answers) == {202}
        assert duplicates(check(stack, traffic)) == []
        stack.sweeps_run()
        assert stack.live("worker") == workers
        # One at a time: the other stands still, so that what is delivered is this one's doing.
        for worker, other in (workers, workers[::-1]):
            other.signal(signal.SIGSTOP)
            traffic.ingest(20)
            settle(stack, 20)
            assert worker.alive
            other.signal(signal.SIGCONT)
        at_rest(stack)


def test_idle_reads_meet_no_time_out(database: str, broker: str) -> None:
    """A worker with nothing to do blocks in its read for longer than it works, without an error or a new connection."""
    with Stack(database_url=database, broker_url=broker) as stack, stack.redis() as client:
        worker = stack.start("worker")[0]
        rounds = 30 if LONG else 4

        def reads() -> int:
            return int(client.info("commandstats").get("cmdstat_xreadgroup", {}).get("calls", 0))

        begun = reads()
        wait_until(lambda: reads() > begun + 1, 10, "it reads")
        connections, begun = client.info("stats")["total_connections_received"], reads()
        wait_until(lambda: reads() >= begun + rounds, 5 + 2 * rounds, "it reads on")
        assert client.info("stats")["total_connections_received"] == connections
        assert not worker.said("Redis does not answer: looking in Postgres instead")


def rescued(stack: Stack) -> int:
    """Return how many attempts were ended in the name of a lost worker."""
    return int(stack.rows("select count(*) from relay.delivery_attempts where code = 'worker_lost'")[0][0])
