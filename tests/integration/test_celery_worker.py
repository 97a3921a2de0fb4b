"""A Celery worker with the stream step, in this process: what Celery is told, and what comes back when it fails."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import redis
from celery.app import trace
from celery.worker import WorkController
from celery.worker import state as celery_state

from relay.bootstrap.policies import make_vault
from relay.bootstrap.worker import make_worker
from relay.core.model import Status
from relay.delivery.intake import Rhythm
from relay.outbox.stream import GROUP, Stream, connect
from relay.tasks import deliver, maintenance, steps
from relay.tasks.app import make_app
from tests.hostile import wait_until
from tests.integration.conftest import at_rest, close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

    from relay.bootstrap.worker import Worker
    from relay.config import Settings
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

SECRET = "whsec_Y2VsZXJ5LW1hcmtlci1jZWxlcnktbWFya2VyLWM="


class Host:
    """A Relay worker inside a Celery worker, both in threads of this process."""

    def __init__(self, settings: Settings) -> None:
        self.worker: Worker = make_worker(settings)
        self.worker.intake._rhythm = rhythm = Rhythm(look_secs=0.5, look_late_secs=0.3, block_secs=0.2)
        self.worker.intake._next_look = time.monotonic() + rhythm.look_secs
        self.app: Celery = make_app(settings)
        self.runtime = steps.install(self.app, self.worker)
        maintenance.register(self.app, lambda: self.worker)
        # What the worker command does first: tasks are found in this app, and not in whatever app is the default.
        trace.setup_worker_optimizations(self.app, "test@host")
        self.controller: Any = WorkController(
            app=self.app,
            pool_cls="threads",
            concurrency=2,
            hostname="test@host",
            without_gossip=True,
            without_mingle=True,
        )
        self.thread = threading.Thread(target=self.controller.start)

    @property
    def ready(self) -> bool:
        """Whether batches go through Celery by now."""
        consumer = getattr(self.controller, "consumer", None)
        return consumer is not None and deliver.NAME in consumer.strategies


@contextmanager
def hosted(settings: Settings) -> Iterator[Host]:
    """Run a host; stop it warmly, and see that nothing of it is left."""
    host = Host(settings)
    host.thread.start()
    try:
        wait_until(lambda: host.ready, patience=20)
        yield host
    finally:
        # What the signal's handler sets.
        vars(celery_state)["should_stop"] = 0
        host.thread.join(30)
        vars(celery_state)["should_stop"] = None
        try:
            assert not host.thread.is_alive()
            at_rest(host.worker)
        finally:
            close(host.worker)
            trace.reset_worker_optimizations(host.app)
            host.app.close()


@contextmanager
def events_of(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Collect Celery's events, as Flower does."""
    seen: list[dict[str, Any]] = []
    stop = threading.Event()

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": seen.append})
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    receiver.capture(limit=None, timeout=0.5, wakeup=False)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        with app.connection_for_write() as connection, app.events.Dispatcher(connection) as dispatcher:

            def heard() -> bool:
                dispatcher.send("test-heard")
                return bool(seen)

            wait_until(heard, patience=20)
        yield seen
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture
def hints(broker: str) -> Iterator[Stream]:
    """The stream, to put hints on by hand."""
    with connect(broker) as client:
        stream = Stream(client, prefix="t", consumer="test")
        stream.ensure_group()
        yield stream


def of_deliver(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind that belong to batches."""
    received = {
        event["uuid"] for event in events if event["type"] == "task-received" and event["name"] == "relay.deliver"
    }
    return [event for event in events if event["type"] == kind and event["uuid"] in received]


def delivered(rows: Rows, count: int) -> None:
    """Wait until all deliveries, `count` of them, have arrived."""
    wait_until(lambda: rows.statuses() == {Status.DELIVERED: count}, patience=20)


def test_batches_run_as_tasks_that_flower_can_see(
    make_settings: Callable[..., Settings], rows: Rows, receiver: Receiver, hints: Stream
) -> None:
    """Hints are delivered by tasks `relay.deliver`, told as received, started and succeeded, with ids as their arguments."""
    vault = make_vault(make_settings())
    with hosted(make_settings()) as host, events_of(host.app) as events:
        endpoint = rows.endpoint(f"{receiver.url}/ok", signing="relay", secret=SECRET, vault=vault)
        ids = rows.deliveries(endpoint, 5, announced_ago=0.0, payload=b'{"payload-marker": 1}')
        hints.announce(ids)
        delivered(rows, 5)
        wait_until(lambda: hints.length() == 0)
        wait_until(lambda: of_deliver(events, "task-succeeded"))

    received = of_deliver(events, "task-received")
    assert any(str(id_) in event["args"] for event in received for id_ in ids)
    assert len(of_deliver(events, "task-started")) == len(of_deliver(events, "task-succeeded")) == len(received) >= 1
    assert {event["hostname"] for event in received} == {"test@host"}
    assert all(event["runtime"] >= 0 for event in of_deliver(events, "task-succeeded"))
    said = str(events)
    assert "payload-marker" not in said
    assert SECRET not in said
    assert receiver.count() == 5


def test_what_travels_through_celery_is_ids(
    make_settings: Callable[..., Settings], rows: Rows, receiver: Receiver, hints: Stream
) -> None:
    """The message of a batch holds the rows' ids and nothing else, and no batch is kept once it ended."""
    with hosted(make_settings()) as host:
        bodies: list[Any] = []
        make = host.runtime._message

        def spy(task_id: str, batch: Any) -> Any:
            message, text = make(task_id, batch)
            bodies.append(message.payload)
            return message, text

        host.runtime._message = spy  # type: ignore[method-assign]  # to look, not to change
        ids = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 3, announced_ago=0.0)
        hints.announce(ids)
        delivered(rows, 3)
        wait_until(lambda: not host.runtime._batches)
    sent = [id_ for args, kwargs, _ in bodies for id_ in args[0] if kwargs == {}]
    assert sorted(map(UUID, sent)) == sorted(ids)


def test_a_revoked_batch_gives_its_room_back(
    make_settings: Callable[..., Settings],
    rows: Rows,
    receiver: Receiver,
    hints: Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task that somebody revoked is not run; its room comes back, and its rows are found late instead of never."""
    monkeypatch.setattr(steps, "uuid", lambda: "revoked-by-hand")
    celery_state.revoked.add("revoked-by-hand")
    try:
        with hosted(make_settings(RELAY_MAX_IN_FLIGHT="4")) as host:
            ids = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 4, announced_ago=0.0)
            hints.announce(ids)
            wait_until(lambda: hints.length() == 0)
            assert host.runtime._batches == {}
            delivered(rows, 4)
    finally:
        celery_state.revoked.clear()
    assert receiver.count() == 4


def test_a_failed_claim_rejects_its_batch(
    make_settings: Callable[..., Settings], rows: Rows, receiver: Receiver, hints: Stream, broker: str
) -> None:
    """A batch whose claim raised is told as failed, keeps its hints, gives its room back and is tried again (B-26)."""
    ids = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 4, announced_ago=0.0)
    rows.connection.execute("alter table relay.deliveries rename to elsewhere")
    with (
        hosted(make_settings(RELAY_MAX_IN_FLIGHT="4")) as host,
        events_of(host.app) as events,
        redis.Redis.from_url(broker) as client,
    ):
        hints.announce(ids)
        wait_until(lambda: of_deliver(events, "task-failed"), patience=20)
        assert hints.length() == 4
        assert client.xpending("t:hints", GROUP)["pending"] == 4
        rows.connection.execute("alter table relay.elsewhere rename to deliveries")
        delivered(rows, 4)
        wait_until(lambda: hints.length() == 0)
    assert receiver.count() == 4
    assert of_deliver(events, "task-succeeded")
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1


def test_a_batch_that_cannot_be_handed_on_is_tried_again(
    make_settings: Callable[..., Settings], rows: Rows, receiver: Receiver, hints: Stream
) -> None:
    """Whatever Celery's inside raises, the room comes back and the hints are delivered by a later try."""
    with hosted(make_settings(RELAY_MAX_IN_FLIGHT="4")) as host:
        strategies = host.controller.consumer.strategies
        strategy = strategies[deliver.NAME]
        failures: list[str] = []

        def broken(*_: object) -> None:
            failures.append("raised")
            strategies[deliver.NAME] = strategy
            raise RuntimeError("cannot schedule new futures")

        strategies[deliver.NAME] = broken
        ids = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 4, announced_ago=0.0)
        hints.announce(ids)
        delivered(rows, 4)
        wait_until(lambda: hints.length() == 0)
    assert failures == ["raised"]
    assert receiver.count() == 4


def test_a_sweep_can_be_asked_for(make_settings: Callable[..., Settings], rows: Rows) -> None:
    """A control task runs a sweep in a worker, and beat's own task leaves a heartbeat."""
    with hosted(make_settings()) as host:
        host.app.send_task("relay.reap")
        host.app.send_task("relay.heartbeat")
        wait_until(lambda: rows.sql("select 1 from relay.sweeps where name = 'reap' and finished_at is not null"))
        wait_until(lambda: rows.sql("select 1 from relay.heartbeats where role = 'beat'"))
        assert rows.value("select count(*) from relay.heartbeats where role = 'worker'") == 1


def test_a_warm_stop_finishes_and_records_what_is_in_flight(
    make_settings: Callable[..., Settings], rows: Rows, receiver: Receiver, hints: Stream
) -> None:
    """When Celery stops the worker, sends under way end and are recorded, and no row keeps a lease (B-27)."""
    with hosted(make_settings(RELAY_MAX_IN_FLIGHT="4")):
        hints.announce(rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=400"), 10, announced_ago=0.0))
        receiver.wait_for(4, 10)
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 15
    assert set(rows.statuses()) <= {Status.PENDING, Status.DELIVERED}
    assert rows.statuses()[Status.DELIVERED] == receiver.count() >= 4
    assert rows.value("select count(*) from relay.deliveries where status = 0 and attempt_count > 0") == 0
