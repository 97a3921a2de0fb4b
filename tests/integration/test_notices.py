"""Relay's own events: told in the transaction of what they tell, to endpoints that name them, and to no other (B-170)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from relay.core.model import Status
from tests.hostile import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.bootstrap.worker import Worker
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

    StartWorker = Callable[..., Worker]


def told(receiver: Receiver) -> list[dict[str, Any]]:
    """Return what came at /ok/watch, in its order."""
    return [json.loads(request.body) for request in receiver.requests(path="/ok/watch")]


@pytest.mark.usefixtures("publisher")
def test_breakers_deaths_and_recoveries_are_told(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """An endpoint that goes down, gives deliveries up and comes back is told of where its types are named, once each."""
    receiver.set_up(up=False)
    quick = {"strategy": "fixed", "base_ms": 20, "max_attempts": 2, "jitter": 0.0}
    endpoint = rows.endpoint(f"{receiver.url}/toggle", retry=quick, event_types=["relay.*", "test.made"])
    watch = rows.endpoint(f"{receiver.url}/ok/watch", event_types=["relay.endpoint.*", "relay.delivery.dead"])
    rows.endpoint(f"{receiver.url}/ok/everything")
    rows.endpoint(f"{receiver.url}/ok/star", event_types=["*"])
    stranger = rows.workspace()
    rows.endpoint(f"{receiver.url}/ok/stranger", workspace_id=stranger, event_types=["relay.*"])
    ids = rows.deliveries(endpoint, 6)
    start_worker(RELAY_BREAKER_COOLDOWN_SECS="1", RELAY_BREAKER_THRESHOLD="12")
    wait_until(lambda: rows.value("select count(*) from relay.deliveries where status = 3") == 6)
    wait_until(lambda: len(told(receiver)) == 7)
    receiver.set_up(up=True)
    rows.sql(
        "update relay.deliveries set status = 0, due_at = now(), finished_at = null, budget_from = attempt_count where id = %s",
        [ids[0]],
    )
    wait_until(lambda: len(told(receiver)) == 9, patience=20)

    seen = told(receiver)
    types = [one["type"] for one in seen]
    assert sorted(types) == sorted(
        ["relay.delivery.dead"] * 6
        + ["relay.endpoint.breaker_opened", "relay.endpoint.breaker_closed", "relay.endpoint.recovered"]
    )
    dead = [one["data"] for one in seen if one["type"] == "relay.delivery.dead"]
    assert {one["delivery_id"] for one in dead} == {str(id_) for id_ in ids}
    assert {(one["endpoint_id"], one["reason"], one["attempt_count"]) for one in dead} == {
        (str(endpoint), "attempts_exhausted", 2)
    }
    # Nobody hears who did not ask, is of another workspace, or is told of itself.
    assert (
        receiver.count(path="/ok/everything") + receiver.count(path="/ok/star") + receiver.count(path="/ok/stranger")
        == 0
    )
    assert (
        rows.value(
            "select count(*) from relay.deliveries where event_type like 'relay.%%' and endpoint_id <> %s", [watch]
        )
        == 0
    )


@pytest.mark.usefixtures("publisher")
def test_nothing_is_told_of_what_is_told(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """A notice that dies makes no further one, and one that nobody asked for is not even stored."""
    endpoint = rows.endpoint(f"{receiver.url}/status?code=404")
    rows.endpoint(f"{receiver.url}/status?code=404&watch", event_types=["relay.*"])
    rows.endpoint(f"{receiver.url}/ok/watch", event_types=["relay.*"])
    lonely = rows.endpoint(f"{receiver.url}/status?code=404", workspace_id=rows.workspace())
    start_worker()
    rows.delivery(endpoint)
    rows.delivery(lonely)
    wait_until(lambda: rows.statuses() == {Status.DEAD: 3, Status.DELIVERED: 1})

    assert [one["data"]["reason"] for one in told(receiver)] == ["permanent_failure"]
    assert rows.value("select count(*) from relay.events where source = 2") == 1
