"""Schemas made of the models that judge requests and the types that answers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, TypeAdapter

from relay.web.openapi.operation import Page
from relay.web.openapi.words import WITHIN, WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLACE: Final = "#/components/schemas/"


class Schemas:
    """The schemas of some types, by reference."""

    def __init__(self, types: Iterable[type]) -> None:
        """`types` are models and shapes, each of a name of its own."""
        adapters: list[tuple[type, Any, TypeAdapter[Any]]] = [
            # What a body may hold, and what an answer does hold: a default makes the two differ.
            (one, "validation" if issubclass(one, BaseModel) else "serialization", TypeAdapter(one))
            for one in dict.fromkeys(types)
        ]
        places, whole = TypeAdapter.json_schemas(adapters, ref_template=_PLACE + "{model}")
        self._of = {one: place for (one, _mode), place in places.items()}
        self.components: dict[str, Any] = {name: _plain(schema) for name, schema in sorted(whole["$defs"].items())}
        for one in dict.fromkeys(types):
            if issubclass(one, BaseModel):
                # A model's own words are the call's, which stand beside it.
                self.components[one.__name__].pop("description", None)
        for name, words in WORDS.items():
            _explain(self.components[name]["properties"], words)

    def of(self, shape: type | Page | Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of a type among these, of a page of such, or the schema itself."""
        if isinstance(shape, Page):
            return {
                "type": "object",
                "properties": {
                    "data": {"type": "array", "items": self.of(shape.of)},
                    "next_cursor": {
                        "type": ["string", "null"],
                        "description": "Send it as `cursor` for the next page; null after the last.",
                    },
                },
                "required": ["data", "next_cursor"],
                "additionalProperties": False,
            }
        return dict(self._of[shape]) if isinstance(shape, type) else dict(shape)


def _explain(properties: dict[str, dict[str, Any]], words: Mapping[str, str]) -> None:
    """Add what fields mean, where their schemas do not say it."""
    for name, schema in properties.items():
        if name in words:
            schema.setdefault("description", words[name])
        if name in WITHIN and "properties" in schema:
            _explain(schema["properties"], WITHIN[name])


def _plain(schema: Any) -> Any:
    """Return a schema without generated titles, closed, and with `null` as a type where that says the same."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        # Names of properties are no keywords.
        name: {of: _plain(one) for of, one in value.items()} if name == "properties" else _plain(value)
        for name, value in schema.items()
        if not (name == "title" and isinstance(value, str))
    }
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    match found.get("anyOf"):
        case [{"type": str(kind)} as one, {"type": "null"}]:
            del found["anyOf"]
            found = {**one, "type": [kind, "null"], **found}
            if "enum" in one:
                found["enum"] = [*one["enum"], None]
    return found
