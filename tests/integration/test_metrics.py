"""What is measured agrees with what is on record, stays bounded, and survives the processes that counted it."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import requests
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relay import metrics
from relay.core.model import AttemptClass, DeadReason, DeferReason, Status
from relay.outbox.stream import Stream, connect
from relay.process.metrics_api import ApiFigures, shared
from relay.process.metrics_queue import QueueGauges
from relay.store import gauges
from relay.store.engine import make_engine
from tests.hostile import wait_until
from tests.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from relay.bootstrap.worker import Worker
    from relay.outbox.publisher import Publisher
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _own() -> Samples:
    return _samples(generate_latest(metrics.REGISTRY).decode())


def _value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, frozenset(labels.items()))]


def test_totals_are_those_of_the_database(
    start_worker: Callable[..., Worker], publisher: Publisher, rows: Rows, receiver: Receiver
) -> None:
    """After a run with failures of every kind each counter equals the count of its rows."""
    before = _own()
    quick = {"strategy": "schedule", "schedule_ms": [10, 20], "jitter": 0.0}
    gone = rows.endpoint(f"{receiver.url}/ok", retry=quick)
    for path, count in (
        ("/ok", 30),
        ("/always500", 10),
        ("/status?code=410", 3),
        ("/flaky?pct=50&seed=1", 5),
        ("/status?code=404", 4),
    ):
        rows.deliveries(rows.endpoint(receiver.url + path, retry=quick), count)
    one_at_a_time = rows.endpoint(f"{receiver.url}/slow?ms=30", retry=quick, max_in_flight=1)
    rows.deliveries(one_at_a_time, 6)
    rows.sql("update relay.endpoints set deleted_at = now() where id = %s", [gone])
    rows.deliveries(gone, 3)
    worker = start_worker(RELAY_BREAKER="false")
    done = "select count(*) from relay.deliveries where status in (0, 1)"
    wait_until(lambda: rows.value(done) == 0, patience=40)
    wait_until(lambda: worker.recorder.waiting == 0)

    after = _own()

    def grown(name: str, **labels: str) -> float:
        return _value(after, name, **labels) - _value(before, name, **labels)

    for cls in AttemptClass:
        on_record = rows.value("select count(*) from relay.delivery_attempts where class = %s", [int(cls)])
        assert grown("relay_delivery_attempts_total", outcome=cls.label) == on_record, cls
    for reason in DeadReason:
        given_up = rows.value("select count(*) from relay.deliveries where status = 3 and reason = %s", [reason.value])
        assert grown("relay_deliveries_dead_total", reason=reason.value) == given_up, reason
    assert grown("relay_deliveries_dead_total", reason="endpoint_deleted") == 3
    assert grown("relay_deliveries_deferred_total", reason="slot") > 0
    sent = rows.value("select count(*) from relay.delivery_attempts where class <> 3")
    assert grown("relay_delivery_duration_seconds_count") == sent == receiver.count()
    firsts = rows.value("select count(*) from relay.delivery_attempts where number = 1 and status is not null")
    assert grown("relay_delivery_latency_seconds_count") == firsts
    assert 0 < grown("relay_delivery_latency_seconds_sum") < firsts * 60
    assert grown("relay_delivery_attempts_total", outcome="permanent_failure") >= 7
    assert rows.statuses()[Status.DELIVERED] >= 36


def test_each_label_value_is_there_from_the_start() -> None:
    """A counter that never counted is 0, and not absent: a rate over its first step would miss it."""
    samples = _own()
    for cls in AttemptClass:
        assert ("relay_delivery_attempts_total", frozenset({("outcome", cls.label)})) in samples
    for reason in DeferReason:
        assert ("relay_deliveries_deferred_total", frozenset({("reason", reason.value)})) in samples
    for dead in DeadReason:
        assert ("relay_deliveries_dead_total", frozenset({("reason", dead.value)})) in samples
    assert {name for name, _ in samples if not name.endswith("_created")} <= metrics.names()


def test_gauges_tell_of_the_queue_and_stay_as_many(database: str, broker: str, rows: Rows) -> None:
    """The gauges are NaN and 0 on an empty queue, true on a full one, absent from who does not lead; 2,000 endpoints of
    500 types make no more series, and looking reads no finished row."""
    engine = make_engine(database, name="test", size=1)
    leading = threading.Event()
    registry = CollectorRegistry()
    with connect(broker) as client:
        stream = Stream(client, prefix="t", consumer="test")
        queue = QueueGauges(engine, stream, leading=leading.is_set)
        registry.register(queue)

        def scrape() -> Samples:
            queue.look()
            return _samples(generate_latest(registry).decode())

        assert scrape() == {}
        leading.set()
        empty = scrape()
        assert _value(empty, "relay_queue_depth") == _value(empty, "relay_queue_lateness_seconds") == 0
        age = _value(empty, "relay_queue_oldest_pending_age_seconds")
        assert age != age, "an empty queue has no oldest"
        assert _value(empty, "relay_stream_unread") == 0

        rows.sql(
            """
            insert into relay.endpoints (id, workspace_id, url, event_types)
            select gen_random_uuid(), %s, 'http://127.0.0.1:1/' || n, array['type.' || n %% 500]
            from generate_series(1, 2000) n
            """,
            [rows.workspace_id],
        )
        endpoint = rows.endpoint(enabled=False)
        rows.sql("update relay.endpoints set breaker_state = 1 where id = %s", [endpoint])
        done = rows.deliveries(endpoint, 3000)
        rows.sql("update relay.deliveries set status = 2, finished_at = now() where id = any(%s)", [done])
        rows.deliveries(endpoint, 5, due_in=-7)
        announced = rows.deliveries(endpoint, 4, due_in=-9, announced_ago=8)
        rows.deliveries(endpoint, 3, due_in=600)
        rows.sql("update relay.deliveries set due_at = null where id = any(%s)", [rows.deliveries(endpoint, 2)])
        leased = rows.deliveries(endpoint, 1)
        rows.sql("update relay.deliveries set status = 1, lease_until = now() where id = any(%s)", [leased])
        rows.sql(
            "insert into relay.delivery_attempts (delivery_id, at, lease_token, generation, class)"
            " values (%s, '2001-01-01', gen_random_uuid(), 0, 0)",
            [done[0]],
        )
        stream.ensure_group()
        stream.announce(announced)
        stream.read(1, block_ms=1)
        full = scrape()
        assert full.keys() == empty.keys()
        assert _value(full, "relay_queue_depth") == 9
        assert 9 <= _value(full, "relay_queue_lateness_seconds") < 60
        assert 0 <= _value(full, "relay_queue_oldest_pending_age_seconds") < 60
        states = {state: _value(full, "relay_deliveries", state=state) for state in ("waiting", "paused", "in_flight")}
        assert states == {"waiting": 3, "paused": 2, "in_flight": 1}
        assert _value(full, "relay_breakers", state="open") == 1
        assert _value(full, "relay_breakers", state="closed") == 2000
        assert _value(full, "relay_endpoints", state="disabled") == 1
        assert _value(full, "relay_stream_unread") == 3
        assert _value(full, "relay_attempt_default_partition_rows") == 1
        assert {name for name, _ in full} <= metrics.names()

        rows.sql("analyze relay.deliveries")
        with engine.begin() as connection:
            connection.execute(gauges._BOUNDS)
            for statement, given in ((gauges.DEPTHS, gauges.COUNTED), (gauges.OLDEST, gauges._SAMPLE)):
                parameters = dict.fromkeys(statement.compile().params, given)
                explained = connection.exec_driver_sql(
                    "explain (analyze, format json) " + _literal(str(statement.text), parameters)
                ).scalar_one()
                for scan in _scans(explained[0]["Plan"]):
                    assert scan["Node Type"] in {"Index Scan", "Index Only Scan"}, json.dumps(scan)
                    assert scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) < 20, json.dumps(scan)
    engine.dispose()


def _literal(text: str, parameters: dict[str, int]) -> str:
    for name, value in parameters.items():
        text = text.replace(f":{name}", str(value))
    return text


def _scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if plan.get("Relation Name") == "deliveries":
        yield plan
    for part in plan.get("Plans", ()):
        yield from _scans(part)


def test_a_row_of_figures_goes_from_a_dead_process_to_the_next() -> None:
    """Counters of several processes add up, and one that takes a row over counts on from there."""
    memory = shared(2)
    first, second = ApiFigures(memory, 0), ApiFigures(memory, 1)
    for _ in range(3):
        first.answered(202, ingest_secs=0.004)
    second.answered(503, ingest_secs=9.0)
    ApiFigures(memory, 0).answered(404)
    registry = CollectorRegistry()
    registry.register(second)
    seen = _samples(generate_latest(registry).decode())
    by_status = {status: _value(seen, "relay_http_requests_total", status=status) for status in ("2xx", "4xx", "5xx")}
    assert by_status == {"2xx": 3, "4xx": 1, "5xx": 1}
    assert _value(seen, "relay_ingest_accepted_total") == 3
    assert _value(seen, "relay_ingest_duration_seconds_bucket", le="0.005") == 3
    assert _value(seen, "relay_ingest_duration_seconds_count") == 4
    assert _value(seen, "relay_api_processes") == 2
    assert {name for name, _ in seen} <= metrics.names()


def test_processes_show_their_figures(database: str, broker: str) -> None:
    """An API of two processes counts for both, a kill -9 included; of two publishers only the one that works has the
    queue's gauges."""
    with Stack(database_url=database, broker_url=broker) as stack:
        api, one, other = (
            stack.launch("api", RELAY_API_PROCESSES="2"),
            stack.launch("publisher"),
            stack.launch("publisher"),
        )
        stack.ready(api)
        wait_until(lambda: _value(_api(stack), "relay_api_processes") == 2, patience=40)
        _post(stack, 20)
        assert _value(_api(stack), "relay_ingest_accepted_total") == 20

        wait_until(lambda: len(stack.rows("select 1 from relay.heartbeats where role = 'api'")) == 2, patience=40)
        pids = stack.rows("select pid from relay.heartbeats where role = 'api'")
        os.kill(pids[0][0], signal.SIGKILL)
        wait_until(lambda: len(stack.rows("select 1 from relay.heartbeats where role = 'api'")) == 3, patience=40)
        _post(stack, 5)
        assert _value(_api(stack), "relay_ingest_accepted_total") == 25

        def leaders() -> list[bool]:
            return [("relay_queue_depth" in role.scrape()) for role in (one, other)]

        wait_until(lambda: sum(leaders()) == 1, patience=40)
        leader = (one, other)[leaders().index(True)]
        beats = 'relay_heartbeat_age_seconds{role="api"}'
        # NaN until the figures are from after the API's first beat.
        wait_until(lambda: leader.scrape()[beats] < 60, patience=40)
        scraped = leader.scrape()
        assert (scraped["relay_publisher_leading"], scraped["relay_deliveries_announced_total"]) == (1, 0)


def _post(stack: Stack, count: int) -> None:
    for number in range(count):
        # A connection each: the system spreads connections over the processes.
        answer = requests.post(
            f"{stack.url}/v1/events", json={"type": "a.b", "n": number}, headers=stack.headers, timeout=20
        )
        assert answer.status_code == 202, answer.text


def _api(stack: Stack) -> Samples:
    answer = requests.get(f"{stack.url}/metrics", timeout=10)
    assert answer.status_code == 200
    return _samples(answer.text)
