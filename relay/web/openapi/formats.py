"""Texts that have a form, as schemas: one place for what requests, parameters and answers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import WithJsonSchema

from relay.core.event_types import MAX_TYPE_LENGTH, TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ID: Final[Mapping[str, Any]] = {
    "type": "string",
    "format": "uuid",
    "examples": ["01890a5d-ac96-774b-bcce-b302099a8057"],
}
#: As answers write it. Requests may have any offset.
TIME: Final[Mapping[str, Any]] = {
    "type": "string",
    "format": "date-time",
    "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$",
    "examples": ["2026-01-31T12:00:00.000000Z"],
}
GIVEN_TIME: Final[Mapping[str, Any]] = {"type": "string", "format": "date-time"}
EVENT_TYPE: Final[Mapping[str, Any]] = {
    "type": "string",
    "pattern": f"^{TYPE.pattern}$",
    "maxLength": MAX_TYPE_LENGTH,
    "examples": ["order.paid"],
}
#: What endpoints subscribe with: a type, all of them, or those below one.
SUBSCRIPTION: Final[Mapping[str, Any]] = {
    "type": "string",
    "pattern": rf"^(?:\*|{TYPE.pattern}(?:\.\*)?)$",
    "maxLength": MAX_TYPE_LENGTH,
    "examples": ["order.*"],
}


def choice(words: Iterable[str]) -> dict[str, Any]:
    """Return the schema of a text that is one of these."""
    return {"type": "string", "enum": list(words)}


def shown(schema: Mapping[str, Any]) -> WithJsonSchema:
    """Have a type described by this schema."""
    return WithJsonSchema(dict(schema))


def nullable(schema: Mapping[str, Any]) -> WithJsonSchema:
    """Have a type described by this schema, or null."""
    found = {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        found["enum"] = [*schema["enum"], None]
    return WithJsonSchema(found)
