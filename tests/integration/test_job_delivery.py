"""Jobs on their way: what goes out on the wire, and what becomes of it; real API, worker and sockets."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from relay.core import signing
from relay.core.model import AttemptClass, Signing, Status
from relay.core.secret import Secret
from relay.sweeps.reap import Reap
from tests.hostile import OK, Peer, Receiver, keep_answering, wait_until
from tests.instance import Instance, fields_of
from tests.jobs import MARKER, comes_to, enqueue, job_api, job_id, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa
    from werkzeug.test import TestResponse

    from relay.bootstrap.worker import Worker
    from tests.rows import Rows

    StartWorker = Callable[..., Worker]


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    with job_api(database) as made:
        yield made


@pytest.fixture
def key(relay: Instance) -> dict[str, str]:
    return relay.key()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Takes requests as bytes, keeps connections, and answers 200."""
    with Receiver(keep_answering()) as receiver:
        yield receiver


@pytest.mark.usefixtures("publisher")
def test_an_unsigned_job_goes_out_as_it_was_built(
    relay: Instance, key: dict[str, str], receiver: Receiver, start_worker: StartWorker
) -> None:
    """B-110, B-112, C-34, C-37: these bytes and no others, each time on a connection that carried another job before."""
    start_worker()
    host = f"Host: 127.0.0.1:{receiver.port}\r\n".encode()
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"body": b"\x00\xff raw"}, b"Content-Length: 6"),
        (
            {"body": b'{ "a": 1.0 }', "Content_Type": "application/json"},
            b"Content-Type: application/json\r\nContent-Length: 12",
        ),
        (
            {
                "Content_Type": "text/plain",
                "Relay_Header_Content_Type": "application/x-own; a=b",
                "Relay_Header_x_empty": "",
            },
            b"Content-Type: application/x-own; a=b\r\nX-Empty:\r\nContent-Length: 0",
        ),
        (
            {
                "Relay_Header_USER_AGENT": "own/1",
                "Relay_Header_accept": "*/*",
                "Relay_Header_webhook_id": "own",
                "Relay_Header_Relay_Attempt": "own",
                "Relay_Header_Cookie": "a=b",
            },
            b"User-Agent: own/1\r\nAccept: */*\r\nWebhook-Id: own\r\nRelay-Attempt: own\r\nCookie: a=b\r\nContent-Length: 0",
        ),
        # What a server that knows the lines tells.
        (
            {
                "environ": {
                    "relay.headers": [
                        ("relay-url", receiver.url("/kept")),
                        ("relay-header-x-a", "one"),
                        ("relay-header-x-b", ""),
                        ("relay-header-x-a", "two, three"),
                        ("relay-header-x-b", ""),
                    ]
                }
            },
            b"X-A: one\r\nX-B:\r\nX-A: two, three\r\nX-B:\r\nContent-Length: 0",
        ),
    ]
    for number, (asked, lines) in enumerate(sent):
        job = job_id(enqueue(relay, key, receiver.url("/kept"), **asked))
        comes_to(relay, key, job, "delivered")
        received = receiver.requests[number]
        assert received.head == b"POST /kept HTTP/1.1\r\n" + host + lines
        assert received.body == asked.get("body", b"")
    assert {received.connection for received in receiver.requests} == {0}
    job = job_id(enqueue(relay, key, receiver.url("/%e4?q=%2f#")[:-1]))
    comes_to(relay, key, job, "delivered")
    assert receiver.requests[-1].head.startswith(b"POST /%E4?q=%2F HTTP/1.1\r\n")


@pytest.mark.usefixtures("publisher")
def test_a_signed_job_carries_the_workspaces_signature(
    relay: Instance, key: dict[str, str], receiver: Receiver, start_worker: StartWorker
) -> None:
    """B-110, B-90, B-91: 409 before there is a secret; then either scheme, two signatures while an old secret lasts, no
    event's id or type, and no header of the job's in their place. The secret is sealed, audited and never shown again."""
    early = enqueue(relay, key, Relay_Sign="relay")
    assert (early.status_code, (early.json or {})["code"]) == (409, "no_job_secret")
    first = relay.client.post("/v1/job-secret/rotate", headers=key).json or {}
    assert first["previous_secret_expires_at"] is None
    start_worker()

    def verified(scheme: Signing, *secrets: str) -> dict[str, str]:
        job = job_id(
            enqueue(relay, key, receiver.url(), b"payload", Relay_Sign=scheme.value, Content_Type="text/plain")
        )
        comes_to(relay, key, job, "delivered")
        received = receiver.requests[-1]
        for secret in secrets:
            signing.verify(
                scheme,
                secrets=[signing.signing_key(scheme, Secret(secret))],
                headers=received.headers,
                body=received.body,
                now=int(time.time()),
            )
        assert received.headers["relay-delivery-id" if scheme is Signing.RELAY else "webhook-id"] == job
        return received.headers

    own = "whsec_" + "bWFya2VyLW1hcmtlci1tYXJrZXItbWFya2Vy"
    names = set(verified(Signing.RELAY, first["secret"]))
    assert names == {
        "host",
        "content-type",
        "content-length",
        "relay-timestamp",
        "relay-signature",
        "relay-delivery-id",
        "relay-attempt",
    }
    second = relay.client.post("/v1/job-secret/rotate", json={"secret": own}, headers=key).json or {}
    assert second["secret"] == own
    assert second["previous_secret_expires_at"] is not None
    headers = verified(Signing.STANDARD, own, first["secret"])
    assert len(headers["webhook-signature"].split(" ")) == 2
    relay.query("update relay.workspaces set job_previous_secret_expires_at = now()")
    headers = verified(Signing.STANDARD, own)
    assert len(headers["webhook-signature"].split(" ")) == 1

    for name in ("webhook_id", "Relay_Signature", "RELAY_delivery_id"):
        own_header: dict[str, Any] = {f"Relay_Header_{name}": "x"}
        refused = enqueue(relay, key, Relay_Sign="relay", **own_header)
        assert set(fields_of(refused).values()) == {"forbidden_header"}
    kept = str(relay.query("select w.*, a.* from relay.workspaces w, relay.audit_log a"))
    assert "job_secret.rotated" in kept
    assert own not in kept
    assert first["secret"] not in kept
    assert fields_of(relay.client.post("/v1/job-secret/rotate", json={"secret": "short"}, headers=key)) == {
        "secret": "invalid_secret"
    }


@pytest.mark.usefixtures("publisher")
def test_jobs_share_an_endpoint_by_origin(
    relay: Instance, receiver: Receiver, start_worker: StartWorker, rows: Rows
) -> None:
    """B-111: one for each workspace and origin, listed as such, changed in three fields only; it counts for no limit and
    gets no events; its breaker holds all of its jobs back, and no answer disables it."""
    relay.workspace("full", max_endpoints=0)
    key, other = relay.key("full"), relay.key("acme")
    here = receiver.url("/a")
    for url in (here, receiver.url("/b?c"), "https://example.com/", "https://EXAMPLE.com:443/x"):
        job_id(enqueue(relay, key, url, Relay_Delay="3600"))
    job_id(enqueue(relay, other, here, Relay_Delay="3600"))
    listed = (relay.client.get("/v1/endpoints", headers=key).json or {})["data"]
    assert {(one["kind"], one["url"], one["signing"]) for one in listed} == {
        ("origin", f"http://127.0.0.1:{receiver.port}/", "none"),
        ("origin", "https://example.com/", "none"),
    }
    assert len(listed) == 2
    assert relay.query("select count(*) from relay.endpoints") == [(3,)]
    assert relay.query("select count(*) from relay.endpoint_buckets where tokens = 20") == [(3,)]
    (origin,) = [one for one in listed if one["url"].startswith("http://")]
    path = f"/v1/endpoints/{origin['id']}"
    limits = {"rate_per_second": 500.0, "burst": 500, "max_in_flight": 3}
    assert relay.client.patch(path, json=limits, headers=key).status_code == 200
    assert list(fields_of(relay.client.patch(path, json={"url": here}, headers=key)).values()) == ["not_of_an_origin"]
    for call in ("disable", "rotate-secret", "test"):
        assert relay.client.post(f"{path}/{call}", headers=key).status_code == 409
    assert relay.client.delete(path, headers=key).status_code == 409
    assert (relay.event(key, b'{"type":"a.b"}').json or {})["deliveries"] == []

    worker = start_worker()
    rows.sql(
        "update relay.endpoints set breaker_state = 1, breaker_open_until = now() + interval '1 hour' where id = %s",
        [origin["id"]],
    )
    jobs = [job_id(enqueue(relay, key, receiver.url(f"/{n}"))) for n in range(2)]
    for job in jobs:
        wait_until(lambda: (read(relay, key, job)["deferred"] or {}).get("reason") == "breaker")  # noqa: B023
        assert read(relay, key, job)["state"] == "queued"
    assert relay.client.post(f"{path}/reset-breaker", headers=key).status_code == 200
    worker.run_sweep("wake")
    for job in jobs:
        comes_to(relay, key, job, "delivered")


@pytest.mark.usefixtures("publisher")
def test_a_job_fails_is_given_up_and_comes_back(
    relay: Instance, key: dict[str, str], start_worker: StartWorker, rows: Rows
) -> None:
    """B-110, B-111, B-40: its own budget, states by their words, a 410 that disables nothing; a replay has a fresh budget
    and counts on."""
    answers = [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"] * 2 + [
        b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"
    ]

    def script(peer: Peer) -> None:
        while True:
            peer.read()
            peer.send(answers.pop(0) if answers else OK)

    def replay() -> TestResponse:
        return relay.client.post(f"/jobs/{job}/replay", headers=key)

    def hurry() -> None:
        """Bring the retry forward: its wait is a second or more."""
        wait_until(lambda: read(relay, key, job)["state"] == "retrying")
        rows.sql("update relay.deliveries set due_at = now(), announced_at = null where id = %s", [job])

    with Receiver(script) as receiver:
        job = job_id(enqueue(relay, key, receiver.url(), b"x", Relay_Max_Attempts="2", Relay_Delay="0.2"))
        start_worker()
        hurry()
        seen = comes_to(relay, key, job, "dead")
        assert (seen["reason"], seen["attempt_count"], seen["generation"]) == ("attempts_exhausted", 2, 0)
        assert rows.value("select due_at - created_at >= interval '0.2 s' from relay.deliveries")
        assert replay().status_code == 202
        seen = comes_to(relay, key, job, "dead")
        assert (seen["reason"], seen["attempt_count"], seen["generation"]) == ("gone", 3, 1)
        assert rows.value("select enabled from relay.endpoints")
        assert replay().status_code == 202
        seen = comes_to(relay, key, job, "delivered")
    assert (seen["attempt_count"], seen["generation"]) == (4, 2)
    assert [one["number"] for one in seen["attempts"]] == [1, 2, 3, 4]
    assert len(receiver.requests) == 4
    refused = replay()
    assert (refused.status_code, (refused.json or {})["code"]) == (409, "delivery_delivered")
    said = 'The job has arrived: to send it once more, replay it with {"force": true}.'
    assert (refused.json or {})["detail"] == said
    gone = relay.client.delete(f"/jobs/{job}", headers=key)
    assert (gone.status_code, (gone.json or {})["code"]) == (409, "delivery_delivered")
    assert (
        relay.query("select action from relay.audit_log where action like 'delivery.%%'")
        == [("delivery.replayed",)] * 2
    )


@pytest.mark.usefixtures("publisher")
def test_a_job_is_called_off_or_expires(
    relay: Instance, key: dict[str, str], receiver: Receiver, start_worker: StartWorker, rows: Rows
) -> None:
    """B-110, B-121, B-34: a waiting job is canceled and can be replayed; one in flight is 409; a late one is dead."""
    waiting = job_id(enqueue(relay, key, receiver.url(), Relay_Delay="3600"))
    late = job_id(enqueue(relay, key, receiver.url(), Relay_Expires_In="1"))
    rows.sql("update relay.deliveries set due_at = now() - interval '2 s', expires_at = now() where id = %s", [late])
    misread = relay.client.delete(f"/jobs/{waiting}", json={"force": True}, headers=key)
    assert fields_of(misread) == {"force": "unknown_field"}
    canceled = relay.client.delete(f"/jobs/{waiting}", headers=key)
    assert (canceled.status_code, (canceled.json or {})["state"]) == (200, "canceled")
    flying = job_id(enqueue(relay, key, receiver.url(), Relay_Delay="3600"))
    rows.sql("update relay.deliveries set status = 1, lease_until = now() + interval '1 h' where id = %s", [flying])
    refused = relay.client.delete(f"/jobs/{flying}", headers=key)
    assert (refused.status_code, (refused.json or {})["code"]) == (409, "delivery_in_flight")
    assert read(relay, key, flying)["state"] == "delivering"

    start_worker()
    assert comes_to(relay, key, late, "dead")["reason"] == "expired"
    assert receiver.requests == []
    assert relay.client.post(f"/jobs/{waiting}/replay", headers=key).status_code == 202
    comes_to(relay, key, waiting, "delivered")
    assert relay.query("select action from relay.audit_log where action like 'delivery.%%' order by at") == [
        ("delivery.canceled",),
        ("delivery.replayed",),
    ]


def test_a_job_of_a_lost_worker_has_its_own_budget(
    relay: Instance, key: dict[str, str], hot: sa.Engine, rows: Rows
) -> None:
    """B-24: the reaper goes by the job's number of attempts and the waits of jobs."""
    few, more = (job_id(enqueue(relay, key, Relay_Max_Attempts=most)) for most in ("1", "2"))
    rows.sql(
        "update relay.deliveries set status = 1, attempt_count = 1, lease_token = relay.uuid7(),"
        " lease_until = now() - interval '1 s'"
    )
    assert Reap(hot=hot).run_once(since_last=5.0) == {"rescued": 2}
    assert (rows.get(UUID(few))["status"], rows.get(UUID(few))["reason"]) == (Status.DEAD, "attempts_exhausted")
    row = rows.get(UUID(more))
    assert row["status"] == Status.PENDING
    assert 0.5 < row["due_in"] <= 1.2
    assert read(relay, key, more)["state"] == "retrying"


@pytest.mark.usefixtures("publisher")
def test_what_cannot_be_sent_waits_or_is_refused(
    relay: Instance,
    key: dict[str, str],
    receiver: Receiver,
    start_worker: StartWorker,
    rows: Rows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B-41, B-94, C-76: without the master key a job waits, outside the rules it is dead; no value is in the log."""
    caplog.set_level(logging.DEBUG)
    relay.client.post("/v1/job-secret/rotate", headers=key)
    sealed = job_id(enqueue(relay, key, receiver.url(), MARKER.encode(), Relay_Header_X_A=MARKER))
    signed = job_id(enqueue(relay, key, receiver.url(), Relay_Sign="relay"))
    other = "other:" + "B" * 43 + "="
    start_worker(RELAY_MASTER_KEYS=other, RELAY_ALLOWED_PORTS=str(receiver.port))
    for job in (sealed, signed):
        wait_until(lambda: (read(relay, key, job)["deferred"] or {}).get("reason") == "internal")  # noqa: B023
        assert read(relay, key, job)["attempt_count"] == 0
    refused = job_id(enqueue(relay, key, "http://127.0.0.1:9/"))
    seen = comes_to(relay, key, refused, "dead")
    assert seen["reason"] == "refused"
    assert receiver.requests == []
    assert {row["class"] for row in rows.attempts(UUID(refused))} == {AttemptClass.PERMANENT_FAILURE}
    said = [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert any("a job cannot be sent from here" in text for text in said)
    assert all(MARKER not in text for text in said)
