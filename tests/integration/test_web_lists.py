"""Lists of events, deliveries and audit records: pages, filters, cursors, and the payload's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from uuid import UUID, uuid4

import pytest

from relay.store import delivery_lists, event_reading
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = dict[str, Any]

UNKNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


@pytest.fixture
def key(relay: Instance) -> dict[str, str]:
    """A key with every scope."""
    return relay.key()


def _page(relay: Instance, key: dict[str, str], path: str, **query: str) -> Row:
    answer = relay.client.get(f"{path}?{urlencode(query)}", headers=key)
    assert answer.status_code == 200, answer.text
    return dict(answer.get_json())


def _walk(
    relay: Instance,
    key: dict[str, str],
    path: str,
    *,
    between: Callable[[], object] = lambda: None,
    query: dict[str, str] | None = None,
    **further: str,
) -> list[Row]:
    """All rows of a list, page by page; `between` is called before each further page."""
    asked = {**(query or {}), **further}
    page = _page(relay, key, path, **asked)
    rows = list(page["data"])
    while page["next_cursor"] is not None:
        between()
        page = _page(relay, key, path, **asked, cursor=page["next_cursor"])
        assert len(page["data"]) <= int(asked.get("limit", "50"))
        rows += page["data"]
    return rows


def _ids(rows: list[Row]) -> list[str]:
    return [row["id"] for row in rows]


def _send(relay: Instance, key: dict[str, str], event_type: str = "a.b") -> Row:
    answer = relay.event(key, b'{"type":"%s"}' % event_type.encode())
    assert answer.status_code == 202, answer.text
    return dict(answer.get_json())


def test_rows_of_one_time_and_rows_that_come_meanwhile(relay: Instance, key: dict[str, str]) -> None:
    """B-130, C-66: rows that share a time, and all that was there before the first page, come exactly once."""
    for _ in range(13):
        relay.endpoint(key)
    one = _send(relay, key)
    endpoint = one["deliveries"][0]["endpoint_id"]
    before = [delivery["id"] for delivery in one["deliveries"]]
    events = [one["id"]]
    for _ in range(6):
        event = _send(relay, key)
        events.append(event["id"])
        before += [delivery["id"] for delivery in event["deliveries"]]
    own = [row[0] for row in relay.query("select id::text from relay.deliveries where endpoint_id = %s", endpoint)]

    def send() -> None:
        _send(relay, key)

    for path, expected in (
        ("/v1/deliveries", before),
        (f"/v1/endpoints/{endpoint}/deliveries", own),
        ("/v1/events", events),
    ):
        rows = _walk(relay, key, path, between=send, limit="5")
        assert set(_ids(rows)) >= set(expected)
        seen = _ids(rows)
        assert len(seen) == len(set(seen))
        assert [row["created_at"] for row in rows] == sorted((row["created_at"] for row in rows), reverse=True)
    rows = _walk(relay, key, "/v1/deliveries", limit="250")
    assert {row["endpoint_id"] for row in rows} == {row["id"] for row in _walk(relay, key, "/v1/endpoints")}
    assert relay.query("select count(*) from relay.deliveries") == [(len(rows),)]
    assert "attempts" not in rows[0]


def test_delivery_and_event_are_of_one_time(relay: Instance, key: dict[str, str]) -> None:
    """What the walk by events rests on: a delivery's time is its event's, and its event names it."""
    relay.endpoint(key)
    _send(relay, key)
    batch = [{"type": "a.b", "payload": {"n": n}} for n in range(3)]
    assert relay.client.post("/v1/events/batch", json=batch, headers=key).status_code == 202
    job = relay.client.post("/enqueue", data=b"x", headers={**key, "Relay-Url": "https://hooks.example.com/job"})
    assert job.status_code == 202
    odd = relay.query(
        "select d.id from relay.deliveries d left join relay.events e"
        " on e.id = d.event_id and e.created_at = d.created_at and d.id = any(e.delivery_ids) where e.id is null"
    )
    assert odd == []
    rows = _walk(relay, key, "/v1/deliveries")
    assert len(rows) == 5
    # A job is listed as what it is, under the endpoint that its origin implies.
    [listed] = [row for row in rows if row["id"] == job.get_json()["id"]]
    assert _ids(_walk(relay, key, f"/v1/endpoints/{listed['endpoint_id']}/deliveries")) == [listed["id"]]
    [event] = [row for row in _walk(relay, key, "/v1/events") if row["id"] == listed["event_id"]]
    assert event["source"] == "job"


def _mixed(relay: Instance, key: dict[str, str]) -> tuple[str, dict[str, list[str]]]:
    """Two endpoints with deliveries of every state; return the first one's id and its deliveries' ids by state."""
    endpoint = relay.endpoint(key, event_types=["a.*", "b"])["id"]
    relay.endpoint(key, event_types=["a.*"])
    found: dict[str, list[str]] = {}
    for status, label in enumerate(("pending", "in_flight", "delivered", "dead", "canceled")):
        for event_type in ("a.b", "b", "a.c"):
            for made in _send(relay, key, event_type)["deliveries"]:
                reason = ("gone" if event_type == "b" else "refused") if label == "dead" else None
                relay.query(
                    "update relay.deliveries set status = %s, reason = %s where id = %s", status, reason, made["id"]
                )
                if made["endpoint_id"] == endpoint:
                    found.setdefault(label, []).insert(0, made["id"])
    return endpoint, found


def _meets(row: Row, query: dict[str, str]) -> bool:
    """Whether a row is what a query asks for."""
    fields = {name: value for name, value in query.items() if name not in {"since", "until"}}
    return (
        all(row[name] == value for name, value in fields.items())
        and row["created_at"] >= query.get("since", "")
        and row["created_at"] < query.get("until", "9999")
    )


def test_filters(relay: Instance, key: dict[str, str]) -> None:
    """B-132: status, type, reason and time, alone and together, on an endpoint's list and on the workspace's."""
    endpoint, found = _mixed(relay, key)
    everything = _walk(relay, key, "/v1/deliveries")
    assert len(everything) == 25
    cut = everything[10]["created_at"]
    for query in (
        *({"status": label} for label in found),
        {"event_type": "b"},
        {"event_type": "a.b", "status": "canceled"},
        {"reason": "gone"},
        {"reason": "refused", "event_type": "a.c"},
        {"since": cut},
        {"until": cut, "status": "pending"},
        {"event_type": "none"},
    ):
        expected = [row for row in everything if _meets(row, query)]
        assert bool(expected) is (query != {"event_type": "none"})
        own = [row for row in expected if row["endpoint_id"] == endpoint]
        assert _ids(_walk(relay, key, "/v1/deliveries", limit="2", query=query)) == _ids(expected), query
        by_filter = {**query, "endpoint_id": endpoint}
        assert _ids(_walk(relay, key, "/v1/deliveries", limit="2", query=by_filter)) == _ids(own), query
        path = f"/v1/endpoints/{endpoint}/deliveries"
        assert _ids(_walk(relay, key, path, limit="2", query=query)) == _ids(own), query
    assert _ids(_walk(relay, key, f"/v1/endpoints/{endpoint}/deliveries", status="dead")) == found["dead"]
    events = _walk(relay, key, "/v1/events", limit="3", type="b")
    assert [event["type"] for event in events] == ["b"] * 5
    assert len(_walk(relay, key, "/v1/events", since=events[1]["created_at"], type="b")) == 2


def test_a_page_looks_at_so_many_rows_and_no_more(
    relay: Instance, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter that finds little makes pages short, or empty, and never a request long; the walk misses nothing."""
    monkeypatch.setattr(delivery_lists, "LOOK", 7)
    monkeypatch.setattr(event_reading, "LOOK", 7)
    endpoint, found = _mixed(relay, key)
    lonely = relay.endpoint(key, event_types=["z"])["id"]
    # Events that nobody wants count, too.
    for _ in range(20):
        _send(relay, key, "nobody.wants")
    first = _page(relay, key, "/v1/deliveries", status="pending")
    assert first["data"] == []
    assert first["next_cursor"]
    for path in ("/v1/deliveries", f"/v1/endpoints/{endpoint}/deliveries"):
        for label, ids in found.items():
            rows = _walk(relay, key, path, status=label)
            assert [row["id"] for row in rows if row["endpoint_id"] == endpoint] == ids
    assert len(_walk(relay, key, "/v1/deliveries")) == 25
    assert len(_walk(relay, key, "/v1/events", type="b")) == 5
    assert _walk(relay, key, f"/v1/endpoints/{lonely}/deliveries", status="pending") == []


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("/v1/deliveries", "status=lost", "status"),
        ("/v1/deliveries", "reason=bored", "reason"),
        ("/v1/deliveries", "reason=gone&status=pending", "reason"),
        ("/v1/deliveries", "event_type=a..b", "event_type"),
        ("/v1/deliveries", "since=2026-01-01", "since"),
        ("/v1/deliveries", "since=2026-01-01T00:00:00%2B01:00&until=2025-12-31T23:00:00Z", "until"),
        ("/v1/deliveries", "state=dead", "state"),
        ("/v1/deliveries", "status=dead&status=dead", "status"),
        ("/v1/deliveries", "endpoint_id=x", "endpoint_id"),
        ("/v1/deliveries", "limit=0", "limit"),
        ("/v1/events", "status=dead", "status"),
        ("/v1/events", "type=", "type"),
        ("/v1/audit", "until=soon", "until"),
        ("/v1/audit", "actor=x", "actor"),
    ],
)
def test_bad_parameters_are_named(relay: Instance, key: dict[str, str], path: str, query: str, field: str) -> None:
    """B-131: what a list cannot do is 400, by name, with the words that work where there are some."""
    answer = relay.client.get(f"{path}?{query}", headers=key)
    assert (answer.status_code, list(fields_of(answer))) == (400, [field])
    if query == "status=lost":
        assert "pending, in_flight, delivered, dead, canceled" in answer.get_json()["detail"]


def test_unknown_endpoint_is_no_empty_page(relay: Instance, key: dict[str, str]) -> None:
    """B-131: 404 for an endpoint that is not there; what a deleted one was sent can still be read."""
    for path in (
        f"/v1/endpoints/{UNKNOWN}/deliveries",
        "/v1/endpoints/x/deliveries",
        f"/v1/deliveries?endpoint_id={UNKNOWN}",
    ):
        answer = relay.client.get(path, headers=key)
        assert (answer.status_code, answer.get_json()["code"]) == (404, "unknown_endpoint")
    endpoint = relay.endpoint(key)["id"]
    _send(relay, key)
    assert relay.client.delete(f"/v1/endpoints/{endpoint}", headers=key).status_code == 204
    assert len(_page(relay, key, f"/v1/endpoints/{endpoint}/deliveries")["data"]) == 1


def test_a_cursor_is_good_for_its_own_list(relay: Instance, key: dict[str, str]) -> None:
    """B-131: with another list, filter or workspace, or changed, a cursor is 400; with another limit it works."""
    endpoint = relay.endpoint(key)["id"]
    other = relay.endpoint(key)["id"]
    for _ in range(3):
        _send(relay, key)
    lists = [
        ("/v1/deliveries", {}),
        ("/v1/deliveries", {"event_type": "a.b"}),
        ("/v1/deliveries", {"endpoint_id": endpoint}),
        (f"/v1/endpoints/{endpoint}/deliveries", {}),
        (f"/v1/endpoints/{endpoint}/deliveries", {"since": "2020-01-01T00:00:00Z"}),
        (f"/v1/endpoints/{other}/deliveries", {}),
        ("/v1/events", {}),
        ("/v1/events", {"type": "a.b"}),
        ("/v1/audit", {}),
        ("/v1/endpoints", {}),
    ]
    cursors = [_page(relay, key, path, limit="1", **query)["next_cursor"] for path, query in lists]
    assert len(set(cursors)) == len(lists)
    for place, (path, query) in enumerate(lists):
        for origin, cursor in enumerate(cursors):
            answer = relay.client.get(f"{path}?{urlencode({**query, 'cursor': cursor, 'limit': '2'})}", headers=key)
            assert answer.status_code == (200 if place == origin else 400), (path, query, lists[origin])
            if place != origin:
                assert fields_of(answer) == {"cursor": "invalid_cursor"}
        changed = quote(cursors[place][:-1] + ("A" if cursors[place][-1] != "A" else "B"))
        assert relay.client.get(f"{path}?{urlencode(query)}&cursor={changed}", headers=key).status_code == 400
    relay.workspace("other")
    theirs = relay.client.get(f"/v1/deliveries?cursor={cursors[0]}", headers=relay.key("other"))
    assert theirs.status_code == 400


def test_an_event_with_its_deliveries(relay: Instance, key: dict[str, str]) -> None:
    """B-133, B-142: an event shows what it fanned out to, and who sent it under which request and key."""
    relay.endpoint(key)
    relay.endpoint(key)
    sent = relay.event(key, b'{"type":"a.b","n":1}', X_Request_Id="req-7", Idempotency_Key="k-7").get_json()
    event = relay.client.get(f"/v1/events/{sent['id']}", headers=key).get_json()
    assert (event["id"], event["type"], event["source"]) == (sent["id"], "a.b", "producer")
    assert (event["request_id"], event["idempotency_key"], event["payload_bytes"]) == ("req-7", "k-7", 20)
    assert event["content_type"] == "application/json"
    assert event["created_at"] == sent["created_at"]
    assert str(UUID(event["api_key_id"])) == event["api_key_id"]
    assert {row["id"] for row in event["deliveries"]} == {row["id"] for row in sent["deliveries"]}
    assert event["delivery_count"] == 2
    assert {row["status"] for row in event["deliveries"]} == {"pending"}
    listed = _page(relay, key, "/v1/events")["data"][0]
    assert listed == {name: value for name, value in event.items() if name != "deliveries"}
    for path in (f"/v1/events/{UNKNOWN}", "/v1/events/x", f"/v1/events/{UNKNOWN}/payload", "/v1/events/x/payload"):
        answer = relay.client.get(path, headers=key)
        assert (answer.status_code, answer.get_json()["code"]) == (404, "unknown_event")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"type":"a.b", "e":"\\u00e9\\/", "n":1.0}\n', "application/json"),
        (b"<script>alert(1)</script>\xff\0", "text/html"),
    ],
)
def test_a_payload_is_the_bytes_that_came_and_no_page(
    relay: Instance, key: dict[str, str], body: bytes, content_type: str
) -> None:
    """C-68: the payload comes as it was received, as a download that no browser shows or runs."""
    sent = relay.event(key, body, Content_Type=content_type, Relay_Event_Type="a.b").get_json()
    answer = relay.client.get(f"/v1/events/{sent['id']}/payload", headers=key)
    assert answer.data == body
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers.getlist("X-Content-Type-Options") == ["nosniff"]
    assert "sandbox" in answer.headers["Content-Security-Policy"]


def test_the_audit_log(relay: Instance, key: dict[str, str]) -> None:
    """B-142: the workspace's changes, the newest first, by pages, with who made them; no secret among them."""
    endpoint = relay.endpoint(key, headers={"X-Token": "marker-value"})
    relay.client.post(f"/v1/endpoints/{endpoint['id']}/disable", headers={**key, "X-Request-Id": "req-9"})
    rows = _walk(relay, key, "/v1/audit", limit="1")
    assert [row["action"] for row in rows] == ["endpoint.disabled", "endpoint.created", "key.created"]
    assert rows[0]["target"] == f"endpoint:{endpoint['id']}"
    assert (rows[0]["before"], rows[0]["after"]) == ({"enabled": True}, {"enabled": False})
    assert rows[0]["actor"].startswith("key:")
    assert rows[0]["request_id"] == "req-9"
    assert rows[2]["actor"] == "instance"
    text = relay.client.get("/v1/audit", headers=key).text
    assert "marker-value" not in text
    assert endpoint["secret"] not in text
    assert _ids(_walk(relay, key, "/v1/audit", since=rows[1]["at"])) == _ids(rows[:2])
    assert _ids(_walk(relay, key, "/v1/audit", until=rows[1]["at"])) == _ids(rows[2:])
    relay.workspace("other")
    assert [row["action"] for row in _walk(relay, relay.key("other"), "/v1/audit")] == ["key.created"]


def test_what_a_dead_delivery_keeps_outlives_the_log(relay: Instance, key: dict[str, str]) -> None:
    """B-120: the evidence of the last attempt stands in the delivery itself; of a refused address nothing is told."""
    relay.endpoint(key)
    delivery = _send(relay, key)["deliveries"][0]["id"]
    assert relay.client.get(f"/v1/deliveries/{delivery}", headers=key).get_json()["last_attempt"] is None
    for code, told in (("http_500", True), ("refused", False)):
        relay.query(
            """
            update relay.deliveries set status = 3, reason = 'attempts_exhausted', last_attempt = jsonb_build_object(
                'at', now(), 'number', 12, 'generation', 1, 'code', %s::text, 'error', 'the receiver answered 500',
                'status', 500, 'remote_address', '203.0.113.7', 'total_us', 1500, 'reply_headers', 'a: b',
                'snippet', 'oh no')
            """,
            code,
        )
        last = relay.client.get(f"/v1/deliveries/{delivery}", headers=key).get_json()["last_attempt"]
        assert (last["number"], last["generation"], last["code"], last["status"]) == (12, 1, code, 500)
        assert last["at"].endswith("Z")
        assert (last["snippet"] == "oh no") is told
        assert (last["remote_address"] == "203.0.113.7") is told
        assert (last["total"], last["reply_headers"]) == ((1.5, [["a", "b"]]) if told else (None, []))


def test_another_workspaces_rows_are_in_no_list(relay: Instance, key: dict[str, str]) -> None:
    """B-140: lists hold the caller's own rows, even where an event names deliveries that are not its workspace's."""
    relay.endpoint(key)
    mine = _send(relay, key)["deliveries"][0]["id"]
    relay.workspace("other")
    other = relay.key("other")
    _send(relay, other)
    relay.query(
        "update relay.events set delivery_ids = array[%s::uuid, %s::uuid] where delivery_ids = '{}'", mine, uuid4()
    )
    for path in ("/v1/deliveries", "/v1/deliveries?status=dead"):
        assert relay.client.get(path, headers=other).get_json()["data"] == []
    assert len(_walk(relay, other, "/v1/events")) == 1
    event = _walk(relay, other, "/v1/events")[0]["id"]
    assert relay.client.get(f"/v1/events/{event}", headers=other).get_json()["deliveries"] == []
