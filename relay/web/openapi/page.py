"""The document as a page shows it: calls by tag, each with what to send for it and what comes back."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, its references followed."""

    name: str
    method: str
    path: str
    summary: str
    #: Paragraphs, in which backticks mark code.
    description: list[str]
    parameters: list[Mapping[str, Any]]
    body: Mapping[str, Any] | None
    #: By status.
    answers: dict[str, Mapping[str, Any]]
    #: A command for a shell.
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The calls of a tag."""

    name: str
    description: str
    calls: list[Call]


class Page:
    """What a template needs."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.version: str = document["info"]["version"]
        self.about = _paragraphs(document["info"]["description"])
        self.keys: Mapping[str, Any] = document["components"]["securitySchemes"]
        self.schemas: Mapping[str, Any] = document["components"]["schemas"]
        calls = list(self._calls())
        self.groups = [
            Group(
                name=tag["name"],
                description=tag["description"],
                calls=[call for name, call in calls if name == tag["name"]],
            )
            for tag in document["tags"]
        ]

    def follow(self, one: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a reference to a parameter or an answer leads to; anything else as it is."""
        ref = one.get("$ref")
        if ref is None:
            return one
        _, _, kind, name = ref.split("/", 3)
        found: Mapping[str, Any] = self.document["components"][kind][name]
        return found

    def _calls(self) -> Iterator[tuple[str, Call]]:
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield (
                    operation["tags"][0],
                    Call(
                        name=operation["operationId"],
                        method=method.upper(),
                        path=path,
                        summary=operation["summary"],
                        description=_paragraphs(operation["description"]),
                        parameters=[self.follow(one) for one in operation["parameters"]],
                        body=operation.get("requestBody"),
                        answers={status: self.follow(one) for status, one in operation["responses"].items()},
                        example=_command(method, path, operation),
                    ),
                )


def schema_name(ref: str) -> str:
    """Return the name of the schema that a reference leads to."""
    return ref.rpartition("/")[2]


def bounds(schema: Mapping[str, Any]) -> list[str]:
    """Say what a schema asks for beside the type, briefly."""
    said = []
    for keyword, words in _BOUNDS.items():
        # A format says the same as its pattern, for people.
        if keyword in schema and not (keyword == "pattern" and "format" in schema):
            said.append(words.format(schema[keyword]))
    if "default" in schema:
        said.append(f"default {json.dumps(schema['default'], ensure_ascii=False)}")
    return said


_BOUNDS: Final = {
    "const": "always {}",
    "format": "{}",
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}


def _paragraphs(text: str) -> list[str]:
    return [" ".join(one.split()) for one in text.split("\n\n")]


def _command(method: str, path: str, operation: Mapping[str, Any]) -> str:
    """Return the call as curl makes it."""
    words = ["curl", "-s"]
    body = operation.get("requestBody", {})
    examples = [(kind, one["example"]) for kind, one in body.get("content", {}).items() if "example" in one]
    usual = "POST" if examples else "GET"
    if method.upper() != usual:
        words += ["-X", method.upper()]
    words.append(f'"$RELAY_URL{path}"' if "{" in path else f"$RELAY_URL{path}")
    if operation["security"]:
        is_instances = [*operation["security"][0]] == ["instance_key"]
        words += ["-H", f'"Authorization: Bearer ${"RELAY_ADMIN_KEY" if is_instances else "RELAY_API_KEY"}"']
    for one in operation["parameters"]:
        if one.get("required") and one["in"] == "header":
            words += ["-H", shlex.quote(f"{one['name']}: {one['schema']['examples'][0]}")]
    if examples:
        kind, example = examples[0]
        words += ["-H", f"'Content-Type: {kind}'", "-d", shlex.quote(json.dumps(example))]
    return " ".join(words)
