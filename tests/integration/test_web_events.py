"""POST /v1/events: what is taken, what is refused, and what is in the database afterwards."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from werkzeug.datastructures import Headers
from werkzeug.test import EnvironBuilder, run_wsgi_app

from relay.store import events
from relay.store.engine import run
from relay.store.events import NewEvent
from relay.web.parts import new_id
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database, RELAY_MAX_PAYLOAD_BYTES="2000") as made:
        made.workspace()
        yield made


def test_event_and_deliveries_are_committed(relay: Instance) -> None:
    """B-1: 202 names the event and one delivery for each subscribed, enabled endpoint, and all of it is stored."""
    key = relay.key()
    wanted = [relay.endpoint(key, event_types=types)["id"] for types in (["order.*"], [], ["x", "order.paid"], ["*"])]
    relay.endpoint(key, event_types=["order"])
    relay.endpoint(key, event_types=["order.paid"], enabled=False)
    answer = relay.event(key, b'{"type":"order.paid"}', X_Request_Id="req-1")
    assert answer.status_code == 202
    body = answer.get_json()
    assert (body["type"], len(body["deliveries"])) == ("order.paid", 4)
    assert sorted(one["endpoint_id"] for one in body["deliveries"]) == sorted(wanted)
    [(event_type, content_type, payload, request_id, source)] = relay.query(
        "select type, content_type, payload, request_id, source from relay.events where id = %s", body["id"]
    )
    assert (event_type, content_type, payload) == ("order.paid", "application/json", b'{"type":"order.paid"}')
    assert (request_id, source) == ("req-1", 0)
    rows = relay.query("select id::text, status, due_at <= now(), event_type from relay.deliveries")
    assert {row[0] for row in rows} == {one["id"] for one in body["deliveries"]}
    assert {row[1:] for row in rows} == {(0, True, "order.paid")}


def test_no_match_is_accepted(relay: Instance) -> None:
    """B-1: an event that nobody wants is stored, with no deliveries."""
    answer = relay.event(relay.key(), b'{"type":"a"}')
    assert (answer.status_code, answer.get_json()["deliveries"]) == (202, [])
    assert relay.query("select count(*) from relay.events") == [(1,)]


@pytest.mark.parametrize(
    ("patterns", "event_type", "gets"),
    [
        (["user.create", "user.update"], "user.update", True),
        (["order"], "order.paid", False),
        (["order.*"], "order", False),
        (["order.*"], "order.item.added", True),
        (["order.*"], "orders.paid", False),
        (["*"], "anything", True),
        ([], "anything", True),
    ],
)
def test_subscriptions(relay: Instance, patterns: list[str], event_type: str, gets: bool) -> None:
    """C-44: every pattern counts, whole segments match, and no pattern at all means every type."""
    key = relay.key()
    relay.endpoint(key, event_types=patterns)
    answer = relay.event(key, b"{}", Relay_Event_Type=event_type)
    assert len(answer.get_json()["deliveries"]) == gets


@pytest.mark.parametrize(
    "body",
    [
        b'{ "b":1.0,"a":"\xc3\xa9\\u00e9\\/", "n":1e2 }\n',
        b'{"note":"x\\u0000y","big":12345678901234567890123,"big":1e400,"half":"\\ud800"}',
        b"  [1, 2 ]  ",
        b"7",
    ],
)
def test_payload_is_the_bytes_received(relay: Instance, body: bytes) -> None:
    """C-24, C-30, B-5: white space, number spellings, duplicate keys, escapes and U+0000 are stored as they came."""
    answer = relay.event(relay.key(), body, Relay_Event_Type="a.b")
    assert answer.status_code == 202, answer.text
    assert relay.query("select payload from relay.events") == [(body,)]


def test_header_wins_and_any_bytes_go(relay: Instance) -> None:
    """B-2: the header names the type of any body, and over a body's own; the Content-Type is kept."""
    key = relay.key()
    assert relay.event(key, b'{"type":7}', Relay_Event_Type="x.y").get_json()["type"] == "x.y"
    answer = relay.event(key, b"\x00\xff", Content_Type="application/octet-stream; a=b", Relay_Event_Type="bin")
    assert answer.status_code == 202
    rows = relay.query("select content_type, payload from relay.events where type = 'bin'")
    assert rows == [("application/octet-stream; a=b", b"\x00\xff")]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "field"),
    [
        (b"", {}, 400, "invalid_request", "body"),
        (b"{}", {}, 400, "invalid_request", "type"),
        (b"[]", {}, 400, "invalid_request", "type"),
        (b'{"type":1}', {}, 400, "invalid_request", "type"),
        (b'{"type":"a","t\\u0079pe":"b"}', {}, 400, "invalid_request", "type"),
        (b'{"type":"a..b"}', {}, 400, "invalid_request", "type"),
        (b'{"type":"a\\u0000b"}', {}, 400, "invalid_request", "type"),
        (b'{"type":"relay.x"}', {}, 400, "invalid_request", "type"),
        (b'{"type":"relay"}', {}, 400, "invalid_request", "type"),
        (b"{}", {"Relay_Event_Type": "relay.x"}, 400, "invalid_request", "Relay-Event-Type"),
        (b"{}", {"Relay_Event_Type": ""}, 400, "invalid_request", "Relay-Event-Type"),
        (b'{"type":"x","v":NaN}', {}, 400, "invalid_json", "body"),
        (b'{"type":"x","v":-Infinity}', {}, 400, "invalid_json", "body"),
        (b"nonsense", {"Relay_Event_Type": "x"}, 400, "invalid_json", "body"),
        (b'\xef\xbb\xbf{"type":"x"}', {}, 400, "invalid_json", "body"),
        (b'{"type":"x"} x', {"Content_Type": "application/cloudevents+json"}, 400, "invalid_json", "body"),
        (b'{"type":"x"}', {"Content_Type": "text/plain"}, 400, "invalid_request", "Relay-Event-Type"),
        (
            b'{"type":"x"}',
            {"Content_Type": "application/x-www-form-urlencoded"},
            400,
            "invalid_request",
            "Relay-Event-Type",
        ),
        (b"{}", {"Content_Type": "json", "Relay_Event_Type": "x"}, 415, "invalid_content_type", None),
        (b"{}", {"Content_Encoding": "gzip", "Relay_Event_Type": "x"}, 415, "unsupported_encoding", None),
        (b'{"type":"x"}', {"Idempotency_Key": ""}, 400, "invalid_request", "Idempotency-Key"),
        (b'{"type":"x"}', {"Idempotency_Key": "a b"}, 400, "invalid_request", "Idempotency-Key"),
        (b'{"type":"x"}', {"Idempotency_Key": "k" * 256}, 400, "invalid_request", "Idempotency-Key"),
        (b'{"type":"x"}', {"Idempotency_Key": "\xe9"}, 400, "invalid_request", "Idempotency-Key"),
        (b'{"type":"x"}', {"Relay_Expires_In": "0.9"}, 400, "invalid_request", "Relay-Expires-In"),
        (b'{"type":"x"}', {"Relay_Expires_In": "1e3"}, 400, "invalid_request", "Relay-Expires-In"),
        (b'{"type":"x"}', {"Relay_Expires_In": "2592001"}, 400, "invalid_request", "Relay-Expires-In"),
        (b'{"type":"x","v":"' + b"x" * 2000 + b'"}', {}, 413, "payload_too_large", None),
    ],
)
def test_refusals(
    relay: Instance, body: bytes, headers: dict[str, str], status: int, code: str, field: str | None
) -> None:
    """B-2, B-4, B-5, C-30 to C-34: each is refused with its status, code and field, and nothing is stored."""
    answer = relay.event(relay.key(), body, **headers)
    assert (answer.status_code, (answer.json or {})["code"]) == (status, code), answer.text
    assert list(fields_of(answer)) == ([] if field is None else [field])
    assert relay.query("select count(*) from relay.events") == [(0,)]


def test_deep_nesting_is_refused(database: str) -> None:
    """C-32: 20,000 brackets are a 400 that says where, and the process lives."""
    with instance(database) as relay:
        relay.workspace()
        answer = relay.event(relay.key(), b"[" * 20_000 + b"]" * 20_000, Relay_Event_Type="x")
        assert answer.status_code == 400
        assert answer.get_json()["position"] == 100


def test_invalid_json_says_where(relay: Instance) -> None:
    """B-5: position, line and column of the fault are in the answer."""
    body = relay.event(relay.key(), b'{"type":"x",\n "v":NaN}').get_json()
    assert (body["position"], body["line"], body["column"]) == (18, 2, 6)


def test_no_content_type_means_json(relay: Instance) -> None:
    """A body without Content-Type is judged, stored and sent on as JSON."""
    answer = relay.client.post("/v1/events", data=b'{"type":"x"}', headers=relay.key())
    assert answer.status_code == 202, answer.text
    assert relay.query("select content_type from relay.events") == [("application/json",)]


def test_limit_is_exact(relay: Instance) -> None:
    """B-4: a body of exactly the limit is taken, one byte more is not."""
    key = relay.key()
    for size, status in ((2000, 202), (2001, 413)):
        body = b'"' + b"x" * (size - 2) + b'"'
        assert relay.event(key, body, Relay_Event_Type="x").status_code == status


def test_workspace_limit_is_the_lower_one(relay: Instance) -> None:
    """B-143: a workspace's own payload limit holds where it is below the installation's."""
    relay.workspace("small", max_payload_bytes=100)
    key = relay.key("small")
    assert relay.event(key, b'"' + b"x" * 98 + b'"', Relay_Event_Type="x").status_code == 202
    assert relay.event(key, b'"' + b"x" * 99 + b'"', Relay_Event_Type="x").status_code == 413


class _Trickle(io.RawIOBase):
    """A body that comes a byte at a time and counts what was taken."""

    def __init__(self, body: bytes) -> None:
        self.left = body
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        piece, self.left = self.left[:1], self.left[1:]
        self.taken += len(piece)
        return piece


def _chunked(relay: Instance, body: io.RawIOBase, key: dict[str, str], **headers: str) -> int:
    given: dict[str, str] = {**key, **headers}
    environ = EnvironBuilder("/v1/events", method="POST", headers=Headers(given)).get_environ() | {
        "wsgi.input": body,
        "wsgi.input_terminated": True,
        "HTTP_TRANSFER_ENCODING": "chunked",
    }
    environ.pop("CONTENT_LENGTH", None)
    return _status(relay, environ)


def _status(relay: Instance, environ: dict[str, Any]) -> int:
    """Call the application as a server does: the test client would look into the body first."""
    _, status, _ = run_wsgi_app(relay.client.application, environ, buffered=True)
    return int(status.partition(" ")[0])


def test_chunked_body_over_the_limit(relay: Instance) -> None:
    """C-33: without a declared length too, one byte over the limit is 413, and no more than that byte is read."""
    body = _Trickle(b'{"type":"x","v":"' + b"x" * 5000)
    assert _chunked(relay, body, relay.key()) == 413
    assert body.taken == 2001
    assert relay.query("select count(*) from relay.events") == [(0,)]


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b' {"type":"x"}', "application/json", 202),
        (b'{"type":"x"', "application/json", 400),
        (b"1234", "application/json", 411),
        (b"abc", "text/plain", 411),
    ],
)
def test_chunked_body_must_show_its_end(relay: Instance, body: bytes, content_type: str, status: int) -> None:
    """A chunked body that may be a cut one is never stored: only JSON that shows its own end is taken."""
    headers = {"Content-Type": content_type, "Relay-Event-Type": "x"}
    assert _chunked(relay, _Trickle(body), relay.key(), **headers) == status
    assert relay.query("select count(*) from relay.events") == [(int(status == 202),)]


def test_short_body_is_refused(relay: Instance) -> None:
    """A body that ends before its declared length is 400, not a shorter event."""
    given: dict[str, str] = {**relay.key(), "Relay-Event-Type": "x"}
    environ = EnvironBuilder("/v1/events", method="POST", headers=Headers(given)).get_environ() | {
        "wsgi.input": io.BytesIO(b"12"),
        "wsgi.input_terminated": True,
        "CONTENT_LENGTH": "3",
    }
    assert _status(relay, environ) == 400
    assert relay.query("select count(*) from relay.events") == [(0,)]


def test_a_batch_answers_in_order(relay: Instance) -> None:
    """Events of several workspaces go in one statement, each to its own workspace's endpoints, answered in order."""
    other = relay.workspace("other")
    mine = relay.query("select id::text from relay.workspaces where name = 'acme'")[0][0]
    mine_endpoint = relay.endpoint(relay.key(), event_types=["a.*"])["id"]
    other_endpoint = relay.endpoint(relay.key("other"))["id"]
    batch = [
        NewEvent(
            id=new_id(),
            workspace_id=UUID(str(workspace)),
            type=event_type,
            content_type="text/plain",
            payload=b"p",
            api_key_id=None,
            request_id=None,
        )
        for workspace, event_type in ((mine, "a.b"), (other, "a.b"), (mine, "z"), (mine, "a.c"), (other, "relay.x"))
    ]
    with relay.api.hot.connect() as connection:
        stored = events.ingest(connection, batch)
    answers = [json.loads(answer or b"") for answer in stored]
    assert [one["id"] for one in answers] == [str(event.id) for event in batch]
    to = [[delivery["endpoint_id"] for delivery in one["deliveries"]] for one in answers]
    assert to == [[mine_endpoint], [other_endpoint], [], [mine_endpoint], []]


def test_fan_out_walks_the_workspaces_index(relay: Instance) -> None:
    """The plan finds a workspace's endpoints by its index, however small the tables are."""
    with relay.api.hot.connect() as connection:
        values = (new_id(), new_id(), "a", "t", b"p", None, None, 5.0, "a *", True)
        for statement, more in ((events._INGEST, ()), (events._INGEST_KEYED, ("key", b"fingerprint"))):
            parameters = [[value] for value in (*values, *more)]
            plan = run(connection, b"explain " + statement.as_bytes(), parameters).fetchall()  # type: ignore[arg-type]
            text = "\n".join(row[0] for row in plan)
            assert "Index Scan using endpoints_by_workspace" in text, text
            assert "Seq Scan" not in text, text


def test_simultaneous_events(relay: Instance) -> None:
    """Events posted at once, more than there are connections, are all stored with their deliveries."""
    key = relay.key()
    relay.endpoint(key)

    def post(_: int) -> int:
        client = relay.client.application.test_client()
        headers = {**key, "Content-Type": "application/json"}
        return client.post("/v1/events", data=b'{"type":"x"}', headers=headers).status_code

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(post, range(60))) == {202}
    assert relay.query("select count(*) from relay.deliveries") == [(60,)]
