"""What a process tells of its own progress: on its health port, in its heartbeat, and through readiness."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
import pytest
import requests

from relay.config_values import Bind
from relay.delivery.intake import Rhythm
from relay.process.health import HealthServer
from relay.process.heart import Heart
from relay.store import heartbeats
from relay.store.engine import make_engine
from relay.store.heartbeats import Process
from relay.store.ids import new_id
from tests.hostile import wait_until
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import sqlalchemy as sa

    from relay.bootstrap.worker import Worker
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


def _beat(relay: Instance, role: str, details: Mapping[str, object] | None = None) -> None:
    process = Process(process_id=new_id(), role=role, host="h", pid=1, release="0")
    with relay.api.engine.begin() as connection:
        heartbeats.beat(connection, process, details or {})


def test_healthz_is_503_once_a_vital_part_is_dead() -> None:
    """200 and nothing else while all live; afterwards 503 with the names, so that a supervisor starts anew (B-155)."""
    dead: list[str] = []
    server = HealthServer(Bind("127.0.0.1", 0), dead=lambda: dead)
    server.start()
    try:
        url = f"http://127.0.0.1:{server._server.server_port}/healthz"
        answer = requests.get(url, timeout=5)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        dead.append("relay-engine")
        answer = requests.get(url, timeout=5)
        assert (answer.status_code, answer.json()) == (503, {"status": "failing", "dead": ["relay-engine"]})
    finally:
        server.stop()


def test_a_heart_outlives_its_pulse_and_leaves_within_the_deadline(database: str, rows: Rows) -> None:
    """A pulse that raises costs a beat and no more; `stop` takes the row away, and never waits beyond its deadline."""
    engine = make_engine(database, name="test", size=1)
    hang = threading.Event()
    pulses = 0

    def pulse(_: sa.Connection) -> Mapping[str, object]:
        nonlocal pulses
        pulses += 1
        if pulses == 1:
            raise KeyError("a bug")
        if pulses == 3:
            hang.wait(20)
        return {"pulses": pulses}

    heart = Heart(engine, role="worker", process_id=uuid4(), pulse=pulse, beat_secs=0.02)
    try:
        heart.start()
        wait_until(lambda: pulses == 3)
        assert rows.value("select details->>'pulses' from relay.heartbeats") == "2"
        began = time.monotonic()
        heart.stop(began + 0.2)
        assert 0.1 < time.monotonic() - began < 0.8
        hang.set()
        wait_until(lambda: rows.value("select count(*) from relay.heartbeats") == 0)
    finally:
        hang.set()
        heart.stop()
        engine.dispose()


def test_readiness_tells_workers_that_stand_still(relay: Instance) -> None:
    """One of two stalled is worth a word; where all are, or one's thread is dead, it is no longer ready (B-155)."""
    _beat(relay, "publisher", {"leading": True, "looked_secs": 0.0})
    _beat(relay, "beat")
    _beat(relay, "worker", {"stalled": {"recorder": 12.3, "claim": 11.0}})
    _beat(relay, "worker", {"in_flight": 3})
    answer = relay.client.get("/readyz")
    assert answer.status_code == 200
    assert answer.get_json()["checks"]["worker"] == "ok, but 1 of 2 stalled (claim for 11 s, recorder for 12 s)"
    relay.query("update relay.heartbeats set details = %s where details ? 'in_flight'", '{"dead": ["relay-engine"]}')
    answer = relay.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.get_json()["checks"] == {
        "database": "ok",
        "worker": "2 of 2 stalled (claim for 11 s, recorder for 12 s, relay-engine is dead)",
        "publisher": "ok",
        "beat": "ok",
        "lateness": "ok",
    }
    assert relay.client.get("/readyz?for=ingest").status_code == 200


def test_readiness_tells_that_no_publisher_looks(relay: Instance) -> None:
    """Publishers that wait for the lock are well while one of them looks; not where none has for long."""
    _beat(relay, "beat")
    _beat(relay, "worker")
    _beat(relay, "publisher", {"leading": False, "looked_secs": 500.0})
    _beat(relay, "publisher", {"leading": True, "looked_secs": 0.1})
    assert relay.client.get("/readyz").status_code == 200
    relay.query(
        "update relay.heartbeats set details = %s where details ->> 'leading' = 'true'", '{"looked_secs": 41.0}'
    )
    answer = relay.client.get("/readyz")
    assert answer.status_code == 503
    said = "stalled: none has looked for due deliveries for 41 s"
    assert answer.get_json()["checks"]["publisher"] == said


def test_a_worker_takes_no_more_while_its_results_cannot_be_written(
    start_worker: Callable[..., Worker], rows: Rows, receiver: Receiver, database: str
) -> None:
    """Once results have waited for a while no hint is read and no row claimed, until they are written (F-14, B-28)."""
    endpoint = rows.endpoint(url=f"{receiver.url}/ok")
    worker = start_worker(rhythm=Rhythm(hold_secs=0.3, block_secs=0.1))
    with psycopg.connect(database) as other:
        other.execute("lock table relay.delivery_attempts in exclusive mode")
        first = rows.deliveries(endpoint, 3)
        worker.intake._settler.announce(first)
        wait_until(lambda: worker.recorder.oldest_secs > 0.5)
        more = rows.deliveries(endpoint, 5)
        worker.intake._settler.announce(more)
        assert not _within(1.0, lambda: rows.value("select count(*) from relay.deliveries where status = 1") > 3)
        other.rollback()
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where status = 2") == 8)
    assert {rows.get(id_)["attempt_count"] for id_ in first + more} == {1}


def test_a_claim_that_hangs_shows_and_keeps_no_other_back(
    start_worker: Callable[..., Worker], rows: Rows, receiver: Receiver
) -> None:
    """While the database answers other connections the worker goes on; its vitals name the claim, until it ends."""
    endpoint = rows.endpoint(url=f"{receiver.url}/ok")
    worker = start_worker(rhythm=Rhythm(retry_secs=0.1))
    assert (worker.vitals.details(), worker.intake.claim_secs) == ({}, 0.0)
    hung = object()
    worker.intake._claims[hung] = time.monotonic() - 30
    worker.intake._settler.announce(rows.deliveries(endpoint, 5))
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where status = 2") == 5)
    assert 30 <= worker.vitals.stalled()["claim"] < 60
    del worker.intake._claims[hung]
    assert worker.vitals.details() == {}


def _within(secs: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
