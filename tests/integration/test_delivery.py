"""The hot path in one process: stream or table, claim, gate, libcurl, receiver, recorder; nothing stands in for anything."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
import redis

from relay import failpoints
from relay.bootstrap.policies import make_vault
from relay.bootstrap.worker import make_worker
from relay.core import signing
from relay.core.errors import ConfigurationError, InvalidInput, Unavailable
from relay.core.model import AttemptClass, Signing, Status
from relay.core.secret import Secret
from relay.delivery import permits
from relay.delivery.intake import Rhythm
from relay.embedded.home import discard
from relay.embedded.postgres import PostgresServer
from relay.metrics import REGISTRY
from relay.outbox.stream import GROUP, Stream, connect
from relay.store.migrate import upgrade
from relay.testkit.receiver import Receiver
from tests.hostile import wait_until
from tests.integration.conftest import at_rest, close
from tests.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from relay.bootstrap.worker import Worker
    from relay.config import Settings
    from relay.outbox.publisher import Publisher
    from relay.store.vault import Vault
    from relay.testkit.record import Received

    StartWorker = Callable[..., Worker]

#: Retries that a test can wait for.
QUICK = {"strategy": "schedule", "schedule_ms": [20, 40], "jitter": 0.0}
SECRET = "whsec_c2VjcmV0LW1hcmtlci1zZWNyZXQtbWFya2VyLXM="
MARKER = "secret-marker-5b1f"

NO_REDIS = "redis://127.0.0.1:9/0"


def finished(rows: Rows, delivery: UUID, status: Status, *, patience: float = 15.0) -> dict[str, Any]:
    """Wait until a delivery has a status; return its row."""
    deadline = time.monotonic() + patience
    while (row := rows.get(delivery))["status"] != status:
        assert time.monotonic() < deadline, f"{Status(row['status']).label} instead of {status.label}: {row}"
        time.sleep(0.01)
    return row


def all_delivered(rows: Rows, count: int, *, patience: float = 30.0) -> None:
    """Wait until `count` deliveries, and so all there are, have arrived."""
    deadline = time.monotonic() + patience
    while (statuses := rows.statuses()) != {Status.DELIVERED: count}:
        assert time.monotonic() < deadline, statuses
        time.sleep(0.02)


def deferred(rows: Rows, delivery: UUID, reason: str) -> dict[str, Any]:
    """Wait until a delivery was held back for `reason`; return its row."""
    wait_until(lambda: rows.get(delivery)["deferred_reason"] == reason)
    return rows.get(delivery)


def slots_back(worker: Worker) -> None:
    """As at_rest, for a worker that still reads: some room is the reader's while it waits for hints."""
    wait_until(lambda: worker.slots.in_use() == worker.sender.in_flight == worker.recorder.waiting == 0)


# --- what one delivery comes to ---


@pytest.mark.usefixtures("publisher")
def test_a_delivery_arrives_as_it_was_ingested(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault
) -> None:
    """The payload's bytes arrive with its type of content, signed, numbered, once; the log has the answer."""
    start_worker()
    payload = b'{"b":1, "a": 1.0,\t"a":2}\xc3\xa9'
    endpoint = rows.endpoint(f"{receiver.url}/ok", signing="relay", secret=SECRET, vault=vault)
    delivery = rows.delivery(endpoint, payload=payload, event_type="order.paid", content_type="application/x-own")

    row = finished(rows, delivery, Status.DELIVERED)

    (request,) = receiver.requests()
    assert (request.method, request.path, request.body) == ("POST", "/ok", payload)
    assert request.header("Content-Type") == "application/x-own"
    assert request.header("Relay-Delivery-Id") == str(delivery)
    assert request.header("Relay-Event-Id") == str(row["event_id"])
    assert (request.header("Relay-Event-Type"), request.header("Relay-Attempt")) == ("order.paid", "1")
    signing.verify(
        Signing.RELAY,
        secrets=[signing.signing_key(Signing.RELAY, Secret(SECRET))],
        headers=dict(request.headers),
        body=request.body,
        now=int(time.time()),
    )
    (attempt,) = rows.attempts(delivery)
    assert (attempt["number"], attempt["class"], attempt["status"], attempt["sends"]) == (
        1,
        AttemptClass.SUCCESS,
        200,
        1,
    )
    assert (attempt["snippet"], attempt["remote_address"], attempt["code"]) == ("ok\n", "127.0.0.1", None)
    assert attempt["total_us"] > 0
    assert "content-length: 3" in attempt["reply_headers"]


@pytest.mark.usefixtures("publisher")
def test_a_failing_receiver_gets_exactly_its_attempts(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Three attempts in the policy: three requests, three numbered lines, then dead with the evidence (C-1)."""
    start_worker()
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/always500", retry=QUICK))

    row = finished(rows, delivery, Status.DEAD)

    assert (row["reason"], row["attempt_count"], row["lease_token"]) == ("attempts_exhausted", 3, None)
    assert row["last_attempt"]["status"] == 500
    requests = receiver.requests()
    assert [request.header("Relay-Attempt") for request in requests] == [None] * 3
    assert [line["number"] for line in rows.attempts(delivery)] == [1, 2, 3]
    gaps = [after.monotonic - before.monotonic for before, after in itertools.pairwise(requests)]
    assert gaps[0] >= 0.02
    assert gaps[1] >= 0.04
    assert receiver.count() == 3


@pytest.mark.usefixtures("publisher")
def test_a_retry_goes_on_until_it_succeeds(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault
) -> None:
    """A receiver that recovers gets the same delivery id again, with the next number."""
    start_worker()
    receiver.set_up(up=False)
    endpoint = rows.endpoint(
        f"{receiver.url}/toggle",
        signing="relay",
        secret=SECRET,
        vault=vault,
        retry={"strategy": "fixed", "base_ms": 100, "max_attempts": 50, "jitter": 0.0},
    )
    delivery = rows.delivery(endpoint)
    receiver.wait_for(2, 10)
    receiver.set_up(up=True)

    row = finished(rows, delivery, Status.DELIVERED)

    requests = receiver.requests()
    assert {request.delivery_id for request in requests} == {str(delivery)}
    numbers = [int(request.header("Relay-Attempt") or 0) for request in requests]
    assert numbers == list(range(1, row["attempt_count"] + 1))
    assert [line["number"] for line in rows.attempts(delivery)] == numbers


@pytest.mark.usefixtures("publisher")
def test_retry_after_holds_the_endpoint(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """A 429 with Retry-After moves its delivery and defers the endpoint's others until then, unspent (B-31)."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/429?retry_after=30", retry=QUICK)
    first = rows.delivery(endpoint)
    wait_until(lambda: rows.attempts(first))
    others = rows.deliveries(endpoint, 3)

    for other in others:
        row = deferred(rows, other, "held")
        assert (row["status"], row["attempt_count"]) == (Status.PENDING, 0)
        assert 20 < row["due_in"] <= 31
        assert [(line["class"], line["code"], line["number"]) for line in rows.attempts(other)] == [
            (AttemptClass.DEFERRED, "held", None)
        ]
    assert 20 < rows.get(first)["due_in"] <= 30
    assert receiver.count() == 1


@pytest.mark.usefixtures("publisher")
def test_gone_disables_the_endpoint_and_pauses_the_rest(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """410 ends its delivery as `gone`, disables and audits the endpoint, and its other deliveries wait without a due time."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/status?code=410")
    gone = rows.delivery(endpoint)
    assert finished(rows, gone, Status.DEAD)["reason"] == "gone"
    wait_until(lambda: not rows.value("select enabled from relay.endpoints where id = %s", [endpoint]))

    other = rows.delivery(endpoint)

    row = deferred(rows, other, "paused")
    assert (row["status"], row["due_at"], row["attempt_count"], row["announced_at"]) == (Status.PENDING, None, 0, None)
    assert receiver.count() == 1
    (audit,) = rows.sql("select * from relay.audit_log")
    assert (audit["action"], audit["target"], audit["actor"]) == ("endpoint.disabled", f"endpoint:{endpoint}", "relay")
    assert audit["after"] == {"enabled": False, "reason": "gone", "delivery_id": str(gone)}
    assert audit["workspace_id"] == rows.workspace_id


@pytest.mark.usefixtures("publisher")
def test_gone_never_disables_an_implicit_endpoint(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """The origin that jobs go to stays enabled whatever one job was answered (B-111)."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/status?code=410")
    rows.sql("update relay.endpoints set kind = 1, origin = 'o'")
    delivery = rows.delivery(endpoint)
    assert finished(rows, delivery, Status.DEAD)["reason"] == "gone"
    again = rows.delivery(endpoint)
    assert finished(rows, again, Status.DEAD)["reason"] == "gone"
    assert rows.sql("select * from relay.audit_log") == []


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_redirects_are_not_followed(start_worker: StartWorker, rows: Rows, receiver: Receiver, code: int) -> None:
    """A redirect ends the delivery, with its status in the log; where it points to sees nothing (C-9)."""
    start_worker()
    with Receiver() as elsewhere:
        delivery = rows.delivery(rows.endpoint(f"{receiver.url}/redirect?code={code}&to={elsewhere.url}/ok"))
        row = finished(rows, delivery, Status.DEAD)
        assert elsewhere.connections == 0
    assert (row["reason"], row["attempt_count"]) == ("permanent_failure", 1)
    (line,) = rows.attempts(delivery)
    assert (line["status"], line["code"]) == (code, "redirect")


@pytest.mark.usefixtures("publisher")
def test_a_refused_address_is_never_connected_to(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Without the development switch loopback is refused while connecting: dead, apart from other failures (B-41, B-81)."""
    start_worker(RELAY_ALLOW_PRIVATE_ENDPOINTS="false")
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/ok", retry=QUICK))

    row = finished(rows, delivery, Status.DEAD)

    assert (row["reason"], row["attempt_count"]) == ("refused", 1)
    (line,) = rows.attempts(delivery)
    assert (line["class"], line["code"]) == (AttemptClass.PERMANENT_FAILURE, "refused")
    assert (line["remote_address"], line["status"]) == (None, None)
    assert "127.0.0.1" not in (line["error"] or "")
    assert receiver.connections == 0


@pytest.mark.usefixtures("publisher")
def test_a_payload_over_a_lowered_limit_dies_unsent(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """A stored payload that is larger than the limit now is a permanent failure with its own reason (B-4)."""
    start_worker(RELAY_MAX_PAYLOAD_BYTES="100")
    endpoint = rows.endpoint(f"{receiver.url}/ok", retry=QUICK)
    large = rows.delivery(endpoint, payload=b"x" * 101)
    fits = rows.delivery(endpoint, payload=b"x" * 100)

    row = finished(rows, large, Status.DEAD)

    assert (row["reason"], row["attempt_count"]) == ("payload_too_large", 1)
    assert [line["code"] for line in rows.attempts(large)] == ["payload_too_large"]
    finished(rows, fits, Status.DELIVERED)
    assert receiver.count() == 1


@pytest.mark.usefixtures("publisher")
def test_a_secret_that_does_not_open_waits_unspent(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, make_settings: Callable[..., Settings]
) -> None:
    """A lost master key costs no attempt: deliveries wait, say so, and go out once the key is back (B-94)."""
    other_keys = "lost:" + "A" * 43 + "="
    lost = make_vault(make_settings(RELAY_MASTER_KEYS=other_keys))
    endpoint = rows.endpoint(f"{receiver.url}/ok", signing="relay", secret=SECRET, vault=lost)
    good = rows.endpoint(f"{receiver.url}/ok")
    delivery, neighbour = rows.delivery(endpoint), rows.delivery(good)
    worker = start_worker()

    row = deferred(rows, delivery, "internal")
    assert (row["status"], row["attempt_count"]) == (Status.PENDING, 0)
    assert row["due_in"] > 3
    assert [(line["code"], line["number"]) for line in rows.attempts(delivery)] == [("internal", None)]
    finished(rows, neighbour, Status.DELIVERED)
    assert receiver.count() == 1
    worker.intake.join(time.monotonic() + 5)

    start_worker(RELAY_MASTER_KEYS=other_keys)
    rows.sql("update relay.deliveries set due_at = now() where id = %s", [delivery])
    assert finished(rows, delivery, Status.DELIVERED)["attempt_count"] == 1


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize(
    "fault",
    [
        'retry = \'{"strategy": "nonsense"}\'',
        "signing = 'nonsense'",
        'headers = \'{"X-A": "not base64!"}\'',
        "secret = null",
    ],
)
def test_an_endpoint_that_cannot_be_read_costs_its_neighbours_nothing(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault, fault: str
) -> None:
    """A row that this release cannot make sense of defers its own deliveries, and nobody else's of the batch (C-51)."""
    bad = rows.endpoint(f"{receiver.url}/bad", signing="relay", secret=SECRET, vault=vault)
    rows.connection.execute(f"update relay.endpoints set {fault} where id = '{bad}'")
    good = rows.endpoint(f"{receiver.url}/ok")
    poison = rows.delivery(bad)
    neighbours = rows.deliveries(good, 5)
    start_worker()

    for neighbour in neighbours:
        assert finished(rows, neighbour, Status.DELIVERED)["attempt_count"] == 1
    row = deferred(rows, poison, "internal")
    assert (row["status"], row["attempt_count"]) == (Status.PENDING, 0)
    assert receiver.count(path="/bad") == 0


@pytest.mark.usefixtures("publisher")
def test_a_request_that_cannot_be_built_costs_its_neighbours_nothing(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, broker: str
) -> None:
    """A bug that one delivery runs into defers that one, unspent and ever longer, and the rest of its batch goes out (C-51)."""
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    poison = rows.delivery(endpoint, event_type="poison")
    neighbours = rows.deliveries(endpoint, 5)
    start_worker(RELAY_FAILPOINT="send.build.poison:raise")
    try:
        for neighbour in neighbours:
            assert finished(rows, neighbour, Status.DELIVERED)["attempt_count"] == 1
        row = deferred(rows, poison, "internal")
    finally:
        failpoints.arm({})
    assert (row["status"], row["attempt_count"]) == (Status.PENDING, 0)
    assert row["due_in"] > 3
    assert receiver.count() == 5
    wait_until(lambda: _unsettled(broker) == 0)


@pytest.mark.usefixtures("publisher")
def test_a_deleted_endpoints_deliveries_are_dead(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Deliveries of an endpoint that was deleted end without a request, and say why (B-121)."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    rows.sql("update relay.endpoints set deleted_at = now()")
    row = finished(rows, rows.delivery(endpoint), Status.DEAD)
    assert (row["reason"], row["attempt_count"]) == ("endpoint_deleted", 0)
    assert row["finished_at"] is not None
    assert receiver.connections == 0


@pytest.mark.usefixtures("publisher")
def test_an_endpoints_own_headers_go_out(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault
) -> None:
    """Custom headers arrive as they were given, and win over the event's Content-Type and our User-Agent, once each."""
    start_worker()
    own = {"X-Token": "a b", "X-Empty": "", "content-TYPE": "text/own", "User-Agent": "theirs"}
    with_own = rows.endpoint(f"{receiver.url}/ok/own", headers=own, vault=vault)
    without = rows.endpoint(f"{receiver.url}/ok/plain")
    rows.delivery(with_own)
    rows.delivery(without)
    all_delivered(rows, 2)

    (request,) = receiver.requests(path="/ok/own")
    given = [(name, value) for name, value in request.headers if name.lower() in {n.lower() for n in own}]
    assert sorted(given) == sorted(own.items())
    (plain,) = receiver.requests(path="/ok/plain")
    assert plain.header("X-Token") is None
    assert plain.header("Content-Type") == "application/json"
    assert (plain.header("User-Agent") or "").startswith("Relay/")
    assert {name.lower() for name, _ in plain.headers} == {"host", "user-agent", "content-type", "content-length"}


@pytest.mark.usefixtures("publisher")
def test_a_changed_endpoint_acts_on_the_next_claim(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault
) -> None:
    """A new URL, and a new secret, hold for the delivery that is claimed next, though the old were kept."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/ok/old", signing="relay", secret=SECRET, vault=vault)
    finished(rows, rows.delivery(endpoint), Status.DELIVERED)

    new = "whsec_bmV3LW5ldy1uZXctbmV3LW5ldy1uZXctbmV3LW5ldy0="
    sealed = vault.seal(Secret(new), owner=endpoint)
    rows.sql("update relay.endpoints set url = %s, secret = %s", [f"{receiver.url}/ok/new", sealed])
    finished(rows, rows.delivery(endpoint), Status.DELIVERED)

    assert [request.path for request in receiver.requests()] == ["/ok/old", "/ok/new"]
    for request, secret in zip(receiver.requests(), (SECRET, new), strict=True):
        assert _verifies(request, secret)


@pytest.mark.usefixtures("publisher")
def test_two_secrets_sign_until_the_old_one_is_over(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, vault: Vault
) -> None:
    """While a rotated secret overlaps both sign; after that only the new one does, with no sweep and no new version (B-93)."""
    start_worker()
    old = "whsec_b2xkLW9sZC1vbGQtb2xkLW9sZC1vbGQtb2xkLW9sZC0="
    endpoint = rows.endpoint(f"{receiver.url}/ok", signing="relay", secret=SECRET, vault=vault)
    rows.sql(
        "update relay.endpoints set previous_secret = %s, previous_secret_expires_at = now() + interval '1.5 s'",
        [vault.seal(Secret(old), owner=endpoint)],
    )
    finished(rows, rows.delivery(endpoint), Status.DELIVERED)
    wait_until(lambda: rows.value("select previous_secret_expires_at < now() from relay.endpoints"))
    finished(rows, rows.delivery(endpoint), Status.DELIVERED)

    first, second = receiver.requests()
    assert (_verifies(first, SECRET), _verifies(first, old)) == (True, True)
    assert (_verifies(second, SECRET), _verifies(second, old)) == (True, False)


def _verifies(request: Received, secret: str) -> bool:
    try:
        signing.verify(
            Signing.RELAY,
            secrets=[signing.signing_key(Signing.RELAY, Secret(secret))],
            headers=dict(request.headers),
            body=request.body,
            now=int(time.time()),
        )
    except InvalidInput:
        return False
    return True


# --- caps ---


@pytest.mark.usefixtures("publisher")
def test_an_endpoint_gets_no_more_at_once_than_its_cap(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Never more than max_in_flight requests at the receiver; the rest is deferred, unspent, and arrives (B-70)."""
    start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/slow?ms=100", max_in_flight=3)
    rows.deliveries(endpoint, 6)
    all_delivered(rows, 6)

    assert receiver.max_concurrent("/slow") == 3
    assert receiver.count() == 6
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1
    reasons = rows.sql("select distinct code, number from relay.delivery_attempts where class = 3")
    assert reasons == [{"code": "slot", "number": None}]


@pytest.mark.usefixtures("publisher")
def test_a_full_endpoint_holds_up_no_other(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """While one endpoint hangs with more waiting than the process has room for, another's deliveries arrive at once."""
    worker = start_worker(RELAY_MAX_IN_FLIGHT="8", RELAY_TOTAL_TIMEOUT_MS="1500")
    stuck = rows.endpoint(f"{receiver.url}/hang", max_in_flight=2, retry=QUICK)
    quick = rows.endpoint(f"{receiver.url}/ok")
    waiting = rows.deliveries(stuck, 40)
    wait_until(lambda: receiver.count(path="/hang") == 2)
    fine = rows.deliveries(quick, 20)

    began = time.monotonic()
    wait_until(lambda: receiver.count(path="/ok") == 20)
    assert time.monotonic() - began < 1.4
    for delivery in fine:
        finished(rows, delivery, Status.DELIVERED)
    # They would go on for minutes.
    worker.intake.stop_reading()
    rows.sql("update relay.deliveries set status = 4 where id = any(%s) and status = 0", [waiting])


@pytest.mark.usefixtures("publisher")
def test_a_process_sends_no_more_at_once_than_its_cap(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """RELAY_MAX_IN_FLIGHT bounds a process's sends, without a deferral: what there is no room for stays unread."""
    start_worker(RELAY_MAX_IN_FLIGHT="4")
    for _ in range(4):
        rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=80"), 5)
    all_delivered(rows, 20)

    assert receiver.max_concurrent("/slow") == 4
    assert rows.value("select count(*) from relay.delivery_attempts where class = 3") == 0


@pytest.mark.usefixtures("publisher")
def test_no_workspace_takes_more_than_half_of_a_process(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Where there are several workspaces, one with many slow deliveries leaves half of the room to the others."""
    other = rows.workspace()
    worker = start_worker(RELAY_MAX_IN_FLIGHT="8")
    wait_until(lambda: worker.slots.several_workspaces)
    for _ in range(4):
        rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=150"), 4)
    all_delivered(rows, 16)
    assert receiver.max_concurrent("/slow") == 4

    rows.delivery(rows.endpoint(f"{receiver.url}/ok", workspace_id=other))
    all_delivered(rows, 17)


@pytest.mark.usefixtures("publisher")
def test_alone_a_workspace_has_the_whole_process(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Without other workspaces there is nobody to leave room to."""
    start_worker(RELAY_MAX_IN_FLIGHT="8")
    for _ in range(4):
        rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=150"), 4)
    all_delivered(rows, 16)
    assert receiver.max_concurrent("/slow") == 8


def test_waiting_for_a_slot_lasts_until_the_turn_and_a_minute_at_most() -> None:
    """A deferral for want of a slot is short for few and a minute behind a long queue, but no longer than the endpoint's
    sends of late need for those that wait (B-70, B-72)."""
    now = 100.0
    slots = permits.Slots(512, clock=lambda: now)
    hanging, fast, workspace = uuid4(), uuid4(), uuid4()

    def wait(endpoint: UUID, random: float = 0.0) -> float:
        return slots.wait_secs(endpoint, limit=2, random=random)

    # Nothing is known yet: short for few, and longer for those behind them.
    first = [wait(hanging) for _ in range(100)]
    assert first[0] == permits.SHORT_WAIT_SECS
    assert first == sorted(first)
    assert 5 < first[-1] < permits.LONG_WAIT_SECS
    wait(fast)
    # After a while no send of the one has ended, and 100 of the other.
    now += permits.COUNT_SECS
    for _ in range(100):
        assert slots.take(fast, workspace, limit=2, want=1) == 1
        slots.give_back_all([(fast, workspace)])
    assert wait(hanging) == permits.LONG_WAIT_SECS
    assert wait(hanging, 0.99) > permits.LONG_WAIT_SECS
    waits = [wait(fast) for _ in range(3000)]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(3000 / (permits.HASTE * 100 / permits.COUNT_SECS), rel=0.02)
    # Few wait for one that is slow: they come back soon, to find the slot when it is free.
    slow = uuid4()
    assert wait(slow) == permits.SHORT_WAIT_SECS
    now += permits.COUNT_SECS
    assert permits.SHORT_WAIT_SECS <= wait(slow) < 1.0
    # After a pause what was seen before it says nothing.
    now += 300.0
    assert wait(hanging) == wait(fast) == permits.SHORT_WAIT_SECS
    assert slots.in_use() == 0


def test_permits_that_come_back_twice_are_noticed() -> None:
    """Room and slots assert when more comes back than was taken: a bug that would look like speed (B-71)."""
    room, slots = permits.Room(2), permits.Slots(2)
    with pytest.raises(AssertionError):
        room.release(1)
    with pytest.raises(AssertionError):
        slots.give_back(uuid4(), uuid4())


def test_a_leaked_slot_is_caught(start_worker: StartWorker) -> None:
    """What every test here ends with does fail when one slot, or some room, did not come back (B-71)."""
    worker = start_worker()
    endpoint, workspace = uuid4(), uuid4()
    assert worker.slots.take(endpoint, workspace, limit=1, want=2) == 1
    worker.intake.join(time.monotonic() + 5)
    with pytest.raises(AssertionError, match="did not come back"):
        at_rest(worker, patience=0.1)
    worker.slots.give_back(endpoint, workspace)

    assert worker.room.try_reserve(1) == 1
    with pytest.raises(AssertionError, match="did not come back"):
        at_rest(worker, patience=0.1)
    worker.room.release(1)
    at_rest(worker)


@pytest.mark.usefixtures("publisher")
def test_every_end_of_a_send_gives_slot_and_room_back(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """Successes, failures, cut and hanging receivers, refusals of every kind: afterwards the process is at rest (B-71)."""
    worker = start_worker(RELAY_TOTAL_TIMEOUT_MS="400", RELAY_MAX_IN_FLIGHT="16", RELAY_DENIED_CIDRS="127.0.0.2/32")
    once = {"strategy": "fixed", "base_ms": 1, "max_attempts": 1}
    paths = ("ok", "always500", "hang", "reset", "garbage", "short-body", "half-headers", "status?code=404", "upgrade")
    for path in paths:
        rows.deliveries(rows.endpoint(f"{receiver.url}/{path}", retry=once), 4)
    rows.deliveries(rows.endpoint("http://127.0.0.2:80/denied", retry=once), 4)
    rows.deliveries(rows.endpoint("http://127.0.0.1:9/nobody", retry=once), 4)
    rows.deliveries(rows.endpoint("ftp://127.0.0.1/strange", retry=once), 4)

    wait_until(lambda: not {Status.PENDING, Status.IN_FLIGHT} & rows.statuses().keys(), patience=30)
    worker.intake.stop_reading()
    at_rest(worker)


# --- hints ---


@pytest.fixture
def hints(broker: str) -> Iterator[Stream]:
    """The stream, to put hints on by hand."""
    with connect(broker) as client:
        stream = Stream(client, prefix="t", consumer="test")
        stream.ensure_group()
        yield stream


def _unsettled(broker: str) -> int:
    with redis.Redis.from_url(broker) as client:
        count: int = client.xlen("t:hints")
        return count


def test_a_hint_that_comes_twice_sends_once(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, hints: Stream, broker: str
) -> None:
    """However often a row is hinted, in one batch or several, on two workers: one request (C-46, rule 2)."""
    for _ in range(2):
        start_worker()
    deliveries = rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=50", max_in_flight=1000), 30)
    for _ in range(4):
        hints.announce(deliveries + deliveries)
    all_delivered(rows, 30)
    wait_until(lambda: _unsettled(broker) == 0)
    assert receiver.count() == 30
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1


def test_a_row_that_was_locked_goes_out_when_it_is_free(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, hints: Stream, database: str, broker: str
) -> None:
    """A hint that met a locked row comes again by itself: the delivery follows the lock's end within a second."""
    start_worker()
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/ok"), announced_ago=0.0)
    with psycopg.connect(database) as other:
        other.execute("select from relay.deliveries where id = %s for update", [delivery])
        hints.announce([delivery])
        # The first hint was settled, and others followed it.
        with redis.Redis.from_url(broker) as client:
            wait_until(lambda: client.xinfo_stream("t:hints")["entries-added"] >= 4)
        assert receiver.count() == 0
    unlocked = time.monotonic()
    receiver.wait_for(1, 5)
    # A pause of a second, the longest, and what a busy machine takes.
    assert time.monotonic() - unlocked < 1.5
    finished(rows, delivery, Status.DELIVERED)


def test_a_locked_row_is_hinted_at_a_bounded_rate(
    start_worker: StartWorker, rows: Rows, hints: Stream, database: str, broker: str, receiver: Receiver
) -> None:
    """However many hints a locked row had, it comes back as one, in pauses that grow: no storm while it is locked."""
    start_worker(rhythm=Rhythm(look_secs=0.1, look_late_secs=0.0))
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/ok"), announced_ago=10.0)
    with psycopg.connect(database) as other, redis.Redis.from_url(broker) as client:
        other.execute("select from relay.deliveries where id = %s for update", [delivery])
        hints.announce([delivery] * 50)

        def added() -> int:
            count: int = client.xinfo_stream("t:hints")["entries-added"]
            return count

        wait_until(lambda: added() >= 52)
        time.sleep(2.5)
        # 20, 40, 80 … ms: seven in the first second and a quarter, then one a second; some to spare.
        assert added() <= 50 + 14
    finished(rows, delivery, Status.DELIVERED)


def test_rows_over_the_byte_bound_follow(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, hints: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one claim left because of its bytes is claimed soon after, by hints of its own."""
    monkeypatch.setattr("relay.delivery.dispatch.CLAIM_BYTES", 10_000)
    start_worker()
    deliveries = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 10, payload=b"x" * 4000, announced_ago=0.0)
    hints.announce(deliveries)
    all_delivered(rows, 10, patience=5.0)
    assert receiver.count() == 10


def test_a_failed_claim_keeps_its_hints(
    start_worker: StartWorker,
    rows: Rows,
    receiver: Receiver,
    hints: Stream,
    broker: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While claims fail hints stay unsettled, are tried again without a storm, and go out once claims succeed (B-28)."""
    worker = start_worker()
    deliveries = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 5, announced_ago=0.0)
    rows.connection.execute("alter table relay.deliveries rename to elsewhere")
    try:
        with caplog.at_level(logging.WARNING):
            hints.announce(deliveries)
            wait_until(lambda: "a claim failed" in caplog.text)
            failed_at = time.monotonic()
            wait_until(lambda: time.monotonic() > failed_at + 1.5)
        assert caplog.text.count("a claim failed") <= 6
        assert _unsettled(broker) == 5
        with redis.Redis.from_url(broker) as client:
            assert client.xpending("t:hints", GROUP)["pending"] == 5
    finally:
        rows.connection.execute("alter table relay.elsewhere rename to deliveries")
    all_delivered(rows, 5, patience=5.0)
    wait_until(lambda: _unsettled(broker) == 0)
    assert receiver.count() == 5
    slots_back(worker)


def test_what_was_claimed_goes_back_when_the_claim_fails_after_all(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, hints: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the database is lost between the claim and the send, the leases are given back, not left to run out."""
    worker = start_worker()
    destinations = worker.intake._dispatcher._destinations
    find = destinations.find
    failures: list[str] = []

    def fail_once(*args: Any) -> Any:
        if not failures:
            failures.append("lost")
            raise psycopg.OperationalError("the connection is lost")
        return find(*args)

    monkeypatch.setattr(destinations, "find", fail_once)
    deliveries = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 5, announced_ago=0.0)
    hints.announce(deliveries)
    # The lease would run for 20 s.
    all_delivered(rows, 5, patience=8.0)
    assert failures == ["lost"]
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1
    assert rows.value("select count(*) from relay.delivery_attempts") == 5


def test_a_read_only_database_is_not_stormed(
    start_worker: StartWorker,
    rows: Rows,
    receiver: Receiver,
    hints: Stream,
    database: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A node that answers but takes no writes is tried now and then, and delivery heals by itself afterwards (C-71)."""
    name = rows.value("select current_database()")
    deliveries = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 5, announced_ago=0.0)
    rows.connection.execute(f"alter database {name} set default_transaction_read_only = on")
    start_worker()
    with caplog.at_level(logging.WARNING):
        hints.announce(deliveries)
        wait_until(lambda: "a claim failed" in caplog.text)
        failed_at = time.monotonic()
        wait_until(lambda: time.monotonic() > failed_at + 1.5)
    assert caplog.text.count("a claim failed") <= 6
    rows.connection.execute(f"alter database {name} reset default_transaction_read_only")
    rows.sql(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name"
        " like 'relay worker%%'"
    )
    all_delivered(rows, 5, patience=10.0)


# --- without the one or the other server ---


def test_without_redis_the_poller_delivers(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """A worker that cannot reach Redis takes due rows from Postgres, retries included, announced or not."""
    worker = start_worker(RELAY_BROKER_URL=NO_REDIS)
    wait_until(lambda: worker.intake.redis_answers is False)
    fine = rows.endpoint(f"{receiver.url}/ok")
    failing = rows.endpoint(f"{receiver.url}/always500", retry=QUICK)
    new, marked = rows.delivery(fine), rows.delivery(fine, announced_ago=1.0)
    again = rows.delivery(failing)
    later = rows.delivery(fine, due_in=3600.0)

    finished(rows, new, Status.DELIVERED)
    finished(rows, marked, Status.DELIVERED)
    assert finished(rows, again, Status.DEAD)["attempt_count"] == 3
    assert rows.get(later)["status"] == Status.PENDING
    assert receiver.count() == 5


def test_without_redis_the_poller_keeps_the_caps(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """The poller's sends take room and slots like all others."""
    worker = start_worker(RELAY_BROKER_URL=NO_REDIS, RELAY_MAX_IN_FLIGHT="4")
    wait_until(lambda: worker.intake.redis_answers is False)
    for _ in range(3):
        rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=60", max_in_flight=2), 4)
    all_delivered(rows, 12)
    assert receiver.max_concurrent("/slow") <= 4


def test_without_redis_a_worker_reaps(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """While beat's tasks cannot travel, a worker returns expired leases itself, and sends what they held."""
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/ok", retry=QUICK))
    rows.sql(
        "update relay.deliveries set status = 1, lease_token = relay.uuid7(), lease_until = now() - interval '1 s',"
        " attempt_count = 1"
    )
    start_worker(RELAY_BROKER_URL=NO_REDIS)
    assert finished(rows, delivery, Status.DELIVERED)["attempt_count"] == 2
    assert [line["code"] for line in rows.attempts(delivery)] == ["worker_lost", None]


@pytest.mark.parametrize("room", ["2", "512"])
def test_a_lost_hint_is_found_by_a_quiet_worker(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, room: str
) -> None:
    """With no publisher at all a worker that gets nothing looks for late rows, announced or not, and only late ones."""
    start_worker(RELAY_MAX_IN_FLIGHT=room, rhythm=Rhythm(look_secs=0.3, look_late_secs=0.6, block_secs=0.2))
    endpoint = rows.endpoint(f"{receiver.url}/ok")
    unannounced, lost = rows.delivery(endpoint), rows.delivery(endpoint, announced_ago=5.0)
    made = time.monotonic()
    finished(rows, unannounced, Status.DELIVERED)
    assert time.monotonic() - made > 0.5
    finished(rows, lost, Status.DELIVERED)


@pytest.mark.usefixtures("publisher")
def test_a_frozen_database_row_is_recorded_when_it_thaws(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, database: str
) -> None:
    """Results wait while they cannot be written, and are written as soon as they can."""
    worker = start_worker()
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/slow?ms=300"))
    receiver.wait_for(1, 10)
    with psycopg.connect(database) as other:
        other.execute("lock table relay.delivery_attempts in access exclusive mode")
        wait_until(lambda: worker.recorder.waiting == 1)
        assert rows.get(delivery)["status"] == Status.IN_FLIGHT
    finished(rows, delivery, Status.DELIVERED)
    assert len(rows.attempts(delivery)) == 1
    assert receiver.count() == 1


def test_a_database_that_goes_away_loses_nothing(
    broker: str, receiver: Receiver, make_settings: Callable[..., Settings], servers: object
) -> None:
    """Postgres stops with sends in flight and comes back: what was sent is recorded, the rest is sent, all once (B-28)."""
    base = Path(tempfile.mkdtemp(prefix="relay-test-pg-"))
    postgres = PostgresServer(base, say=lambda _line: None, settings={"fsync": "off"})
    postgres.start()
    worker = None
    try:
        upgrade(postgres.url)
        with Rows(postgres.url) as rows:
            endpoint = rows.endpoint(f"{receiver.url}/slow?ms=400", max_in_flight=100)
            sending = rows.deliveries(endpoint, 10, announced_ago=0.0)
        worker = make_worker(make_settings(DATABASE_URL=postgres.url))
        worker.start()
        with connect(broker) as client:
            stream = Stream(client, prefix="t", consumer="test")
            stream.announce(sending)
            receiver.wait_for(10, 15)
            postgres.stop("immediate")
            wait_until(lambda: worker.recorder.waiting == 10)
            # Hints that come meanwhile are not lost either.
            postgres.start()
            with Rows(postgres.url) as rows:
                waiting = rows.deliveries(endpoint, 10, announced_ago=0.0)
                stream.announce(waiting)
                all_delivered(rows, 20, patience=20)
                assert rows.value("select count(*) from relay.delivery_attempts") == 20
                assert rows.value("select max(attempt_count) from relay.deliveries") == 1
        assert receiver.count() == 20
        worker.intake.stop_reading()
        worker.intake.join(time.monotonic() + 5)
        at_rest(worker)
    finally:
        if worker is not None:
            close(worker)
        postgres.stop("immediate")
        discard(base)


def test_results_that_were_never_written_are_not_called_written(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, hints: Stream, database: str
) -> None:
    """A worker that must leave while the database does not take its results says so: its end is not a clean one (B-27)."""
    worker = start_worker()
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/slow?ms=100"), announced_ago=0.0)
    hints.announce([delivery])
    receiver.wait_for(1, 10)
    rows.connection.execute("alter table relay.delivery_attempts rename to elsewhere")
    try:
        wait_until(lambda: worker.recorder.waiting == 1)
        assert worker.drain(time.monotonic() + 0.7) is False
    finally:
        rows.connection.execute("alter table relay.elsewhere rename to delivery_attempts")
    assert rows.get(delivery)["status"] == Status.IN_FLIGHT
    worker.recorder._thread.join(5)
    worker.recorder._unwritten = 0


# --- leases ---


@pytest.mark.usefixtures("publisher")
def test_no_request_starts_with_too_little_of_its_lease_left(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A request whose time-out would outlast its lease is not sent; the attempt is given back, and a later claim sends (B-22)."""
    worker = start_worker()
    dispatcher = worker.intake._dispatcher
    limits = dispatcher._limits
    # As if the claim had taken 16 of the lease's 20 seconds.
    dispatcher._limits = replace(limits, lease_margin_secs=limits.lease_margin_secs + 16)
    delivery = rows.delivery(rows.endpoint(f"{receiver.url}/ok"))
    wait_until(lambda: rows.get(delivery)["status"] == Status.IN_FLIGHT)
    wait_until(lambda: rows.get(delivery)["status"] == Status.PENDING)
    assert receiver.connections == 0
    assert rows.attempts(delivery) == []

    dispatcher._limits = limits
    row = finished(rows, delivery, Status.DELIVERED)
    assert row["attempt_count"] == 1
    assert receiver.count() == 1


@pytest.mark.usefixtures("publisher")
def test_a_worker_that_lost_its_lease_changes_nothing(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """A late result of a lease that is another's is dropped: no row, no line, no disabled endpoint; logged once (C-47)."""
    worker = start_worker()
    endpoint = rows.endpoint(f"{receiver.url}/slow?ms=300&code=410")
    delivery = rows.delivery(endpoint)
    receiver.wait_for(1, 10)
    with caplog.at_level(logging.WARNING):
        rows.sql(
            "update relay.deliveries set lease_token = relay.uuid7(), lease_until = now() + interval '1 hour' where id = %s",
            [delivery],
        )
        wait_until(lambda: "stale result" in caplog.text)
        slots_back(worker)
    assert caplog.text.count("stale result") == 1
    assert rows.get(delivery)["status"] == Status.IN_FLIGHT
    assert rows.attempts(delivery) == []
    assert rows.value("select enabled from relay.endpoints") is True
    assert rows.sql("select * from relay.audit_log") == []


def test_a_lease_shorter_than_an_endpoints_timeout_is_refused(
    rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    """A worker does not start where a lease could run out during some endpoint's request (B-23, C-45)."""
    rows.endpoint(timeout_ms=15_000)
    with pytest.raises(ConfigurationError, match="RELAY_LEASE_SECS"):
        make_worker(make_settings())


@pytest.mark.usefixtures("publisher")
def test_a_stop_finishes_what_is_in_flight_and_leaves_the_rest(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A warm stop ends requests under way, records them, and leaves all others pending, none leased (B-27)."""
    worker = start_worker(RELAY_MAX_IN_FLIGHT="4")
    rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=300", max_in_flight=4), 12)
    receiver.wait_for(4, 10)
    assert worker.drain(time.monotonic() + 10) is True
    statuses = rows.statuses()
    assert set(statuses) <= {Status.PENDING, Status.DELIVERED}
    assert statuses[Status.DELIVERED] == receiver.count()
    assert rows.value("select count(*) from relay.deliveries where status = 0 and attempt_count > 0") == 0


# --- counting, and what must not be seen ---


@pytest.mark.usefixtures("publisher")
def test_the_metrics_agree_with_the_log(start_worker: StartWorker, rows: Rows, receiver: Receiver) -> None:
    """Attempts by class are as many as the log's lines; deferrals by reason count every single one (B-151)."""

    def totals() -> dict[str, float]:
        names = ("success", "retryable_failure", "permanent_failure", "deferred")
        found = {
            name: REGISTRY.get_sample_value("relay_delivery_attempts_total", {"outcome": name}) or 0 for name in names
        }
        return found | {
            "slot": REGISTRY.get_sample_value("relay_deliveries_deferred_total", {"reason": "slot"}) or 0,
        }

    before = totals()
    worker = start_worker()
    rows.deliveries(rows.endpoint(f"{receiver.url}/slow?ms=150", max_in_flight=1), 3)
    rows.deliveries(rows.endpoint(f"{receiver.url}/always500", retry=QUICK), 2)
    rows.deliveries(rows.endpoint(f"{receiver.url}/status?code=404"), 3)
    wait_until(lambda: not {Status.PENDING, Status.IN_FLIGHT} & rows.statuses().keys(), patience=30)
    slots_back(worker)

    counted = {name: value - before[name] for name, value in totals().items()}
    lines = {
        row["class"]: row["n"]
        for row in rows.sql("select class, count(*) as n from relay.delivery_attempts group by 1")
    }
    assert [counted[AttemptClass(cls).label] for cls in sorted(lines)] == [lines[cls] for cls in sorted(lines)]
    assert counted["slot"] >= lines[AttemptClass.DEFERRED]


@pytest.mark.usefixtures("publisher")
def test_secrets_are_seen_by_the_receiver_alone(
    start_worker: StartWorker,
    rows: Rows,
    receiver: Receiver,
    vault: Vault,
    broker: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Secrets, headers' values and payloads show in no log line, no attempt, no audit record and nothing in Redis (B-95)."""
    with caplog.at_level(logging.DEBUG), redis.Redis.from_url(broker) as client, client.monitor() as monitor:
        start_worker()
        for path in ("ok", "always500", "reset", "garbage", "status?code=410"):
            endpoint = rows.endpoint(
                f"{receiver.url}/{path}",
                signing="relay",
                secret=SECRET,
                headers={"X-Key": MARKER},
                vault=vault,
                retry=QUICK,
            )
            rows.delivery(endpoint, payload=json.dumps({"marker": MARKER}).encode())
        broken = rows.endpoint(f"{receiver.url}/ok", signing="relay", secret=SECRET, vault=vault)
        rows.sql("update relay.endpoints set secret = secret || 'x' where id = %s", [broken])
        deferred(rows, rows.delivery(broken), "internal")
        wait_until(lambda: sum(n for s, n in rows.statuses().items() if s in (2, 3)) == 5)
        client.set("t:end", "1")
        sent = []
        while "t:end" not in (command := monitor.next_command()["command"]):
            sent.append(command)

    stored = rows.sql("select to_jsonb(a)::text as t from relay.delivery_attempts a")
    stored += rows.sql("select to_jsonb(a)::text as t from relay.audit_log a")
    stored += rows.sql("select last_attempt::text as t from relay.deliveries where last_attempt is not null")
    fields = [str(vars(record)) for record in caplog.records]
    seen = "\n".join([caplog.text, *fields, *(row["t"] for row in stored), *map(str, sent)])
    assert receiver.requests()[0].header("X-Key") == MARKER
    assert len(sent) > 3
    for secret in (SECRET, SECRET.removeprefix("whsec_"), "secret-marker-secret", MARKER):
        assert secret not in seen


def test_two_workers_share_a_backlog(
    start_worker: StartWorker, rows: Rows, receiver: Receiver, publisher: Publisher
) -> None:
    """Two workers and a publisher: everything arrives once, in whatever order."""
    for _ in range(2):
        start_worker()
    endpoints = [rows.endpoint(f"{receiver.url}/ok", max_in_flight=500) for _ in range(4)]
    threads = [threading.Thread(target=rows_in, args=(rows, endpoint)) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_delivered(rows, 400)
    assert sorted(receiver.ids().values()) == []
    assert receiver.count() == 400
    assert publisher.leading


def rows_in(rows: Rows, endpoint: UUID) -> None:
    """Make a hundred deliveries, over a connection that others use as well."""
    rows.deliveries(endpoint, 100)


def test_a_claim_under_way_ends_before_its_worker_does(
    start_worker: StartWorker, rows: Rows, receiver: Receiver
) -> None:
    """A worker that stops in the middle of a claim gives back what the claim leased, and claims nothing more (B-27)."""
    worker = start_worker()
    late, never = rows.deliveries(rows.endpoint(f"{receiver.url}/ok"), 2, announced_ago=0.0)
    failpoints.arm({"claim.after": "sleep"})
    try:
        assert worker.room.try_reserve(2) == 2
        claiming = threading.Thread(target=worker.intake.dispatch, args=([late],))
        claiming.start()
        wait_until(lambda: rows.get(late)["status"] == Status.IN_FLIGHT)
        assert worker.drain(time.monotonic() + 30) is True
        claiming.join()
    finally:
        failpoints.arm({})
    assert rows.get(late)["status"] in {Status.PENDING, Status.DELIVERED}
    with pytest.raises(Unavailable):
        worker.dispatcher.dispatch([never])
    assert rows.get(never)["attempt_count"] == 0
