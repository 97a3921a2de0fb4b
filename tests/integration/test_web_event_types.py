"""The registry of event types: what it takes, what it refuses, and what it enforces at ingest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.hostile import wait_until
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

SCHEMA = {
    "type": "object",
    "required": ["amount"],
    "properties": {"amount": {"type": "integer"}, "items": {"items": {"properties": {"sku": {"pattern": "^[A-Z]+$"}}}}},
}


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


def _put(relay: Instance, key: dict[str, str], name: str, **body: Any) -> TestResponse:
    return relay.client.put(f"/v1/event-types/{name}", json=body, headers=key)


def test_register_read_and_delete(relay: Instance) -> None:
    """PUT makes a type and replaces it whole, GET reads it, DELETE removes it; each change is in the audit log; another
    workspace sees none of it."""
    key = relay.key()
    made = _put(relay, key, "order.paid", description="Paid.", json_schema=SCHEMA)
    assert (made.status_code, made.get_json()["json_schema"]) == (201, SCHEMA)
    assert _put(relay, key, "a").status_code == 201
    listed = relay.client.get("/v1/event-types", headers=key).get_json()
    assert [(one["name"], one["has_schema"]) for one in listed["data"]] == [("a", False), ("order.paid", True)]
    replaced = _put(relay, key, "order.paid", description="Paid!")
    assert (replaced.status_code, replaced.get_json()["json_schema"]) == (200, None)
    assert relay.client.get("/v1/event-types/order.paid", headers=key).get_json() == replaced.get_json()
    relay.workspace("other")
    stranger = relay.key("other")
    assert relay.client.get("/v1/event-types", headers=stranger).get_json()["data"] == []
    for call in (relay.client.get, relay.client.delete):
        assert call("/v1/event-types/order.paid", headers=stranger).status_code == 404
    assert relay.client.get("/v1/event-types", headers=relay.key(scopes=("read",))).status_code == 403
    removed = relay.client.delete("/v1/event-types/order.paid", headers=key)
    assert (removed.status_code, removed.data, "Content-Type" in removed.headers) == (204, b"", False)
    for path in ("order.paid", "no..type", "x" * 200):
        assert relay.client.delete(f"/v1/event-types/{path}", headers=key).status_code == 404
        assert relay.client.get(f"/v1/event-types/{path}", headers=key).status_code == 404
    actions = relay.query("select action from relay.audit_log where target = 'event_type:order.paid' order by at")
    assert [row[0] for row in actions] == ["event_type.created", "event_type.changed", "event_type.deleted"]


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("relay.x", {}, "name"),
        ("a..b", {}, "name"),
        ("a", {"json_schema": []}, "json_schema"),
        ("a", {"json_schema": {"properties": {"x": {"type": 3}}}}, "json_schema.properties.x.type"),
        ("a", {"json_schema": {"$defs": {"x": {"$ref": "https://example.com/s"}}}}, "json_schema.$defs.x.$ref"),
        ("a", {"json_schema": {"properties": {"x": {"pattern": "(?=x)"}}}}, "json_schema.properties.x.pattern"),
        ("a", {"more": 1}, "more"),
    ],
)
def test_refusals(relay: Instance, name: str, body: dict[str, Any], field: str) -> None:
    """Reserved names, schemas that are none, remote references and unsafe patterns are 400 with the place."""
    answer = _put(relay, relay.key(), name, **body)
    assert (answer.status_code, list(fields_of(answer))) == (400, [field]), answer.text
    assert relay.query("select count(*) from relay.event_types") == [(0,)]


def test_payloads_are_checked(relay: Instance) -> None:
    """A registered type's payload must meet its schema, alone and in a batch: 422 names the places, nothing is stored;
    other types are free; a change holds within a second."""
    key = relay.key()
    assert _put(relay, key, "order.paid", json_schema=SCHEMA).status_code == 201
    assert _put(relay, key, "free").status_code == 201
    key = relay.key()
    bad = relay.event(key, b'{"type":"order.paid","amount":"7","items":[{"sku":"A"},{"sku":"b"}]}')
    assert (bad.status_code, bad.get_json()["code"]) == (422, "schema_mismatch")
    assert fields_of(bad) == {"$.amount": "type", "$.items[1].sku": "pattern"}
    text = relay.event(key, b"x", Relay_Event_Type="order.paid", Content_Type="text/plain")
    assert (text.status_code, fields_of(text)) == (422, {"Content-Type": "not_json"})
    batch = [{"type": "free", "payload": {}}, {"type": "order.paid", "payload": {"amount": 1.5}}]
    mixed = relay.client.post("/v1/events/batch", json=batch, headers=key)
    assert (mixed.status_code, fields_of(mixed)) == (422, {"[1].payload.amount": "type"})
    assert relay.query("select count(*) from relay.events") == [(0,)]
    for good in (b'{"type":"order.paid","amount":7}', b'{"type":"free"}', b'{"type":"never.registered"}'):
        assert relay.event(key, good).status_code == 202

    assert _put(relay, key, "order.paid", json_schema={**SCHEMA, "required": ["amount", "tax"]}).status_code == 200
    wait_until(lambda: relay.event(key, b'{"type":"order.paid","amount":7}').status_code == 422, patience=3)
    assert relay.client.delete("/v1/event-types/order.paid", headers=key).status_code == 204
    wait_until(lambda: relay.event(key, b'{"type":"order.paid"}').status_code == 202, patience=3)


def test_a_hostile_schema_stalls_nothing(relay: Instance) -> None:
    """A schema that branches on every level of the payload ends in a 422, after a bounded time."""
    key = relay.key()
    node = {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]}
    assert _put(relay, key, "x", json_schema=node).status_code == 201
    payload: dict[str, Any] = {}
    for _ in range(60):
        payload = {"a": payload}
    answer = relay.event(relay.key(), json.dumps(payload).encode(), Relay_Event_Type="x")
    assert (answer.status_code, fields_of(answer)) == (422, {"$": "too_costly"})
