"""Chat endpoints through the whole pipeline: made over the API, sent to by a worker, answered by stand-ins."""

from __future__ import annotations

import json
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from relay.core.model import AttemptClass, Status
from relay.core.transports import TRANSPORTS
from tests.chat_platforms import PLATFORMS, Answer, Platform
from tests.hostile import OK, Peer, Receiver, wait_until
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from relay.bootstrap.worker import Worker
    from tests.rows import Rows

    StartWorker = Callable[..., Worker]

#: A retry that a test can wait for.
QUICK = {"strategy": "fixed", "base_ms": 20, "max_attempts": 2, "jitter": 0.0}

pytestmark = pytest.mark.usefixtures("publisher")


@pytest.fixture(params=list(TRANSPORTS))
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    with PLATFORMS[request.param]() as platform:
        yield platform


def name_of(platform: Platform) -> str:
    return platform.address.partition("://")[0]


def urls(base: str) -> dict[str, str]:
    """Settings that lead every transport to `base`."""
    return {f"RELAY_{name.upper()}_URL": base for name in TRANSPORTS} | {"RELAY_ALLOW_PRIVATE_ENDPOINTS": "true"}


@pytest.fixture
def relay(database: str, platform: Platform) -> Iterator[Instance]:
    with instance(database, **urls(platform.url)) as made:
        made.workspace()
        yield made


def finished(rows: Rows, delivery: str | UUID) -> dict[str, Any]:
    """Wait for a delivery's end; return its row."""
    wait_until(
        lambda: rows.value("select finished_at is not null from relay.deliveries where id = %s", [delivery]),
        patience=15,
    )
    (row,) = rows.sql("select * from relay.deliveries where id = %s", [delivery])
    return row


def send(relay: Instance, key: dict[str, str], body: bytes = b'{"type":"order.paid","n":1}') -> str:
    """Post an event that one endpoint gets; return the delivery's id."""
    (delivery,) = (relay.event(key, body).json or {})["deliveries"]
    return str(delivery["id"])


def test_events_become_messages(relay: Instance, platform: Platform, start_worker: StartWorker, rows: Rows) -> None:
    """B-100 to B-102: made with a token, the endpoint gets messages; a 429's wait holds it; a new token is used at once."""
    start_worker(**urls(platform.url + "/"))
    key = relay.key()
    made = relay.endpoint(
        key, transport=name_of(platform), url=platform.address, secret=platform.token[:-1] + "0", retry=QUICK
    )
    assert (made["url"], made["signing"]) == (platform.address, "none")
    path = f"/v1/endpoints/{made['id']}"
    first = finished(rows, send(relay, key))
    assert (first["status"], first["reason"]) == (Status.DEAD, "permanent_failure")
    assert platform.said == []

    rotated = relay.client.post(f"{path}/rotate-secret", json={"secret": platform.token}, headers=key)
    assert (rotated.json or {})["previous_secret_expires_at"] is None
    delivery = send(relay, key)
    assert finished(rows, delivery)["status"] == Status.DELIVERED
    assert platform.said == ['order.paid\n{\n  "type": "order.paid",\n  "n": 1\n}']

    platform.waits = [1]
    held = send(relay, key)
    wait_until(lambda: rows.value("select held_until is not null from relay.endpoints"))
    row = finished(rows, held)
    assert (row["status"], row["attempt_count"]) == (Status.DELIVERED, 2)
    waited, after = rows.attempts(row["id"])
    assert (waited["class"], waited["code"]) == (AttemptClass.RETRYABLE_FAILURE, "http_429")
    assert (after["at"] - waited["at"]).total_seconds() >= 1

    for field, value in (("headers", {"X-A": "1"}), ("signing", "relay"), ("url", "https://hooks.example.com/")):
        refused = relay.client.patch(path, json={field: value}, headers=key)
        assert list(fields_of(refused)) == [field], refused.text


def test_the_token_is_nowhere(
    relay: Instance, platform: Platform, start_worker: StartWorker, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """C-70, B-95: whatever fails (401, redirect, TLS, DNS, connection, time-out, policy), log, rows and API are clean."""
    caplog.set_level(logging.DEBUG)

    def speak_plainly(peer: Peer) -> None:
        peer.send(OK)
        peer.hold()

    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()[1]
    key = relay.key()
    made = relay.endpoint(
        key,
        transport=name_of(platform),
        url=platform.address,
        secret=platform.token,
        retry={"max_attempts": 1},
        timeout_ms=400,
    )
    answers: list[str] = []
    # Faults are the engine's to tell, which knows no transports: one of these shows it.
    faults = name_of(platform) == "telegram"
    with Receiver(speak_plainly) as plain, Receiver(lambda peer: peer.hold()) as silent:
        for base, code in (
            (platform.url, "http_401"),
            (platform.url, "redirect"),
            (f"https://127.0.0.1:{plain.port}", "tls"),
            (f"http://127.0.0.1:{silent.port}", "timeout"),
            (f"http://127.0.0.1:{refusing}", "connection"),
            ("http://nowhere.invalid", "dns"),
            ("http://169.254.169.254", "refused"),
        )[: None if faults else 2]:
            said = platform.token if base == platform.url else ""
            platform.scripted = [
                Answer(401, f"no such path: /bot{said}/x", {"X-Path": said})
                if code == "http_401"
                else Answer(302, said, {"Location": f"http://elsewhere.example/{said}"})
            ]
            worker = start_worker(**urls(base))
            delivery = send(relay, key)
            assert finished(rows, delivery)["status"] == Status.DEAD
            worker.intake.stop_reading()
            worker.intake.join(time.monotonic() + 5)
            (attempt,) = (relay.client.get(f"/v1/deliveries/{delivery}", headers=key).json or {})["attempts"]
            assert attempt["code"].startswith(code), attempt
            answers.append(json.dumps(attempt))
    answers.append(relay.client.get(f"/v1/endpoints/{made['id']}", headers=key).text)
    kept = [
        str(rows.sql(f"select * from relay.{table}"))
        for table in ("deliveries", "delivery_attempts", "endpoints", "events", "audit_log")
    ]
    logged = [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    for text in [*answers, *kept, *logged]:
        assert "marker" not in text.lower(), text
    assert "<token>" in answers[0]


def test_a_platform_outside_the_rules_is_refused(
    relay: Instance, platform: Platform, start_worker: StartWorker, rows: Rows, database: str
) -> None:
    """B-82: the URL that is built is judged, when the endpoint is made and by every worker, whatever was stored."""
    key = relay.key()
    wanted = {"transport": name_of(platform), "url": platform.address, "secret": platform.token}
    relay.endpoint(key, **wanted)
    strict = {"RELAY_ALLOW_PRIVATE_ENDPOINTS": "", "RELAY_REQUIRE_HTTPS": "false", "RELAY_ALLOWED_PORTS": "80"}
    start_worker(**(urls(platform.url) | strict))
    row = finished(rows, send(relay, key))
    assert (row["status"], row["reason"]) == (Status.DEAD, "refused")
    with instance(database, **(urls(platform.url) | strict)) as other:
        assert fields_of(other.client.post("/v1/endpoints", json=wanted, headers=key)) == {"url": "port"}
    assert platform.requests == 0
