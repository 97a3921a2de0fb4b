"""What the tests of store, outbox, delivery and sweeps share: rows in a database of the test's own, and the hot pool."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import redis

from relay.bootstrap.policies import make_vault
from relay.bootstrap.worker import make_worker
from relay.config_sources import load_settings
from relay.outbox.publisher import Pace, Publisher
from relay.outbox.stream import Stream, connect
from relay.store.engine import make_hot_engine
from relay.testkit.receiver import Receiver
from tests.conftest import MASTER_KEYS
from tests.hostile import wait_until
from tests.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa

    from relay.bootstrap.worker import Worker
    from relay.config import Settings
    from relay.delivery.intake import Rhythm
    from relay.store.vault import Vault


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Plain SQL into the test's database."""
    with Rows(database) as made:
        yield made


@pytest.fixture
def hot(database: str) -> Iterator[sa.Engine]:
    """The pool that announcing, claiming and recording use."""
    engine = make_hot_engine(database, name="test", size=4)
    yield engine
    engine.dispose()


@pytest.fixture
def make_settings(database: str, broker: str) -> Callable[..., Settings]:
    """Settings of a process of this test: `make_settings(RELAY_MAX_IN_FLIGHT="4")`."""

    def make(**changes: str) -> Settings:
        return load_settings(
            {
                "DATABASE_URL": database,
                "RELAY_BROKER_URL": broker,
                "RELAY_MASTER_KEYS": MASTER_KEYS,
                "RELAY_ALLOW_PRIVATE_ENDPOINTS": "true",
                "RELAY_TOTAL_TIMEOUT_MS": "5000",
                "RELAY_LEASE_SECS": "20",
                "RELAY_PREFIX": "t",
                **changes,
            }
        )

    return make


def at_rest(worker: Worker, *, patience: float = 3.0) -> None:
    """Wait until nothing of `worker` is under way; fail unless every slot and all room came back by then (B-71)."""
    wait_until(lambda: worker.sender.in_flight == 0 and worker.recorder.waiting == 0)
    deadline = time.monotonic() + patience
    # A reader that waits for hints holds room for them until its read returns.
    while (worker.slots.in_use(), worker.room.taken) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (worker.slots.in_use(), worker.room.taken) == (0, 0), "a slot or some room did not come back"


def close(worker: Worker) -> None:
    """Stop a worker and free what it holds of the system."""
    worker.drain(time.monotonic() + 8)
    worker.engine.dispose()
    worker.hot.dispose()
    for stream in (worker.intake._stream, worker.intake._settler):
        stream._redis.close()


def end_reads(broker: str) -> None:
    """Let blocking reads return now, as at the end of their time."""
    with redis.Redis.from_url(broker) as client:
        for one in client.client_list():
            if "b" in one["flags"]:
                client.client_unblock(int(one["id"]))


@pytest.fixture
def start_worker(make_settings: Callable[..., Settings], broker: str) -> Iterator[Callable[..., Worker]]:
    """Start workers in this process, without Celery: they claim in their own threads. At the end all must be at rest."""
    workers: list[Worker] = []

    def start(*, rhythm: Rhythm | None = None, **changes: str) -> Worker:
        worker = make_worker(make_settings(**changes))
        if rhythm is not None:
            worker.intake._rhythm = rhythm
            worker.intake._next_look = time.monotonic() + rhythm.look_secs
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.intake.stop_reading()
    if workers:
        end_reads(broker)
    for worker in workers:
        worker.intake.join(time.monotonic() + 5)
    try:
        for worker in workers:
            at_rest(worker)
    finally:
        for worker in workers:
            close(worker)


@pytest.fixture
def publisher(database: str, broker: str) -> Iterator[Publisher]:
    """A publisher at work."""
    engine = make_hot_engine(database, name="publisher", size=2)
    with connect(broker) as client:
        stream = Stream(client, prefix="t", consumer="publisher")
        stream.ensure_group()
        made = Publisher(engine, stream, pace=Pace(retry_secs=0.05))
        stop = threading.Event()
        thread = threading.Thread(target=made.run, args=(stop,))
        thread.start()
        yield made
        stop.set()
        thread.join()
    engine.dispose()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with Receiver() as made:
        yield made


@pytest.fixture
def vault(make_settings: Callable[..., Settings]) -> Vault:
    """The vault that the test's processes hold."""
    return make_vault(make_settings())
