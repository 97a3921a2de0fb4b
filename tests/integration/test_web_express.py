"""The short way for single events: what it answers is what the application answers, and what it stores the same."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from relay.bootstrap import api as api_parts
from relay.store import engine
from relay.web import auth, together
from relay.web import front as serving
from relay.web.app import EXPRESS, create_app
from relay.web.front import Front
from relay.web.together import LEADERS, Together
from tests.hostile import wait_until
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = b'{"type":"order.paid","n":1}'
JSON = {"Content-Type": "application/json"}
LOCKED = (
    "select count(*) from pg_stat_activity where wait_event = 'relation' and datname = current_database()"
    " and application_name like 'relay api%%'"
)


class Served(Instance):
    """The API behind the server, in this process."""

    port: int
    #: Ids of events that went the short way.
    short: list[str]

    def send(self, headers: dict[str, str], body: bytes = BODY) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Post an event over a connection of its own."""
        given = {"Host": "relay", "Connection": "close", "Content-Length": str(len(body)), **JSON, **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        answer = bytearray()
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=30)) as peer:
            peer.sendall(f"POST /v1/events HTTP/1.1\r\n{head}\r\n".encode() + body)
            while piece := peer.recv(65_536):
                answer += piece
        first, _, rest = bytes(answer).partition(b"\r\n")
        lines, _, content = rest.partition(b"\r\n\r\n")
        named = dict(line.split(": ", 1) for line in lines.decode().split("\r\n"))
        assert int(named["Content-Length"]) == len(content)
        return int(first.split()[1]), named, json.loads(content)


@contextmanager
def _served(database: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> Iterator[Served]:
    with instance(database, RELAY_DB_POOL="8", **settings) as made:
        short: list[str] = []
        usual = Together.post

        def post(self: Together, one: together.Waiting) -> None:
            short.append(str(one.event.id))
            usual(self, one)

        monkeypatch.setattr(Together, "post", post)
        app = create_app(made.api)
        listener = socket.create_server(("127.0.0.1", 0))
        relay = Served(api=made.api, client=app.test_client(), database=database)
        object.__setattr__(relay, "port", listener.getsockname()[1])
        object.__setattr__(relay, "short", short)
        front = Front(
            app,
            listener,
            threads=4,
            grace_secs=5,
            on_refusal=made.api.figures.answered,
            express=app.extensions[EXPRESS],
        )
        thread = threading.Thread(target=front.run)
        thread.start()
        try:
            relay.workspace()
            yield relay
        finally:
            front.stop()
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements may wait as long as a test likes, and a key that is known stays so."""
    monkeypatch.setattr(together, "LOCK_TIMEOUT_MS", 60_000)
    monkeypatch.setattr(together, "SLOW_SECS", 0.0)
    monkeypatch.setattr(api_parts, "INGEST_PATIENCE_SECS", 60)
    monkeypatch.setattr(engine, "STATEMENT_TIMEOUT_SECS", 60)
    monkeypatch.setattr(auth, "_KNOWN_FOR_SECS", 600.0)
    monkeypatch.setattr(auth, "_RENEWED_AFTER_SECS", 600.0)


@pytest.fixture
def relay(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """An API that serves, with one workspace."""
    with _served(database, monkeypatch) as made:
        yield made


def _goes_short(relay: Served, headers: dict[str, str], body: bytes = BODY) -> tuple[int, dict[str, str], Any]:
    """Post until an event goes the short way: the first of a key does not, nor does the one that asks anew for it."""
    deadline = time.monotonic() + 30
    while True:
        before = len(relay.short)
        answer = relay.send(headers, body)
        if len(relay.short) > before:
            return answer
        assert time.monotonic() < deadline, "nothing goes the short way"


def test_both_ways_do_the_same(relay: Served) -> None:
    """B-1: header for header, column for column; and an answer counts as one, whichever way it went."""
    key = relay.key()
    relay.endpoint(key)
    headers = {**key, "X-Request-Id": "mine", "Relay-Event-Type": "order.sent", "Relay-Expires-In": "3600"}
    status, named, body = _goes_short(relay, headers, b'{"n": 1}')
    usual = relay.event(key, b'{"n": 1}', X_Request_Id="mine", Relay_Event_Type="order.sent", Relay_Expires_In="3600")
    assert (status, body.keys(), named.pop("Connection")) == (202, usual.json.keys(), "close")  # type: ignore[union-attr]  # an object
    del named["Date"]
    assert named == dict(usual.headers)
    assert list(named) == list(dict(usual.headers))
    columns = "type, content_type, payload, source, api_key_id, request_id, idempotency_key, cardinality(delivery_ids)"
    rows = [
        relay.query(
            f"select {columns}, (select round(extract(epoch from d.expires_at - d.created_at)) from relay.deliveries d"
            " where d.event_id = e.id) from relay.events e where id = %s",
            one["id"],
        )
        for one in (body, usual.json)
        if one is not None
    ]
    assert rows[0] == rows[1]
    assert rows[0][0][-1] == 3600

    def counted() -> tuple[float, float]:
        lines = relay.client.get("/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return float(found["relay_ingest_accepted_total"]), float(found["relay_ingest_duration_seconds_count"])

    before = counted()
    went = len(relay.short)
    sent = 0
    while len(relay.short) == went:
        relay.send(key)
        sent += 1
    assert counted() == (before[0] + sent, before[1] + sent)


def test_refusals_are_the_applications(relay: Served) -> None:
    """B-30: what is wrong with a request is told in the same words, whether or not its key is known."""
    key = relay.key()
    reader = relay.key(scopes=("read",))
    relay.workspace("other")
    _goes_short(relay, key)
    cases: list[tuple[dict[str, str], bytes]] = [
        ({}, BODY),
        ({"Authorization": "Basic eDp5"}, BODY),
        (reader, BODY),
        ({**key, "Relay-Workspace": "other"}, BODY),
        (key, b""),
        (key, b'{"type":'),
        (key, b"[" * 200 + b"]" * 200),
        (key, b'{"type":"relay.x"}'),
        (key, b'{"type":1}'),
        (key, b"{}"),
        ({**key, "Relay-Expires-In": "soon"}, BODY),
        ({**key, "Idempotency-Key": "k" * 300}, BODY),
        ({**key, "Content-Encoding": "gzip"}, BODY),
        ({**key, "Content-Type": "nonsense"}, BODY),
        ({**key, "Content-Type": "text/plain"}, BODY),
    ]
    for headers, body in cases:
        status, named, problem = relay.send(headers, body)
        usual = relay.client.post("/v1/events", data=body, headers={**JSON, **headers})
        assert (status, problem) == (usual.status_code, usual.json), (headers, body)
        assert named["Content-Type"] == usual.headers["Content-Type"]
        assert status >= 400
    assert relay.query("select count(*) from relay.events where type <> 'order.paid'") == [(0,)]


def test_idempotency_keys_hold_on_both_ways(relay: Served) -> None:
    """B-10, B-11: a repeat gets the first answer's bytes, and another event under the key 409."""
    key = relay.key()
    _goes_short(relay, key)
    headers = {**key, "Idempotency-Key": "k"}
    _, first_named, first = relay.send(headers)
    _, again_named, again = _goes_short(relay, headers)
    assert again == first
    assert [named.get("Relay-Idempotent-Replay") for named in (first_named, again_named)] == [None, "true"]
    assert _goes_short(relay, headers, b'{"type":"order.lost"}')[0] == 409


def test_a_revoked_key_ends_soon(relay: Served) -> None:
    """B-32: within a second, though it is in use all the time."""
    key = relay.key()
    _goes_short(relay, key)
    [(key_id,)] = relay.query("select id::text from relay.api_keys")
    assert relay.client.delete(f"/v1/keys/{key_id}", headers=relay.admin("acme")).status_code == 204
    revoked = time.monotonic()
    last_good = revoked
    while True:
        asked = time.monotonic()
        if relay.send(key)[0] == 401:
            break
        last_good = asked
        assert asked - revoked < 30
    assert last_good - revoked < 1.0
    assert relay.send(key)[0] == 401


def test_limits_of_a_workspace_hold(relay: Served) -> None:
    """B-43: a workspace with a rate of its own is held to it."""
    key = relay.key()
    workspace = relay.query("select id::text from relay.workspaces")[0][0]
    changed = relay.client.patch(f"/v1/workspaces/{workspace}", json={"ingest_rate": 1}, headers=relay.admin())
    assert changed.status_code == 200, changed.text
    statuses: list[int] = []
    deadline = time.monotonic() + 30
    while 429 not in statuses:
        statuses.append(relay.send(key)[0])
        assert time.monotonic() < deadline, statuses


@pytest.mark.usefixtures("patient")
def test_what_waits_too_long_is_refused_and_not_stored(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-28: while statements hang, those behind them are 503 `busy`, and none of these is stored later."""
    with _served(database, monkeypatch) as relay:
        key = relay.key()
        _goes_short(relay, key)
        with ThreadPoolExecutor(LEADERS) as pool, psycopg.connect(relay.database) as holder:
            holder.execute("lock table relay.events in share mode")
            waiting = []
            for count in range(1, LEADERS + 1):
                waiting.append(pool.submit(relay.send, key, b'{"type":"waits"}'))
                wait_until(lambda count=count: relay.query(LOCKED) == [(count,)])  # type: ignore[misc]  # bound here
            monkeypatch.setattr(serving, "WAIT_SECS", 0.3)
            went = len(relay.short)
            status, named, problem = relay.send(key, b'{"type":"refused"}')
            assert (status, problem["code"], named["Retry-After"]) == (503, "busy", "5")
            assert len(relay.short) == went + 1
            holder.rollback()
            assert [one.result(30)[0] for one in waiting] == [202] * LEADERS
        assert relay.query("select distinct type from relay.events where type <> 'order.paid'") == [("waits",)]


@pytest.mark.usefixtures("patient")
def test_a_lost_connection_is_told(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-28: where nobody knows whether the event was stored, its producer hears 503 under the request's own id."""
    with _served(database, monkeypatch) as relay:
        key = relay.key()
        _goes_short(relay, key)
        with ThreadPoolExecutor(1) as pool, psycopg.connect(relay.database) as holder:
            holder.execute("lock table relay.events in share mode")
            lost = pool.submit(relay.send, {**key, "X-Request-Id": "mine"})
            wait_until(lambda: relay.query(LOCKED) == [(1,)])
            relay.query(LOCKED.replace("count(*)", "pg_terminate_backend(pid)"))
            status, named, problem = lost.result(30)
            holder.rollback()
        assert (status, problem["code"], named["Retry-After"]) == (503, "database_unavailable", "5")
        assert named["X-Request-Id"] == "mine"
        assert _goes_short(relay, key)[0] == 202
