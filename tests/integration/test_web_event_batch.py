"""POST /v1/events/batch: exact payloads, all or nothing, and keys of its own for each event."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace and small limits."""
    limits = {"RELAY_MAX_PAYLOAD_BYTES": "2000", "RELAY_MAX_BATCH_BYTES": "200000"}
    with instance(database, RELAY_DB_POOL="8", **limits) as made:
        made.workspace()
        yield made


def _batch(relay: Instance, key: dict[str, str], body: bytes | list[Any], **headers: str) -> TestResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return relay.client.post(
        "/v1/events/batch", data=data, headers={"Content-Type": "application/json", **named, **key}
    )


def _stored(relay: Instance) -> int:
    return int(relay.query("select count(*) from relay.events")[0][0])


def test_payloads_are_slices_of_the_body(relay: Instance) -> None:
    """B-6: array and NDJSON alike; each payload is stored as its very bytes, with its deliveries, in the order sent."""
    key = relay.key()
    endpoint = relay.endpoint(key, event_types=["a.*"])["id"]
    payloads = [
        b'{ "x":1.0, "x":"\xc3\xa9\\u00e9\\ud800" }',
        b"[1e400, 12345678901234567890123]",
        b'"s"',
        b"null",
        b"7",
    ]
    events = [
        b'{"type":"a.b","payload":%b}' % payloads[0],
        b' { "payload" : %b , "type":"z","idempotency_key":null } ' % payloads[1],
        b'{"t\\u0079pe":"a.c","expires_in":1.5,"payload":%b,"expires_in":null}' % payloads[2],
        b'{"type":"a.d","payload":%b,"expires_in":60}' % payloads[3],
        b'{"type":"a.e","payload":%b,"idempotency_key":"k"}' % payloads[4],
    ]
    assert fields_of(_batch(relay, key, b"[" + b",".join(events) + b"]")) == {"[2].expires_in": "duplicate"}
    events[2] = b'{"t\\u0079pe":"a.c","payload":%b}' % payloads[2]
    array = _batch(relay, key, b" [" + b",\n".join(events) + b"]\n")
    lines = _batch(relay, key, b"\n".join([*events[:4], b"", b"  "]) + b"\r\n", Content_Type="application/x-ndjson")
    assert (array.status_code, lines.status_code) == (202, 202), array.text + lines.text
    for answer, count in ((array.get_json(), 5), (lines.get_json(), 4)):
        assert answer["replayed"] == []
        assert [one["type"] for one in answer["events"]] == ["a.b", "z", "a.c", "a.d", "a.e"][:count]
        assert [len(one["deliveries"]) for one in answer["events"]] == [1, 0, 1, 1, 1][:count]
        assert answer["events"][0]["deliveries"][0]["endpoint_id"] == endpoint
        for one, payload in zip(answer["events"], payloads, strict=False):
            [row] = relay.query("select payload, content_type from relay.events where id = %s", one["id"])
            assert row == (payload, "application/json")
    expiring = relay.query(
        "select event_type, extract(epoch from expires_at - created_at)::int from relay.deliveries"
        " where expires_at is not null"
    )
    assert expiring == [("a.d", 60), ("a.d", 60)]


@pytest.mark.parametrize(
    ("body", "headers", "status", "fields"),
    [
        (b"[]", {}, 400, {"body": "empty_batch"}),
        (b"\n \n", {"Content_Type": "application/x-ndjson"}, 400, {"body": "empty_batch"}),
        (b'{"type":"a","payload":1}', {}, 400, {"body": "not_an_array"}),
        (b'[{"type":"a","payload":1},]', {}, 400, {"body": "invalid_json"}),
        (b'[{"type":"a","payload":1}', {}, 400, {"body": "invalid_json"}),
        (b'[{"type":"a","payload":NaN}]', {}, 400, {"body": "invalid_json"}),
        (b'[{"type":"a","payload":' + b"[" * 101 + b"]" * 101 + b"}]", {}, 400, {"body": "invalid_json"}),
        (b"[" * 20_000, {}, 400, {"body": "invalid_json"}),
        (b'{"type":"a",\n"payload":1}', {"Content_Type": "application/x-ndjson"}, 400, {"body": "invalid_json"}),
        (
            b'{"type":"a","payload":1} {"type":"a","payload":1}',
            {"Content_Type": "application/x-ndjson"},
            400,
            {"body": "invalid_json"},
        ),
        (
            b'[{"type":"a","payload":1},7,{"payload":1,"more":2},{"type":"a..b","payload":1},{"type":"relay.x"},'
            b'{"type":"a","payload":1,"idempotency_key":"a b","expires_in":0.5},'
            b'{"type":"a","payload":1,"idempotency_key":5,"expires_in":"60"}]',
            {},
            400,
            {
                "[1]": "not_an_object",
                "[2].more": "unknown_field",
                "[2].type": "required",
                "[3].type": "invalid_type",
                "[4].payload": "required",
                "[4].type": "reserved_type",
                "[5].idempotency_key": "invalid_idempotency_key",
                "[5].expires_in": "out_of_range",
                "[6].idempotency_key": "invalid_idempotency_key",
                "[6].expires_in": "invalid_seconds",
            },
        ),
        (
            b'[{"type":"a","payload":1},{"type":"a","payload":"' + b"x" * 1999 + b'"}]',
            {},
            413,
            {"[1].payload": "too_long"},
        ),
        (b"[" + b" " * 200_000 + b"]", {}, 413, {}),
        (b"[" + b",".join([b'{"type":"a","payload":1}'] * 1001) + b"]", {}, 400, {"body": "too_many_events"}),
        (b"[]", {"Idempotency_Key": "k"}, 400, {"Idempotency-Key": "unsupported_header"}),
        (
            b"[]",
            {"Relay_Event_Type": "k", "Relay_Expires_In": "5"},
            400,
            {"Relay-Event-Type": "unsupported_header", "Relay-Expires-In": "unsupported_header"},
        ),
        (b"[]", {"Content_Type": "text/plain"}, 415, {}),
    ],
)
def test_refusals_name_index_and_member(
    relay: Instance, body: bytes, headers: dict[str, str], status: int, fields: dict[str, str]
) -> None:
    """B-4, B-6: what is wrong is named by index and member, and nothing of the batch is stored."""
    answer = _batch(relay, relay.key(), body, **headers)
    assert (answer.status_code, fields_of(answer)) == (status, fields), answer.text
    assert _stored(relay) == 0


def test_a_full_batch(relay: Instance) -> None:
    """B-6: 1,000 events with keys, answered in order, in one transaction; sent again, all are replays."""
    key = relay.key()
    relay.endpoint(key)
    events = [{"type": "a", "payload": number, "idempotency_key": f"k{number}"} for number in range(1000)]
    first = _batch(relay, key, events)
    assert first.status_code == 202, first.text
    ids = [one["id"] for one in first.get_json()["events"]]
    rows = relay.query("select id::text, payload, xmin::text from relay.events")
    assert {row[0]: int(row[1]) for row in rows} == dict(zip(ids, range(1000), strict=True))
    assert len({row[2] for row in rows}) == 1
    again = _batch(relay, key, list(reversed(events))).get_json()
    assert [one["id"] for one in again["events"]] == list(reversed(ids))
    assert again["replayed"] == list(range(1000))
    assert relay.query("select count(*) from relay.deliveries") == [(1000,)]


def test_keys_within_a_batch(relay: Instance) -> None:
    """B-6, B-11, B-12: replays, equal keys within the batch, conflicts for all with their indexes, and single events
    with the same keys."""
    key = relay.key()
    single = relay.event(key, b'{"type":"a","n":1}', Idempotency_Key="old")
    old = {"type": "a", "payload": {"n": 1, "type": "a"}, "idempotency_key": "old"}
    new = {"type": "b", "payload": 2, "idempotency_key": "new"}
    plain = {"type": "c", "payload": 3}
    mixed = _batch(relay, key, [plain, new, old, new, plain]).get_json()
    assert mixed["replayed"] == [2, 3]
    assert mixed["events"][2] == single.get_json()
    assert mixed["events"][1] == mixed["events"][3]
    assert _stored(relay) == 4
    again = relay.event(key, b" 2 ", Idempotency_Key="new", Relay_Event_Type="b")
    assert (again.get_json(), again.headers["Relay-Idempotent-Replay"]) == (mixed["events"][1], "true")

    for batch, indexes in (
        ([plain, {**new, "payload": 9}, old, {**old, "type": "z"}], [3]),
        ([plain, {**new, "payload": 9}, plain, {**old, "type": "z"}], [1, 3]),
        (
            [{"type": "x", "payload": 1, "idempotency_key": "k"}, {"type": "x", "payload": 2, "idempotency_key": "k"}],
            [1],
        ),
    ):
        answer = _batch(relay, key, batch)
        assert (answer.status_code, answer.get_json()["indexes"]) == (409, indexes), answer.text
        assert fields_of(answer) == {f"[{index}].idempotency_key": "idempotency_key_reused" for index in indexes}
    assert _stored(relay) == 4
    relay.query("update relay.idempotency_keys set created_at = now() - interval '25 hours' where key = 'new'")
    freed = _batch(relay, key, [old, {**new, "payload": 9}, {**plain, "idempotency_key": "fresh"}])
    assert (freed.status_code, freed.get_json()["replayed"]) == (202, [0])
    assert _stored(relay) == 6


def test_batches_in_opposite_orders(relay: Instance) -> None:
    """B-11: batches with the same keys in different orders, at once, end in one event a key and no error."""
    key = relay.key()
    events = [{"type": "a", "payload": number, "idempotency_key": f"k{number}"} for number in range(60)]

    def send(number: int) -> tuple[int, frozenset[str]]:
        client = relay.client.application.test_client()
        rotated = events[number * 7 :] + events[: number * 7]
        batch = rotated if number % 2 else list(reversed(rotated))
        answer = client.post("/v1/events/batch", json=batch, headers=key)
        return answer.status_code, frozenset(one["id"] for one in (answer.json or {}).get("events", []))

    with ThreadPoolExecutor(6) as pool:
        answers = set(pool.map(send, range(6)))
    assert len(answers) == 1, answers
    [(status, ids)] = answers
    assert (status, len(ids), _stored(relay)) == (202, 60, 60)
