"""Rate, breaker, expiry and what brings rows back, with real workers against a real receiver, nothing patched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from relay.core.model import AttemptClass, Status
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from relay.bootstrap.worker import Worker
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

    StartWorker = Callable[..., Worker]

#: Retries that a test can wait for.
QUICK = {"strategy": "fixed", "base_ms": 50, "max_attempts": 40, "jitter": 0.0}
NEVER_AGAIN = {"strategy": "fixed", "base_ms": 3_600_000, "max_attempts": 5, "jitter": 0.0}

pytestmark = pytest.mark.usefixtures("publisher")


def all_have(rows: Rows, ids: Iterable[UUID], status: Status, *, patience: float = 30.0) -> None:
    """Wait until all of `ids` stand in `status`."""
    wanted = list(ids)
    wait_until(
        lambda: (
            rows.value("select count(*) from relay.deliveries where id = any(%s) and status = %s", [wanted, status])
            == len(wanted)
        ),
        patience=patience,
    )


def endpoint_of(rows: Rows, endpoint: UUID) -> dict[str, Any]:
    """Return an endpoint's row, with the seconds of its cooldown that are left."""
    (row,) = rows.sql(
        "select *, extract(epoch from breaker_open_until - now())::float8 as open_s from relay.endpoints where id = %s",
        [endpoint],
    )
    return row


def test_two_workers_keep_to_one_rate_and_each_row_waits_once(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Sixty deliveries at 30/s with a burst of 15: no span sees more, all arrive on their first attempt, none waits twice
    but at the seams, and the log has one line a wait (B-50, B-51, B-52, C-65)."""
    endpoint = rows.endpoint(f"{receiver.url}/ok", rate=30.0, burst=15, max_in_flight=100, retry={"max_attempts": 3})
    ids = rows.deliveries(endpoint, 60)
    for _ in range(2):
        start_worker(RELAY_CLAIM_BATCH="20")
    all_have(rows, ids, Status.DELIVERED)

    times = sorted(request.monotonic for request in receiver.requests())
    for first, at in enumerate(times):
        for last in range(first, len(times)):
            # Some time for what happens between the token and the receiver: on a busy machine those that were let go
            # one after the other arrive together. Two buckets, one a worker, would let 30 go at once.
            assert last - first + 1 <= 15 + 30.0 * (times[last] - at + 0.4) + 1
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1
    deferrals = rows.value("select count(*) from relay.delivery_attempts where class = 3")
    assert 20 <= deferrals <= 58
    plain = "select count(*) from relay.delivery_attempts where class = 3 and code = 'rate' and number is null"
    assert rows.value(plain) == deferrals
    wait_until(
        lambda: rows.sql("select sum(successes) as s, sum(deferrals) as d from relay.endpoint_minutes")[0]["s"] == 60,
        patience=12,
    )
    assert rows.value("select sum(deferrals) from relay.endpoint_minutes") >= deferrals


def test_a_raised_rate_brings_waiting_rows_forward(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Rows told to come back over the next hours come back at the new rate once it is asked for (B-52)."""
    endpoint = rows.endpoint(f"{receiver.url}/ok", rate=0.002, burst=1)
    ids = rows.deliveries(endpoint, 30)
    worker = start_worker()
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where deferred_reason = 'rate'") == 29)
    assert rows.value("select max(due_at) - now() > interval '3 h' from relay.deliveries")

    rows.sql("update relay.endpoints set rate_per_second = 100, burst = 50")
    rows.sql("insert into relay.wakes (endpoint_id) values (%s)", [endpoint])
    assert worker.run_sweep("wake") == {"brought_forward": 29, "ended": 0}
    all_have(rows, ids, Status.DELIVERED, patience=10)
    assert rows.sql("select * from relay.wakes") == []


def test_a_breaker_opens_over_two_workers_probes_once_and_comes_back_in_order(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Five failures, whichever worker saw them, open it; the backlog waits unspent, each row about once; one probe a
    cooldown; after its success the rows come back (B-60 to B-63, C-42, C-63)."""
    receiver.set_up(up=False)
    endpoint = rows.endpoint(f"{receiver.url}/toggle", retry=NEVER_AGAIN, rate=200.0, burst=200, max_in_flight=4)
    failing = rows.deliveries(endpoint, 5)
    workers = [start_worker(RELAY_BREAKER_COOLDOWN_SECS="1", RELAY_BREAKER_MAX_COOLDOWN_SECS="2") for _ in range(2)]
    wait_until(lambda: endpoint_of(rows, endpoint)["breaker_state"] != 0)
    assert receiver.count() == 5
    assert {rows.get(id_)["attempt_count"] for id_ in failing} == {1}

    backlog = rows.deliveries(endpoint, 100)
    # Two cooldowns go by, each with one probe that fails; then it is up again.
    wait_until(lambda: endpoint_of(rows, endpoint)["breaker_trips"] >= 3, patience=20)
    probes = receiver.count() - 5
    assert probes <= 4
    # Those that opened it, and each probe since.
    assert endpoint_of(rows, endpoint)["breaker_failures"] >= 5 + 2
    waits = rows.value("select max(deferred_count) from relay.deliveries where id = any(%s)", [backlog])
    assert waits <= 2 * probes + 2
    receiver.set_up(up=True)
    # By the log: a row that is being claimed counts its attempt for a moment.
    tried = rows.sql("select delivery_id from relay.delivery_attempts where number is not null and class <> 0")
    spent = {row["delivery_id"] for row in tried} & set(backlog)
    assert len(spent) <= probes + 1
    all_have(rows, set(backlog) - spent, Status.DELIVERED, patience=60)

    row = endpoint_of(rows, endpoint)
    assert (row["breaker_state"], row["breaker_failures"], row["breaker_trips"]) == (0, 0, 0)
    states = [line["state"] for line in rows.sql("select state from relay.breaker_changes order by generation")]
    assert states[:3] == [1, 2, 1]
    assert states[-2:] == [2, 0]
    # No probe overlaps another: between two changes to half-open lies one to open or closed.
    assert all(a != 2 or b != 2 for a, b in itertools.pairwise(states))
    assert all(worker.slots.in_use() == 0 for worker in workers)


@pytest.mark.parametrize(
    ("path", "state"),
    [("/status?code=404", 0), ("/429?retry_after=1", 0), ("/always500", 1)],
)
def test_what_a_probe_ends_as(start_worker: StartWorker, rows: Rows, receiver: Receiver, path: str, state: int) -> None:
    """Any answer but a 5xx closes; a 5xx opens for longer (B-61, C-62)."""
    endpoint = rows.endpoint(f"{receiver.url}{path}", retry=NEVER_AGAIN)
    rows.sql(
        "update relay.endpoints set breaker_state = 1, breaker_trips = 1, breaker_open_until = now(), breaker_generation = 1"
    )
    rows.delivery(endpoint)
    start_worker(RELAY_BREAKER_COOLDOWN_SECS="60")
    wait_until(lambda: endpoint_of(rows, endpoint)["breaker_generation"] == 3)

    row = endpoint_of(rows, endpoint)
    assert (row["breaker_state"], row["probe_delivery_id"], row["probe_deadline"]) == (state, None, None)
    assert receiver.count() == 1
    if state:
        assert row["breaker_trips"] == 2
        assert 110 < row["open_s"] <= 120


def test_a_probe_that_is_not_sent_or_says_nothing_is_handed_back(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A refused address frees the probe, and so does a worker that was killed with it, once its deadline has passed (C-62)."""
    refused = rows.endpoint("http://169.254.169.254/", retry=NEVER_AGAIN)
    lost = rows.endpoint(f"{receiver.url}/ok", retry=NEVER_AGAIN)
    rows.sql(
        "update relay.endpoints set breaker_state = 1, breaker_trips = 1, breaker_open_until = now(), breaker_generation = 1"
        " where id = %s",
        [refused],
    )
    rows.sql(
        "update relay.endpoints set breaker_state = 2, breaker_trips = 1, probe_deadline = now() + interval '0.5 s',"
        " probe_delivery_id = relay.uuid7(), breaker_generation = 1 where id = %s",
        [lost],
    )
    first, second = rows.delivery(refused), rows.delivery(lost)
    start_worker()
    all_have(rows, [first], Status.DEAD)
    all_have(rows, [second], Status.DELIVERED)

    wait_until(lambda: endpoint_of(rows, refused)["breaker_generation"] == 3)
    assert endpoint_of(rows, refused)["breaker_state"] == 1
    assert endpoint_of(rows, refused)["open_s"] <= 0
    wait_until(lambda: endpoint_of(rows, lost)["breaker_state"] == 0)


def test_a_test_goes_past_every_gate_once_and_counts_for_nothing(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Disabled, held, open and without a token: a test is sent all the same, not again, and moves nothing."""
    endpoint = rows.endpoint(f"{receiver.url}/always500", rate=0.001, burst=1, enabled=False)
    rows.sql(
        "update relay.endpoints set breaker_state = 1, breaker_open_until = now() + interval '1 h', held_until = now() +"
        " interval '1 h', breaker_generation = 5"
    )
    rows.sql("update relay.endpoint_buckets set tokens = 0")
    test, plain = rows.deliveries(endpoint, 2)
    rows.sql(
        "update relay.events set source = 3 where id = (select event_id from relay.deliveries where id = %s)", [test]
    )
    start_worker()
    all_have(rows, [test], Status.DEAD)
    wait_until(lambda: rows.get(plain)["deferred_reason"] == "paused")

    row = endpoint_of(rows, endpoint)
    assert (row["breaker_state"], row["breaker_generation"], row["failing_attempts"]) == (1, 5, 0)
    assert (rows.get(test)["attempt_count"], rows.get(test)["reason"]) == (1, "attempts_exhausted")
    assert rows.get(plain)["due_at"] is None
    assert receiver.count() == 1


def test_what_expired_ends_unsent_and_no_wait_goes_past_it(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A delivery whose time is over is dead with `expired`, without a request; waits are cut to it (B-34)."""
    endpoint = rows.endpoint(f"{receiver.url}/always500", retry=NEVER_AGAIN)
    slow = rows.endpoint(f"{receiver.url}/ok", rate=0.001, burst=1)
    over, failing = rows.deliveries(endpoint, 2)
    gone, waiting = rows.deliveries(slow, 2)
    rows.sql("update relay.deliveries set expires_at = now() - interval '1 s' where id = %s", [over])
    rows.sql(
        "update relay.deliveries set expires_at = now() + interval '1.5 s' where id = any(%s)",
        [[failing, waiting, gone]],
    )
    start_worker()
    all_have(rows, [over, failing], Status.DEAD)
    wait_until(lambda: rows.statuses() == {Status.DEAD: 3, Status.DELIVERED: 1})

    assert {rows.get(id_)["reason"] for id_ in (over, failing)} == {"expired"}
    assert (rows.get(over)["attempt_count"], rows.get(failing)["attempt_count"]) == (0, 1)
    assert receiver.count(path="/always500") == 1


def test_an_endpoint_that_fails_for_good_is_disabled(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Ten failed attempts over the time that was set disable it, audited; a success in between starts anew (B-122)."""
    endpoint = rows.endpoint(f"{receiver.url}/status?code=404")
    healthy = rows.endpoint(f"{receiver.url}/ok")
    rows.sql("update relay.endpoints set failing_attempts = 9, failing_since = now() - interval '6 d'")
    rows.delivery(healthy)
    rows.delivery(endpoint)
    start_worker()
    wait_until(lambda: not endpoint_of(rows, endpoint)["enabled"])
    wait_until(lambda: endpoint_of(rows, healthy)["failing_attempts"] == 0)

    assert endpoint_of(rows, endpoint)["disabled_reason"] == "failing"
    assert endpoint_of(rows, healthy)["failing_since"] is None
    assert rows.value("select action from relay.audit_log") == "endpoint.disabled"


def test_a_success_on_a_healthy_endpoint_writes_nothing_to_its_row(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A hundred deliveries leave the very row version that was there before."""
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    before = rows.value("select ctid::text || xmin::text from relay.endpoints")
    start_worker()
    all_have(rows, rows.deliveries(endpoint, 100), Status.DELIVERED)

    assert rows.value("select ctid::text || xmin::text from relay.endpoints") == before


def test_rows_of_a_deleted_endpoint_end_and_canceled_ones_do(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """The sweep ends what waits, what has only just come, and what will be due some time, of that endpoint alone (B-121)."""
    worker = start_worker()
    deleted, canceled, other = (rows.endpoint(f"{receiver.url}/hang", retry=NEVER_AGAIN) for _ in range(3))
    ids = {id_: rows.deliveries(id_, 3, due_in=3600) for id_ in (deleted, canceled, other)}
    for first, second, _ in ids.values():
        rows.sql("update relay.deliveries set deferred_reason = 'paused', due_at = null where id = %s", [first])
        rows.sql("update relay.deliveries set attempt_count = 1 where id = %s", [second])
    rows.sql("insert into relay.wakes (endpoint_id, ends_as) values (%s, 3), (%s, 4)", [deleted, canceled])
    assert worker.run_sweep("wake") == {"brought_forward": 0, "ended": 6}

    assert {(rows.get(id_)["status"], rows.get(id_)["reason"]) for id_ in ids[deleted]} == {
        (Status.DEAD, "endpoint_deleted")
    }
    assert {rows.get(id_)["status"] for id_ in ids[canceled]} == {Status.CANCELED}
    assert {rows.get(id_)["status"] for id_ in ids[other]} == {Status.PENDING}


def test_no_paused_row_sleeps_through_an_enable(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """A row whose pause was written after its endpoint was enabled is found by a sweep, and delivered (B-121)."""
    worker = start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    delivery = rows.delivery(endpoint, due_in=3600)
    rows.sql("update relay.deliveries set deferred_reason = 'paused', due_at = null")
    assert worker.run_sweep("sleepers") == {"asked": 1, "expired": 0}
    worker.run_sweep("wake")
    all_have(rows, [delivery], Status.DELIVERED)


def test_a_hold_defers_the_backlog_once_and_in_slots(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """After a 429 with Retry-After the others wait for its end, unspent, and come back one after the other (B-31)."""
    endpoint = rows.endpoint(
        f"{receiver.url}/429?retry_after=2", retry=NEVER_AGAIN, rate=20.0, burst=1, max_in_flight=1
    )
    (first,) = rows.deliveries(endpoint, 1)
    start_worker()
    wait_until(lambda: rows.get(first)["attempt_count"] == 1 and rows.get(first)["status"] == Status.PENDING)
    backlog = rows.deliveries(endpoint, 10)
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where deferred_reason = 'held'") == 10)

    waits = sorted(rows.get(id_)["due_in"] for id_ in backlog)
    assert 1.0 < waits[0] <= 2.0
    assert waits[-1] - waits[0] == pytest.approx(9 / 20.0, abs=0.1)
    assert (
        rows.value(
            "select count(*) from relay.delivery_attempts where class = %s and code = 'held'", [AttemptClass.DEFERRED]
        )
        == 10
    )
    assert receiver.count() == 1


def test_a_paused_row_expires_too(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Of a disabled endpoint's paused rows, those whose time is over die of it; the others stay paused (B-34)."""
    endpoint = rows.endpoint(f"{receiver.url}/ok", enabled=False)
    over, later = rows.deliveries(endpoint, 2)
    worker = start_worker()
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where deferred_reason = 'paused'") == 2)
    rows.sql("update relay.deliveries set expires_at = now() where id = %s", [over])
    rows.sql("update relay.deliveries set expires_at = now() + interval '1 h' where id = %s", [later])
    assert worker.run_sweep("sleepers") == {"asked": 0, "expired": 1}
    all_have(rows, [over], Status.DEAD)

    assert rows.get(over)["reason"] == "expired"
    assert (rows.get(later)["status"], rows.get(later)["due_at"]) == (Status.PENDING, None)
    assert receiver.count() == 0


def test_a_deleted_endpoint_is_no_fault(
    start_worker: StartWorker, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """Its secrets are gone with it, and that is not told as an error: its rows end as they should."""
    endpoint = rows.endpoint(signing="relay")
    rows.sql("update relay.endpoints set deleted_at = now(), enabled = false")
    start_worker()
    all_have(rows, [rows.delivery(endpoint)], Status.DEAD)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
