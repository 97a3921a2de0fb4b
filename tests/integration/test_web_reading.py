"""Deliveries with their attempts, the shape of errors, request ids and health."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.store import heartbeats
from relay.store.heartbeats import Process
from relay.web import readiness
from relay.web.parts import new_id
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


def _delivered(relay: Instance, key: dict[str, str]) -> str:
    relay.endpoint(key)
    return str(relay.event(key, b'{"type":"a.b"}').get_json()["deliveries"][0]["id"])


def _attempt(relay: Instance, delivery: str, **columns: object) -> None:
    given = {
        "delivery_id": delivery,
        "at": "now",
        "lease_token": str(new_id()),
        "generation": 0,
        "class": 1,
        **columns,
    }
    names, marks = ", ".join(given), ", ".join(["%s"] * len(given))
    relay.query(f"insert into relay.delivery_attempts ({names}) values ({marks})", *given.values())


def test_pending_delivery(relay: Instance) -> None:
    """B-133: a fresh delivery is pending, due, and has no attempts."""
    key = relay.key()
    delivery = _delivered(relay, key)
    body = relay.client.get(f"/v1/deliveries/{delivery}", headers=key).get_json()
    assert (body["id"], body["event_type"], body["status"]) == (delivery, "a.b", "pending")
    assert (body["attempt_count"], body["generation"], body["attempts"], body["deferred"]) == (0, 0, [], None)
    assert body["due_at"] == body["created_at"]
    assert len(body["created_at"]) == len("2026-01-31T12:00:00.000000Z")


def test_attempts_in_order(relay: Instance) -> None:
    """B-43: every attempt and deferral of the log, the oldest first, durations in milliseconds, headers as pairs."""
    key = relay.key()
    delivery = _delivered(relay, key)
    _attempt(relay, delivery, at="now", number=None, **{"class": 3}, code="rate", worker="w:1")
    later = {"at": time.strftime("%Y-%m-%dT%H:%M:%S+00", time.gmtime(time.time() + 90_000))}
    _attempt(
        relay,
        delivery,
        **later,
        number=1,
        code="http_500",
        error="the receiver answered 500",
        status=500,
        sends=2,
        dns_us=1500,
        connect_us=0,
        total_us=12_345,
        bytes_sent=10,
        bytes_received=20,
        remote_address="203.0.113.7",
        reply_headers="content-type: text/html\nx-empty: \nset-cookie: a:b=c\n",
        snippet="<b>caf\xe9</b>",
    )
    relay.query(
        "update relay.deliveries set status = 3, reason = 'attempts_exhausted', attempt_count = 1, finished_at = now(),"
        " deferred_reason = 'rate', deferred_since = now(), deferred_count = 4"
    )
    body = relay.client.get(f"/v1/deliveries/{delivery}", headers=key).get_json()
    assert (body["status"], body["reason"], body["due_at"]) == ("dead", "attempts_exhausted", None)
    assert (body["deferred"]["reason"], body["deferred"]["count"]) == ("rate", 4)
    deferral, attempt = body["attempts"]
    assert (deferral["class"], deferral["number"], deferral["code"]) == ("deferred", None, "rate")
    assert (attempt["class"], attempt["number"], attempt["status"], attempt["sends"]) == (
        "retryable_failure",
        1,
        500,
        2,
    )
    assert attempt["durations"] == {"dns": 1.5, "connect": 0.0, "tls": None, "first_byte": None, "total": 12.345}
    assert attempt["reply_headers"] == [["content-type", "text/html"], ["x-empty", ""], ["set-cookie", "a:b=c"]]
    assert (attempt["remote_address"], attempt["snippet"]) == ("203.0.113.7", "<b>caf\xe9</b>")


def test_refused_address_tells_nothing(relay: Instance) -> None:
    """C-23: of an attempt that policy refused only that is told: no address, no time, no text of its own."""
    key = relay.key()
    delivery = _delivered(relay, key)
    _attempt(
        relay,
        delivery,
        number=1,
        **{"class": 2},
        code="refused",
        error="10.0.0.7 is private",
        remote_address="10.0.0.7",
        dns_us=7,
        total_us=9,
        snippet="10.0.0.7",
    )
    text = relay.client.get(f"/v1/deliveries/{delivery}", headers=key).text
    assert "10.0.0.7" not in text
    assert "refused by the address policy" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "//v1/endpoints", 404, "not_found"),
        ("GET", "/v1/endpoints/", 404, "not_found"),
        ("DELETE", "/v1/events", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/events", 405, "method_not_allowed"),
    ],
)
def test_errors_have_one_shape(relay: Instance, method: str, path: str, status: int, code: str) -> None:
    """What Flask refuses by itself is problem details too, with the Allow header where there is one."""
    answer = relay.client.open(path, method=method)
    body = answer.get_json()
    assert (answer.status_code, answer.mimetype) == (status, "application/problem+json")
    assert (body["type"], body["status"], body["code"]) == ("about:blank", status, code)
    assert body["title"]
    assert body["detail"]
    if status == 405:
        assert "POST" in answer.headers["Allow"]


def test_a_bug_is_a_plain_500(relay: Instance, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error answers without its text; the log has it, under the request's id."""
    key = relay.key()
    relay.query("alter table relay.endpoints rename column description to other")
    answer = relay.client.get("/v1/endpoints", headers={**key, "X-Request-Id": "req-500"})
    assert (answer.status_code, answer.get_json()["code"]) == (500, "internal_error")
    assert "req-500" in answer.text
    assert "description" not in answer.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.__dict__["request_id"] == "req-500"
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-123", True), ("~" * 128, True), ("x" * 129, False), ("a b", False), ("\xe9", False)]
)
def test_request_id(relay: Instance, given: str, kept: bool) -> None:
    """X-Request-Id of visible ASCII comes back, on errors too; anything else is replaced by one of ours."""
    for path in ("/healthz", "/nothing"):
        found = relay.client.get(path, headers={"X-Request-Id": given}).headers["X-Request-Id"]
        assert (found == given) is kept
        assert len(found) == 36 or kept
    assert relay.client.get("/healthz").headers["X-Request-Id"]


def test_answers_are_not_cached(relay: Instance) -> None:
    """Answers hold keys and secrets: no cache keeps them."""
    assert relay.client.get("/healthz").headers["Cache-Control"] == "no-store"


def _beat(relay: Instance, *roles: str) -> None:
    with relay.api.engine.begin() as connection:
        for role in roles:
            process = Process(process_id=new_id(), role=role, host="h", pid=1, release="0")
            heartbeats.beat(connection, process, {})


def test_ready(relay: Instance) -> None:
    """B-155: with worker, publisher and beat alive and nothing late, /readyz is 200."""
    _beat(relay, "worker", "publisher", "beat")
    answer = relay.client.get("/readyz")
    assert answer.status_code == 200
    assert set(answer.get_json()["checks"].values()) == {"ok"}


def test_not_ready_names_what_fails(relay: Instance) -> None:
    """B-155: a role that is missing or silent, and late deliveries, are named; ingest stays ready all the while."""
    _beat(relay, "worker", "publisher")
    relay.query("update relay.heartbeats set beat_at = now() - interval '31 s' where role = 'publisher'")
    _delivered(relay, relay.key())
    relay.query("update relay.deliveries set due_at = now() - interval '90 s'")
    answer = relay.client.get("/readyz")
    assert (answer.status_code, answer.mimetype) == (503, "application/problem+json")
    checks = answer.get_json()["checks"]
    assert {name for name, fault in checks.items() if fault != "ok"} == {"publisher", "beat", "lateness"}
    assert "publisher" in answer.get_json()["detail"]
    assert relay.client.get("/readyz?for=ingest").get_json()["checks"] == {"database": "ok"}
    assert relay.client.get("/readyz?for=lunch").status_code == 400


def test_read_only_database_is_not_ready(relay: Instance) -> None:
    """C-71: a database that reads but takes no writes is not ready, and an event there is 503, not 500."""
    key = relay.key()
    name = relay.query("select current_database()")[0][0]
    relay.query(f'alter database "{name}" set default_transaction_read_only = on')
    relay.api.engine.dispose()
    relay.api.hot.dispose()
    assert relay.client.get("/readyz?for=ingest").status_code == 503
    answer = relay.event(key, b'{"type":"a"}')
    assert (answer.status_code, answer.get_json()["code"]) == (503, "database_unavailable")
    assert int(answer.headers["Retry-After"]) > 0


def test_database_down(database: str) -> None:
    """C-74, B-28: without a database the process is alive, not ready, and answers 503 with Retry-After."""
    with socket.socket() as taken:
        # Bound and not listening: connections are refused.
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql://relay@127.0.0.1:{taken.getsockname()[1]}/nowhere"
        with instance(url) as relay:
            assert relay.client.get("/healthz").status_code == 200
            assert relay.client.get("/readyz?for=ingest").get_json()["checks"]["database"] != "ok"
            headers = {"Authorization": "Bearer rk_abcdefghijkl_" + "A" * 43}
            answer = relay.event(headers, b'{"type":"a"}')
            assert (answer.status_code, answer.get_json()["code"]) == (503, "database_unavailable")
            assert answer.headers["Retry-After"]


def test_frozen_database(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-155: a server that takes connections and never answers is reported within 2 s, and costs one thread."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with instance(f"postgresql://relay@127.0.0.1:{port}/nowhere") as frozen:
            for _ in range(3):
                started = time.monotonic()
                answer = frozen.client.get("/readyz")
                assert time.monotonic() - started < 2
                assert "does not answer" in answer.get_json()["checks"]["database"]
            assert sum(thread.name == "relay-readiness" for thread in threading.enumerate()) == 1
            silent.close()


def test_backend_frozen_mid_look(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look whose own backend stops for good is given up, and the next one, on a new connection, succeeds."""
    monkeypatch.setattr(readiness, "_GIVE_UP_SECS", 0.1)
    _beat(relay, "worker", "publisher", "beat")
    frozen: list[int] = []
    original = heartbeats.youngest_ages

    def stop_first(connection: sa.Connection) -> dict[str, float]:
        if not frozen:
            frozen.append(connection.exec_driver_sql("select pg_backend_pid()").scalar_one())
            os.kill(frozen[0], signal.SIGSTOP)
        return original(connection)

    monkeypatch.setattr(heartbeats, "youngest_ages", stop_first)
    try:
        assert relay.client.get("/readyz").status_code == 503
        assert relay.client.get("/readyz").status_code == 200
        deadline = time.monotonic() + 5
        while any(thread.name == "relay-readiness" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "the look that was given up did not end"
            time.sleep(0.01)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def test_database_that_comes_back(relay: Instance, database: str) -> None:
    """B-28: after its connections were cut the API goes on by itself, without one failed request."""
    key = relay.key()
    assert relay.event(key, b'{"type":"a"}').status_code == 202
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid()"
        )
    assert relay.event(key, b'{"type":"a"}').status_code == 202
