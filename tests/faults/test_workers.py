"""Processes killed, paused or doubled at the worst instants: each delivery arrives, is counted once, and is at peace."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from uuid import UUID

import psutil
import requests

from relay.core.model import Status
from relay.outbox.stream import Stream, connect
from tests.stack import Stack, wait_until
from tests.traffic import Traffic, at_rest, check, duplicates, settle, still_works

#: Instants in a worker at which it is killed, and how often the receiver may have a delivery that was at that instant.
WORKER_INSTANTS = {
    "claim.before": 1,  # hints read, nothing committed
    "claim.after": 1,  # leases committed, hints not settled
    "send.before": 1,  # requests made, none begun
    "record.before": 2,  # answers read, none recorded
}
RESCUED = "relay_deliveries_rescued_total"
STALE = "relay_stale_results_total"
SUCCESS = 'relay_delivery_attempts_total{outcome="success"}'
FAILURE = 'relay_delivery_attempts_total{outcome="retryable_failure"}'


def test_worker_killed_mid_send_loses_nothing(database: str, broker: str) -> None:
    """kill -9 between request and answer: sent once more under the same id, two attempts, one rescue each."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/slow/killed?ms=2500")
        _, victim, _ = stack.start("publisher", "worker", "beat")
        traffic.ingest(20)
        stack.receiver.wait_for(20, 20)
        victim.kill()
        heir = stack.start("worker")[0]
        assert stack.end_leases() == 20
        settle(stack)
        for one in check(stack, traffic).values():
            assert (one.status, one.attempts, one.lost, one.receipts) == (Status.DELIVERED, 2, 1, 2)
        metrics = heir.metrics()
        assert (metrics[RESCUED], metrics[SUCCESS], metrics[FAILURE], metrics[STALE]) == (20, 20, 20, 0)
        at_rest(stack)


def test_worker_paused_beyond_its_lease_overwrites_nothing(database: str, broker: str) -> None:
    """SIGSTOP mid-send, another delivers, SIGCONT: the late result is dropped, counted, and leaves no attempt row."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/slow/zombie?ms=1500")
        _, zombie, _ = stack.start("publisher", "worker", "beat")
        ids = traffic.ingest(1)
        stack.receiver.wait_for(1, 20)
        zombie.signal(signal.SIGSTOP)
        heir = stack.start("worker")[0]
        assert stack.end_leases() == 1
        settle(stack)
        before = stack.delivery(ids[0])
        assert [attempt["code"] for attempt in before["attempts"]] == ["worker_lost", None]

        zombie.signal(signal.SIGCONT)
        wait_until(lambda: zombie.metrics()[STALE] == 1, 20, "the late result is counted")
        assert stack.delivery(ids[0]) == before
        assert len(zombie.said("a stale result was dropped: the lease had gone to another")) == 1
        # The totals of all processes are those of the log: what was dropped is in neither.
        totals = [role.metrics() for role in (zombie, heir)]
        assert sum(metrics[SUCCESS] for metrics in totals) == 1
        assert sum(metrics[FAILURE] for metrics in totals) == 1
        assert [one.receipts for one in check(stack, traffic).values()] == [2]
        at_rest(stack)
        still_works(stack, traffic)


def test_worker_paused_before_its_sends_does_not_begin_them_late(database: str, broker: str) -> None:
    """SIGSTOP between claim and send until too little of the lease is left: on SIGCONT nothing is sent (B-22)."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/ok")
        stack.start("publisher", "beat")
        zombie = stack.start("worker", RELAY_FAILPOINT="send.before:stop")[0]
        traffic.ingest(5)
        wait_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_STOPPED, 20, "it stands still")
        stopped = time.monotonic()
        stack.start("worker")
        # A lease of 15 s, less 5 s for recording and the 4 s that a request may take.
        wait_until(lambda: time.monotonic() > stopped + 6.5, 10, "it is too late to begin")
        stack.end_leases()
        settle(stack)
        zombie.signal(signal.SIGCONT)
        wait_until(lambda: zombie.metrics()["relay_results_waiting"] == 0, 20, "it gives up what it held")
        at_rest(stack)
        assert {(one.attempts, one.lost, one.receipts) for one in check(stack, traffic).values()} == {(2, 1, 1)}


def test_worker_killed_at_each_instant(database: str, broker: str) -> None:
    """kill -9 before and after the claim, before the send and before the record: all is delivered, attempts add up."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.start("publisher", "beat")
        for instant in WORKER_INSTANTS:
            stack.endpoint(f"/ok/{instant}", types=[instant])
            victim = stack.launch("worker", RELAY_FAILPOINT=f"{instant}:kill")
            traffic.ingest(20, event_type=instant)
            assert victim.wait(60) == -signal.SIGKILL, victim.tail()
        stack.start("worker", "worker")
        stack.end_leases()
        settle(stack)
        accounts = check(stack, traffic)
        for one in accounts.values():
            assert one.status is Status.DELIVERED
            assert one.receipts <= WORKER_INSTANTS[one.event_type], one
            # A worker that came for one group may have taken others along when it died: an attempt each.
            assert one.attempts == 1 + one.lost <= len(WORKER_INSTANTS), one
        lost = {one.event_type for one in accounts.values() if one.lost}
        assert lost >= {"claim.after", "send.before", "record.before"}
        assert "record.before" in {one.event_type for one in duplicates(accounts)}
        at_rest(stack)
        still_works(stack, traffic)


def test_publisher_killed_between_mark_and_hint(database: str, broker: str) -> None:
    """kill -9 with rows marked and no hint added, and with hints added: each row is sent once."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/ok")
        for instant in ("publish.after_mark", "publish.after_announce"):
            victim = stack.launch("publisher", RELAY_FAILPOINT=f"{instant}:kill")
            traffic.ingest(20)
            assert victim.wait(60) == -signal.SIGKILL, victim.tail()
        marked = "select count(*) from relay.deliveries where announced_at is not null"
        assert stack.rows(marked)[0][0] == 40
        with stack.redis() as client:
            assert client.xlen("relay:hints") == 20
        stack.start("publisher", "worker", "beat")
        settle(stack, 30)
        assert {(one.attempts, one.receipts) for one in check(stack, traffic).values()} == {(1, 1)}
        at_rest(stack)


def test_api_killed_around_the_commit(database: str, broker: str) -> None:
    """kill -9 before the commit leaves nothing; after it, and before the answer, the event is delivered all the same."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/ok")
        for instant, events in (("ingest.before_commit", 0), ("ingest.after_commit", 1)):
            api = stack.start("api", RELAY_FAILPOINT=f"{instant}:kill")[0]
            with contextlib.suppress(requests.ConnectionError):
                requests.post(f"{stack.url}/v1/events", json={"type": "a.b"}, headers=stack.headers, timeout=10)
                raise AssertionError("a killed API answered")
            assert stack.rows("select count(*) from relay.events")[0][0] == events
            api.kill()
        stack.start("publisher", "worker")
        settle(stack)
        assert [one.receipts for one in check(stack, traffic).values()] == [1]


def test_hint_that_comes_three_times_sends_once(database: str, broker: str) -> None:
    """A hint is no ownership: the lease decides, and the hints that lose are settled (B-22, B-26)."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/slow/thrice?ms=200")
        stack.start("worker", "worker")
        ids = [UUID(id_) for id_ in traffic.ingest(30)]
        with contextlib.closing(connect(broker)) as client:
            stream = Stream(client, prefix="relay", consumer="tests")
            for _ in range(3):
                stream.announce(ids)
        settle(stack)
        with contextlib.closing(connect(broker)) as client:
            stream = Stream(client, prefix="relay", consumer="tests")
            stream.announce(ids)
            wait_until(lambda: stream.length() == 0, 20, "hints for finished rows are settled")
        assert {(one.attempts, one.receipts) for one in check(stack, traffic).values()} == {(1, 1)}


def test_payload_that_kills_its_worker_dies_of_exhaustion(database: str, broker: str) -> None:
    """What takes its worker down each time ends dead, its attempts `worker_lost`; others get through (B-24)."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        retry = {"strategy": "fixed", "base_ms": 100, "jitter": 0.0, "max_attempts": 2}
        stack.endpoint("/ok/poison", types=["poison"], retry=retry)
        stack.endpoint("/ok/healthy", types=["healthy"])
        stack.start("publisher", "beat")
        poison = traffic.ingest(1, event_type="poison")[0]
        worker, deaths = None, 0
        deadline = time.monotonic() + 90
        while stack.delivery(poison)["status"] != "dead":
            assert time.monotonic() < deadline, stack.delivery(poison)
            if worker is None or not worker.alive:
                deaths += worker is not None
                traffic.ingest(10, event_type="healthy")
                worker = stack.start("worker", RELAY_FAILPOINT="send.build.poison:kill")[0]
            stack.end_leases(older_secs=2.0)
            time.sleep(0.1)
        assert deaths == 2
        settle(stack)
        accounts = check(stack, traffic)
        assert stack.delivery(poison)["reason"] == "attempts_exhausted"
        assert (accounts[poison].attempts, accounts[poison].lost, accounts[poison].receipts) == (2, 2, 0)
        assert {one.status for one in accounts.values() if one.event_type == "healthy"} == {Status.DELIVERED}
        at_rest(stack)


def test_two_beats_and_restarts_under_a_live_queue_send_nothing_twice(database: str, broker: str) -> None:
    """Two beats, two publishers, one of each killed mid-way, a reconciler that looks early: each delivery comes once."""
    with Stack(database_url=database, broker_url=broker, RELAY_RECONCILE_AFTER_SECS="1") as stack:
        stack.endpoint("/slow/twice?ms=50")
        publisher, beat, _ = stack.start("publisher", "beat", "worker")
        # The standby waits for the lock.
        standby = stack.launch("publisher")
        stack.start("api", "beat", "worker")
        with Traffic(stack) as traffic:
            traffic.ingest(500)
            traffic.wait_accepted(100)
            publisher.kill()
            beat.kill()
            standby.wait_said("publishing", 20)
            traffic.wait_accepted(100)
            starts = wait_starts(stack, 3)
        # Half an interval apart at least, however many beats tick.
        assert all(later - earlier >= 2.4 for earlier, later in itertools.pairwise(starts)), starts
        settle(stack)
        assert {(one.attempts, one.receipts) for one in check(stack, traffic).values()} == {(1, 1)}
        at_rest(stack)


def test_without_beat_retries_go_on_and_readiness_says_so(database: str, broker: str) -> None:
    """Retries need no beat, nor does the day after tomorrow; half a minute without its heartbeat, and /readyz is 503 and
    names it, while ingest is not."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.receiver.set_up("/toggle/beatless", up=False)
        stack.endpoint("/toggle/beatless")
        _, _, _, beat = stack.start("api", "publisher", "worker", "beat")
        wait_until(lambda: stack.get("/readyz") == 200, 20, "all is well")
        beat.kill()
        days = "select 1 from relay.sweeps where name = 'partitions' and finished_at is not null"
        wait_until(lambda: stack.rows(days), 20, "a worker makes missing days when it starts")
        traffic.ingest(1)
        stack.receiver.wait_for(3, 20)
        stack.receiver.set_up("/toggle/beatless", up=True)
        settle(stack)
        stack.rows("update relay.heartbeats set beat_at = now() - interval '31 s' where role = 'beat'")
        answer = requests.get(f"{stack.url}/readyz", timeout=5)
        assert answer.status_code == 503
        assert {name for name, said in answer.json()["checks"].items() if said != "ok"} == {"beat"}
        assert stack.get("/readyz?for=ingest") == 200
        stack.start("beat")
        wait_until(lambda: stack.get("/readyz") == 200, 20, "all is well again")


def wait_starts(stack: Stack, count: int) -> list[float]:
    """Watch the reaper until it has started `count` times; return when, in seconds."""
    seen: list[float] = []

    def watch() -> bool:
        rows = stack.rows("select extract(epoch from started_at)::float8 from relay.sweeps where name = 'reap'")
        if rows and rows[0][0] not in seen:
            seen.append(rows[0][0])
        return len(seen) >= count

    wait_until(watch, 30, f"the reaper runs {count} times")
    return seen
