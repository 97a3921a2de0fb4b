"""The client against the API as it is: every call is understood, and every answer read."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from relay.client import Conflict, InvalidInput, InvalidRequest, NotFound, Relay, Unauthorized
from relay.client.answers import Delivery, Endpoint, Event, Job, Replay
from relay.client.reading import _fields
from relay.client.verification import _public
from tests.instance import ADMIN_KEY, Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def served(database: str) -> Iterator[Instance]:
    """An API with a workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


@pytest.fixture
def url(served: Instance) -> Iterator[str]:
    """Where it listens."""
    server = make_server("127.0.0.1", 0, served.client.application, threaded=True, request_handler=_Quiet)
    server.daemon_threads = True  # type: ignore[attr-defined]  # the threaded kind has it
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def relay(served: Instance, url: str) -> Iterator[Relay]:
    """A client with every scope."""
    with Relay(url, served.key()["Authorization"].removeprefix("Bearer ")) as made:
        yield made


def settle(served: Instance, status: int, reason: str | None = None) -> None:
    """Let every delivery come to rest, as a worker would."""
    served.query(
        "update relay.deliveries set status = %s, reason = %s, finished_at = now(), attempt_count = 1", status, reason
    )


def test_an_endpoint_from_its_making_to_its_end(served: Instance, relay: Relay) -> None:
    """Made, listed, read, changed, switched, given another secret, and deleted; a secret is in one answer alone."""
    made = relay.endpoints.create(
        "https://hooks.example.com/in", event_types=["order.*"], headers={"X-Env": "test"}, rate_per_second=5
    )
    assert made.secret is not None
    assert made.secret.startswith("whsec_")
    assert made.secret not in repr(made)
    assert (made.rate_per_second, made.event_types, made.breaker.state) == (5.0, ("order.*",), "closed")
    for number in range(3):
        relay.endpoints.create(f"https://hooks.example.com/{number}")
    listed = list(relay.endpoints.list())
    assert [one.url[-1] for one in listed] == ["2", "1", "0", "n"]
    assert [one.secret for one in listed] == [None] * 4
    assert relay.endpoints.get(made.id).headers == {"X-Env": "********"}

    changed = relay.endpoints.update(made.id, rate_per_second=50, timeout_ms=500, metadata={"team": "a"})
    assert (changed.rate_per_second, changed.timeout_ms, changed.metadata) == (50.0, 500, {"team": "a"})
    assert relay.endpoints.update(made.id, timeout_ms=None).timeout_ms is None
    assert relay.endpoints.disable(made.id).disabled_reason == "manual"
    assert relay.endpoints.enable(made.id).enabled
    assert relay.endpoints.reset_breaker(made.id).breaker.state == "closed"
    relay.endpoints.retry_now(made.id)
    relay.endpoints.cancel_pending(made.id)
    rotated = relay.endpoints.rotate_secret(made.id)
    assert rotated.secret not in {made.secret, None}
    assert rotated.previous_secret_expires_at is not None
    assert rotated.previous_secret_expires_at > datetime.now(UTC)

    relay.endpoints.delete(made.id)
    with pytest.raises(NotFound) as caught:
        relay.endpoints.get(made.id)
    assert (caught.value.code, caught.value.status) == ("unknown_endpoint", 404)
    assert caught.value.request_id is not None
    with pytest.raises(InvalidRequest) as refused:
        relay.endpoints.create("ftp://x", rate_per_second=0)
    assert {one.field for one in refused.value.errors} == {"url", "rate_per_second"}


def test_events_one_by_one_and_many(served: Instance, relay: Relay) -> None:
    """Sent, batched and read back; a key that was used says so, and one that is another request's is refused."""
    endpoint = relay.endpoints.create("https://hooks.example.com/in")
    sent = relay.send("order.paid", {"amount": 4999, "note": "grüße"}, idempotency_key="k1", expires_in=3600)
    again = relay.send("order.paid", {"note": "grüße", "amount": 4999}, idempotency_key="k1")
    assert (again.id, sent.replayed, again.replayed) == (sent.id, False, True)
    with pytest.raises(Conflict) as caught:
        relay.send("order.paid", {}, idempotency_key="k1")
    assert caught.value.code == "idempotency_key_reused"
    relay.send("note", "left at the door", content_type="text/plain")

    batch: list[dict[str, Any]] = [
        {"type": "a", "payload": 1},
        {"type": "b", "payload": None, "expires_in": 60, "idempotency_key": "k2"},
    ]
    first, second = relay.send_batch(batch), relay.send_batch(batch)
    assert [one.replayed for one in second] == [False, True]
    assert (first[1].id, first[0].id == second[0].id) == (second[1].id, False)
    with pytest.raises(InvalidRequest) as refused:
        relay.send_batch([{"type": "a", "payload": 1}, {"type": "!", "payload": 1}])
    assert [one.field for one in refused.value.errors] == ["[1].type"]

    event = relay.events.get(sent.id)
    assert [one.endpoint_id for one in event.deliveries] == [endpoint.id]
    assert (event.idempotency_key, event.delivery_count) == ("k1", 1)
    assert json.loads(relay.events.payload(sent.id)) == {"amount": 4999, "note": "grüße"}
    assert len(list(relay.events.list())) == 5
    assert [one.id for one in relay.events.list(type="order.paid")] == [sent.id]
    assert list(relay.events.list(since=datetime.now(UTC) + timedelta(hours=1))) == []
    with pytest.raises(InvalidInput, match="no offset"):
        list(relay.events.list(since=datetime(2026, 1, 1)))  # noqa: DTZ001 - what it must refuse


def test_deliveries_are_walked_replayed_and_canceled(served: Instance, relay: Relay) -> None:
    """A list goes on over its pages; a dead delivery is sent again, a pending one called off, a filter is a job."""
    endpoint = relay.endpoints.create("https://hooks.example.com/in")
    relay.send_batch({"type": f"t{n % 2}", "payload": n} for n in range(260))
    found = list(relay.deliveries.list(endpoint_id=endpoint.id))
    assert len({one.id for one in found}) == 260
    assert len(list(relay.deliveries.list(event_type="t1", limit=7))) == 7

    one = relay.deliveries.cancel(found[0].id)
    assert (one.status, relay.deliveries.cancel(found[0].id).status) == ("canceled", "canceled")
    assert relay.deliveries.wait(one.id, timeout=1).status == "canceled"
    with pytest.raises(Conflict) as caught:
        relay.deliveries.replay(found[1].id)
    assert caught.value.code == "delivery_pending"
    settle(served, 3, "attempts_exhausted")
    replayed = relay.deliveries.replay(found[1].id)
    assert (replayed.status, replayed.generation) == ("pending", 1)

    job = relay.endpoints.replay(endpoint.id, reason="attempts_exhausted", since=datetime.now(UTC) - timedelta(hours=1))
    assert (job.state, job.is_finished, job.reason) == ("waiting", False, "attempts_exhausted")
    with pytest.raises(Conflict) as other:
        relay.endpoints.replay(endpoint.id)
    assert other.value.members == {"replay_id": job.id}
    seen: list[str] = []
    relay.replays.cancel(job.id)
    assert relay.replays.wait(job.id, timeout=5, watch=lambda now: seen.append(now.state)).state == "canceled"
    assert seen == ["canceled"]
    further = relay.endpoints.replay(endpoint.id, event_type="t0")
    assert [one.id for one in relay.replays.list()] == [further.id, job.id]
    assert [one.id for one in relay.replays.list(endpoint_id=endpoint.id.upper(), state="canceled")] == [job.id]
    assert list(relay.replays.list(until=job.created_at)) == []


def test_jobs(served: Instance, relay: Relay) -> None:
    """Taken with their headers and options, once under one key, read, called off and sent again; signed by a secret."""
    taken = relay.enqueue(
        "https://hooks.example.com/x", {"n": 1}, headers={"X-A": "b"}, max_attempts=3, delay=60, expires_in=120.5,
        timeout_ms=900, idempotency_key="j",
    )  # fmt: skip
    again = relay.enqueue(
        "https://hooks.example.com/x", {"n": 1}, headers={"X-A": "b"}, max_attempts=3, delay=60, expires_in=120.5,
        timeout_ms=900, idempotency_key="j",
    )  # fmt: skip
    assert (again.id, again.replayed, taken.state) == (taken.id, True, "queued")
    job = relay.jobs.get(taken.id)
    assert [name for name, _ in job.headers] == ["X-A"]
    assert (job.max_attempts, job.timeout_ms, job.url) == (3, 900, "https://hooks.example.com/x")
    assert relay.jobs.cancel(taken.id).state == "canceled"
    assert relay.jobs.replay(taken.id).generation == 1
    with pytest.raises(Conflict) as caught:
        relay.enqueue("https://hooks.example.com/x", signing="relay")
    assert caught.value.code == "no_job_secret"
    assert relay.rotate_job_secret().secret.startswith("whsec_")
    assert relay.enqueue("https://hooks.example.com/x", signing="relay").state == "queued"


def test_keys_and_workspaces(served: Instance, url: str) -> None:
    """A wrong key is told as such, and the instance's key acts in the workspace that is named."""
    with Relay(url, "rk_wrong") as wrong, pytest.raises(Unauthorized):
        wrong.send("a.b", {})
    with Relay(url, ADMIN_KEY, workspace="acme") as admin:
        assert admin.send("a.b", {}).deliveries == ()


def test_public_keys_are_those_of_the_endpoint(served: Instance, relay: Relay) -> None:
    """What the address of an ed25519 endpoint answers is what `verify` takes."""
    made = relay.endpoints.create("https://hooks.example.com/in", signing="standard-ed25519")
    assert made.secret is not None
    answer = served.client.get(f"/.well-known/webhook-keys/{made.id}")
    (key,) = answer.get_json()["keys"]
    assert len(_public(key["x"])) == 32


def test_answers_have_a_field_for_all_that_the_api_says(served: Instance, relay: Relay) -> None:
    """Nothing of today's answers is passed over."""
    endpoint = relay.endpoints.create("https://hooks.example.com/in")
    sent = relay.send("a.b", {})
    job = relay.enqueue("https://hooks.example.com/x")
    settle(served, 3, "attempts_exhausted")
    replay = relay.endpoints.replay(endpoint.id)
    transport = relay._transport
    for cls, path in (
        (Endpoint, f"/v1/endpoints/{endpoint.id}"),
        (Event, f"/v1/events/{sent.id}"),
        (Delivery, f"/v1/deliveries/{sent.deliveries[0].id}"),
        (Job, f"/jobs/{job.id}"),
        (Replay, f"/v1/replays/{replay.id}"),
    ):
        assert set(transport.get(path)) - {json_name for _, json_name, _, _ in _fields(cls)} == set(), path


def test_a_client_is_shared_by_threads(relay: Relay) -> None:
    """Eight threads send at once: every event is there once."""
    sent: list[str] = []

    def work() -> None:
        sent.extend(relay.send("a.b", {"n": n}).id for n in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with closing(relay):
        assert {one.id for one in relay.events.list()} == set(sent)
    assert len(set(sent)) == 40
