"""From an event over HTTP to a signed request, by the processes that do it in production."""

from __future__ import annotations

import signal
import time

import requests

from relay.core.model import Status
from tests.stack import Stack, own_postgres, wait_until
from tests.traffic import Traffic, at_rest, check, duplicates, settle, still_works


def test_event_becomes_a_signed_delivery_and_a_flaky_receiver_is_tried_again(database: str, broker: str) -> None:
    """A POST answers 202 with ids; the receiver verifies the signature; a failure is retried; all of it can be read."""
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.start("api", "publisher", "worker", "beat")
        endpoint_id = stack.endpoint("/verify", types=["order.*"])
        stack.receiver.set_up("/toggle/later", up=False)
        later_id = stack.endpoint("/toggle/later", types=["order.paid"])
        body = b'{"type": "order.paid", "amount": 4999.00, "note": "\\u00e9"}'
        headers = stack.headers | {"Content-Type": "application/json"}
        answer = requests.post(f"{stack.url}/v1/events", data=body, headers=headers, timeout=10)
        assert answer.status_code == 202, answer.text
        ids = {one["endpoint_id"]: one["id"] for one in answer.json()["deliveries"]}
        assert ids.keys() == {endpoint_id, later_id}

        came = stack.receiver.wait_for(1, 20, path="/verify")[0]
        assert (came.status, came.body, came.delivery_id) == (200, body, ids[endpoint_id])
        stack.receiver.wait_for(2, 20, path="/toggle/later")
        stack.receiver.set_up("/toggle/later", up=True)
        settle(stack)

        url = f"{stack.url}/v1/deliveries/"
        read = requests.get(url + ids[endpoint_id], headers=stack.headers, timeout=10).json()
        assert (read["status"], read["attempt_count"]) == ("delivered", 1)
        assert [(one["class"], one["status"], one["sends"]) for one in read["attempts"]] == [("success", 200, 1)]
        read = requests.get(url + ids[later_id], headers=stack.headers, timeout=10).json()
        assert read["status"] == "delivered"
        assert [one["status"] for one in read["attempts"]] == [503] * (read["attempt_count"] - 1) + [200]
        numbers = [request.header("Relay-Attempt") for request in stack.receiver.requests(ids[later_id])]
        assert numbers == [str(number) for number in range(1, read["attempt_count"] + 1)]
        wait_until(lambda: stack.get("/readyz") == 200, 20, "the installation is ready")
        at_rest(stack)


def test_workers_are_replaced_under_load_without_a_trace(database: str, broker: str) -> None:
    """SIGTERM to workers with requests in flight: all finish, exit code 0, no attempt spent, nothing sent twice."""
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.endpoint("/slow/rolling?ms=700")
        _, _, first, second, _ = stack.start("api", "publisher", "worker", "worker", "beat")
        with Traffic(stack) as traffic:
            traffic.wait_accepted(50)
            for old in (first, second):
                stack.start("worker")
                wait_until(lambda: old.metrics()["relay_sends_in_flight"] > 0, 20, "requests are in flight")  # noqa: B023
                old.signal(signal.SIGTERM)
                assert old.wait(15) == 0, old.tail()
                assert not [line for line in old.lines() if line.get("level") == "error"], old.tail()
            traffic.wait_accepted(50)
        settle(stack)
        accounts = check(stack, traffic)
        assert set(traffic.answers) == {202}
        assert {one.attempts for one in accounts.values()} == {1}
        assert duplicates(accounts) == []
        at_rest(stack)
        still_works(stack, traffic)


def test_second_sigterm_ends_a_worker_at_once(database: str, broker: str) -> None:
    """A worker that waits for its requests leaves them at a second signal; they are sent again by another."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/slow/second?ms=3500")
        _, worker, _ = stack.start("publisher", "worker", "beat")
        traffic.ingest(5)
        stack.receiver.wait_for(5, 20)
        worker.signal(signal.SIGTERM)
        began = time.monotonic()
        wait_until(lambda: worker.metrics()["relay_sends_in_flight"] == 5, 3, "it goes on with what it has")
        worker.signal(signal.SIGTERM)
        assert worker.wait(5) != 0
        assert time.monotonic() - began < 2.5
        stack.start("worker")
        stack.end_leases()
        settle(stack)
        accounts = check(stack, traffic)
        assert [(one.status, one.attempts, one.lost, one.receipts) for one in accounts.values()] == [
            (Status.DELIVERED, 2, 1, 2)
        ] * 5


def test_api_stops_under_load_and_answers_all_that_it_took(database: str, broker: str) -> None:
    """SIGTERM to the API while many post: each event that it committed is answered, and it ends within the grace.

    Requests that wait in the server for a thread when it stops are closed unanswered, and nothing of them is kept.
    """
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.endpoint("/ok")
        api, _, _ = stack.start("api", "publisher", "worker")
        with Traffic(stack, senders=30, pause=0.02) as traffic:
            traffic.wait_accepted(200)
            api.signal(signal.SIGTERM)
            assert api.wait(12) == 0, api.tail()
        assert set(traffic.answers) == {202}
        assert stack.rows("select count(*) from relay.events") == [(traffic.answers[202],)], traffic.unknown
        settle(stack)
        assert duplicates(check(stack, traffic)) == []


def test_roles_that_start_without_the_database_wait_for_it(broker: str) -> None:
    """Worker and publisher started while Postgres is away need no help when it comes (B-28)."""
    with own_postgres() as server, Stack(database_url=server.url, broker_url=broker) as stack:
        server.stop()
        started = [stack.launch("publisher"), stack.launch("worker")]
        for role in started:
            role.wait_said("the database does not answer yet")
        server.start()
        started[0].wait_said("publishing")
        started[1].wait_said("worker started")
