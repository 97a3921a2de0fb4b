"""Replays by real workers: what the receiver sees of a delivery that is sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from relay.core.filters import DeliveryFilter, parse_delivery_filter
from relay.core.model import Status
from relay.store import delivery_changes, replays
from relay.store.deliveries import Delivery
from relay.store.ids import new_id
from relay.tasks.schedule import SWEEPS
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from relay.bootstrap.worker import Worker
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

    StartWorker = Callable[..., Worker]

#: Three attempts that a test can wait for.
QUICK = {"strategy": "schedule", "schedule_ms": [10, 10], "jitter": 0.0}


@pytest.mark.usefixtures("publisher")
def test_attempt_numbers_climb_over_replays(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """C-4, B-20: each replay has its own budget and generation; no number comes twice, and the id stays the same."""
    worker = start_worker()
    # Ten attempts would open the breaker, which is not what this is about.
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/status?code=404", retry=QUICK | {"statuses": [404]}))
    by = delivery_changes.By(workspace_id=rows.workspace_id, delivery_id=delivery, actor="instance")
    for generation in range(3):
        wait_until(lambda: rows.get(delivery)["status"] == Status.DEAD)
        assert (rows.get(delivery)["generation"], rows.get(delivery)["budget_from"]) == (generation, generation * 3)
        if generation < 2:
            with worker.engine.begin() as connection:
                assert isinstance(delivery_changes.replay(connection, by, max_replays=20), Delivery)
    lines = rows.attempts(delivery)
    assert [line["number"] for line in lines] == list(range(1, 10))
    assert [line["generation"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(receiver.requests()) == 9


@pytest.mark.usefixtures("publisher")
def test_a_replay_by_filter_is_delivered_at_the_rate(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Dead ones, asked for by a row alone, reach the receiver once each, spread by the endpoint's rate and no wave."""
    worker = start_worker()
    assert "replay" in SWEEPS
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    rows.sql("update relay.endpoints set rate_per_second = 40, burst = 40 where id = %s", [endpoint])
    ids = rows.deliveries(endpoint, 20, due_in=3600.0)
    rows.sql(
        """
        update relay.deliveries set status = 3, reason = 'attempts_exhausted', finished_at = now(), due_at = null,
            attempt_count = 12, expires_at = now()
        """
    )
    by = replays.By(workspace_id=rows.workspace_id, actor="instance")
    replay_id = new_id()
    with worker.engine.begin() as connection:
        replays.create(connection, by, replay_id=replay_id, endpoint_id=endpoint, wanted=_dead_ones())
    # Nobody was told of it: a worker that looks finds it.
    wait_until(lambda: rows.statuses() == {Status.DELIVERED: 20})
    assert len(receiver.requests()) == len(ids)
    # By the database's clock: each was claimed no sooner than it was due, and they were due one after the other.
    early = """
        select count(*) from relay.deliveries d
        join relay.delivery_attempts a on a.delivery_id = d.id and a.number is not null and a.at < d.due_at
        """
    assert rows.value(early) == 0
    spread = "select extract(epoch from max(due_at) - min(due_at))::float8 from relay.deliveries"
    assert rows.value(spread) >= 19 / 40 - 0.01
    assert {row["attempt_count"] for row in rows.sql("select attempt_count from relay.deliveries")} == {13}
    assert _state(rows, replay_id) == "done"


def _dead_ones() -> DeliveryFilter:
    return parse_delivery_filter({"status": "dead"})


def _state(rows: Rows, replay_id: UUID) -> object:
    return rows.value("select state from relay.replays where id = %s", [replay_id])
