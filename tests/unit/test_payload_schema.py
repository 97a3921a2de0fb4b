"""Schemas of payloads: what is taken, what is refused with its place, and that none of them stalls a process."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from relay.core.errors import InvalidInput
from relay.core.payload_schema import MAX_CHECK_SECS, MAX_SCHEMA_BYTES, PayloadSchema, check_schema


def _faults(schema: Any, payload: Any) -> list[tuple[str, str]]:
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return [(one.path, one.code) for one in PayloadSchema(schema).violations(raw, time.thread_time)]


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"},
        {"$id": "https://example.com/order", "$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"properties": {"children": {"items": {"$ref": "#"}}}},
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}},
        {"pattern": r"^\d{3}-[a-z]+$", "patternProperties": {"^x-": {}}},
    ],
)
def test_good_schemas(schema: Any) -> None:
    """Schemas of the draft that keep to themselves are taken."""
    check_schema(schema, time.thread_time)


def _nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _doubling(levels: int) -> Any:
    definitions: dict[str, Any] = {"n0": {"type": "string"}}
    for level in range(1, levels):
        definitions[f"n{level}"] = {"allOf": [{"$ref": f"#/$defs/n{level - 1}"}] * 2}
    return {"$ref": f"#/$defs/n{levels - 1}", "$defs": definitions}


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ([], "json_schema"),
        ("object", "json_schema"),
        ({"type": "objec"}, "json_schema.type"),
        ({"properties": {"a": {"minimum": "1"}}}, "json_schema.properties.a.minimum"),
        ({"required": [{"a": number} for number in range(4000)]}, "json_schema.required[0]"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, "json_schema"),
        (_nested(40), "json_schema"),
        (_doubling(40), "json_schema"),
        ({"$ref": "#"}, "json_schema"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#"}}}}, "json_schema"),
        ({"$ref": "#/$defs/none"}, "json_schema.$ref"),
        ({"items": {"$ref": "https://example.com/schema"}}, "json_schema.items.$ref"),
        ({"items": {"$dynamicRef": "other.json#x"}}, "json_schema.items.$dynamicRef"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "json_schema.$schema"),
        ({"items": {"$id": "https://example.com/x"}}, "json_schema.items.$id"),
        ({"anyOf": [{}, {"unevaluatedProperties": False}]}, "json_schema.anyOf[1].unevaluatedProperties"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "json_schema.properties.a.pattern"),
        ({"properties": {"a": {"pattern": "a" * 501}}}, "json_schema.properties.a.pattern"),
        ({"patternProperties": {r"(a)\1": {}}}, r"json_schema.patternProperties.(a)\1"),
    ],
)
def test_bad_schemas(schema: Any, field: str) -> None:
    """What is no schema, reaches out, goes in circles or branches without end is refused, and the place is named."""
    with pytest.raises(InvalidInput) as error:
        check_schema(schema, time.thread_time)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("schema", "payload", "faults"),
    [
        (True, b"1e400", []),
        (False, 1, [("", "schema")]),
        ({"type": "integer"}, 1.0, []),
        ({"type": "integer"}, b"1" * 900, []),
        ({"type": "integer"}, b"1" * 1001, [("", "incomparable_number")]),
        ({"multipleOf": 0.01}, b"1e400", [("", "incomparable_number")]),
        ({"required": ["a", "b"]}, {"a": 1}, [("", "required")]),
        ({"properties": {"a": {"items": {"maximum": 3}}}}, {"a": [1, 4, 5]}, [(".a[1]", "maximum"), (".a[2]", "maximum")]),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, [("", "additionalProperties")]),
        ({"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "string"}},
         {"x1": 1, "y": 2}, [(".x1", "type"), (".y", "type")]),
        ({"uniqueItems": True}, [1, True, "1", [1], [True], {"a": 1}, {"a": True}, None], []),
        ({"uniqueItems": True}, [{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], [("", "uniqueItems")]),
        ({"pattern": "^é+$"}, "éé", []),
        ({"pattern": "x"}, b'"\\ud800"', [("", "pattern")]),
        ({"format": "email"}, "no address", []),
        ({"oneOf": [{"type": "string"}, {"minimum": 5}]}, 7, []),
        ({"items": {"type": "string"}}, list(range(30)), [(f"[{number}]", "type") for number in range(10)]),
        ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}}},
         {"a": "a" * 40 + "b"}, [(".a", "pattern")]),
    ],
)  # fmt: skip
def test_payloads(schema: Any, payload: Any, faults: list[tuple[str, str]]) -> None:
    """Violations are named by their place and keyword, up to ten of them."""
    assert _faults(schema, payload) == faults


@pytest.mark.parametrize("amount", ["19.99", "4.35", "0.07", "1.15", "8.2", "0.29", "1e2", "12345678.91", "-3", "0"])
def test_multiples_are_of_the_decimals_as_spelled(amount: str) -> None:
    """Prices are multiples of a cent, though the doubles nearest to them are none; what is none stays one."""
    assert _faults({"multipleOf": 0.01}, amount.encode()) == []
    assert [code for _, code in _faults({"multipleOf": 0.01}, b"0.015")] == ["multipleOf"]
    assert _faults({"multipleOf": 0.01}, b"1e400") != []


def test_messages_are_short() -> None:
    """A violation's text is bounded, and holds none of the payload."""
    schema = PayloadSchema({"enum": ["y" * 5000], "properties": {"a": {"type": "string"}}})
    for one in schema.violations(b'{"a":["secret"]}', time.thread_time):
        assert len(one.message) <= 200
        assert "secret" not in one.message


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"pattern": "^(a+)+$"}, b'"' + b"a" * 250_000 + b'b"'),
        ({"uniqueItems": True}, b"[" + b",".join(b'{"a":%d}' % number for number in range(25_000)) + b"]"),
        ({"allOf": [{"items": {}}] * 5000}, b"[" + b",".join([b"1"] * 100_000) + b"]"),
        (_doubling(60), b"1"),
        ({"allOf": [{"properties": {"a": {"$ref": "#"}}}] * 2}, b'{"a":' * 99 + b"1" + b"}" * 99),
        ({"properties": {"a": {"allOf": [{"$ref": "#"}]}}}, b'{"a":' * 99 + b"1" + b"}" * 99),
    ],
)
def test_no_payload_takes_long(schema: Any, payload: bytes) -> None:
    """Whatever schema and payload come together, an answer comes about when the time for it is over."""
    began = time.thread_time()
    _faults(schema, payload)
    assert time.thread_time() - began < 20 * MAX_CHECK_SECS
