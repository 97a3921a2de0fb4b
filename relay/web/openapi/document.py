"""The document, put together from the app's routes, their gate, and the tables."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final

from relay import __version__
from relay.web.openapi import delivery_calls, endpoint_calls, event_calls, other_calls, parameters, refusals
from relay.web.openapi.formats import EVENT_TYPE, ID
from relay.web.openapi.headers import HEADERS
from relay.web.openapi.operation import Answer, Body, Operation, Page, Parameter
from relay.web.openapi.schemas import Schemas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flask import Flask
    from werkzeug.routing import Rule

    from relay.core.model import Scope
    from relay.web.auth import Gate

#: By the name that a route has in the app.
OPERATIONS: Final[Mapping[str, Operation]] = {
    **event_calls.OPERATIONS,
    **endpoint_calls.OPERATIONS,
    **delivery_calls.OPERATIONS,
    **other_calls.OPERATIONS,
}
_TAGS: Final = {
    "Events": "Taking events in, and reading them back.",
    "Event types": "A registry of types, for those who want one.",
    "Endpoints": "Where events go, and how.",
    "Deliveries": "What became of each event at each endpoint; sending again, and calling off.",
    "Jobs": "One request to any URL, without an endpoint.",
    "Keys and audit": "Who may do what in a workspace, and who did.",
    "Workspaces": "For the instance's key alone.",
    "Without a key": "For whoever asks.",
}
_ABOUT: Final = """Relay takes events in and delivers them to endpoints as webhooks.

JSON in and out. Times are RFC 3339 in UTC with microseconds, ids are UUIDs of version 7. Unknown fields are refused.
Every error is a problem (RFC 9457) with a stable `code`, a `detail` that says what to do, and `errors` naming each
field at fault."""
_KEY: Final = """`Authorization: Bearer rk_…`: a key of one workspace, in which everything happens. It has one or more of
the scopes `ingest`, `read`, `write` and `admin`, none of which includes another; each call names the scope it needs."""
_INSTANCE_KEY: Final = """`Authorization: Bearer …` with the instance's own key (RELAY_ADMIN_KEY). It makes workspaces,
and acts in the one that `Relay-Workspace` names, with every scope."""


def build(app: Flask, gate: Gate) -> dict[str, Any]:
    """Make the document of an app. Raises ValueError naming the routes that have no entry, and entries without a route."""
    rules = {rule.endpoint: rule for rule in app.url_map.iter_rules()}
    if strangers := sorted(set(rules) ^ set(OPERATIONS)):
        raise ValueError(f"described in relay/web/openapi or routed in the app, but not both: {', '.join(strangers)}")
    schemas = Schemas(_types())
    paths: dict[str, dict[str, Any]] = {}
    problems: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        rule, view = rules[name], app.view_functions[name]
        scopes, needs_workspace = gate.scopes_of(view), gate.needs_workspace(view)
        call = _Call(rule, operation, scopes, inspect.getdoc(view) or "", schemas)
        codes = refusals.codes_of(operation, scopes, named=bool(rule.arguments), needs_workspace=needs_workspace)
        problems |= {refusals.name_of(*one): refusals.response(*one) for one in codes.items()}
        paths.setdefault(call.path, {})[call.method] = call.described(codes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relay", "version": __version__, "description": _ABOUT, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": says} for name, says in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {**schemas.components, **refusals.SCHEMAS},
            "responses": dict(sorted(problems.items())),
            "headers": HEADERS,
            "parameters": {one.name: _parameter(one) for one in (parameters.WORKSPACE, parameters.REQUEST_ID)},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": _KEY},
                "instance_key": {"type": "http", "scheme": "bearer", "description": _INSTANCE_KEY},
            },
        },
    }


class _Call:
    """One call as the document tells of it."""

    def __init__(
        self, rule: Rule, operation: Operation, scopes: tuple[Scope, ...] | None, says: str, schemas: Schemas
    ) -> None:
        self.path = re.sub(r"<(\w+)>", r"{\1}", rule.rule)
        (self.method,) = (method.lower() for method in (rule.methods or set()) - {"HEAD", "OPTIONS"})
        self._rule = rule
        self._operation = operation
        self._scopes = scopes
        self._says = says
        self._schemas = schemas

    def described(self, problems: Mapping[int, list[str]]) -> dict[str, Any]:
        """Return the operation object of a call that can be refused with these codes."""
        operation = self._operation
        words = " ".join(self._says.split("\n\n")[0].split())
        # The clause before the first that says what comes of it.
        summary = re.split(r"[;:.](?: |$)", words, maxsplit=1)[0]
        found: dict[str, Any] = {
            "tags": [operation.tag],
            "operationId": self._rule.endpoint.partition(".")[2],
            "summary": summary,
            "description": "\n\n".join(part for part in (self._says, self._scope_words()) if part),
            "security": self._security(),
            "parameters": [*map(_path_parameter, sorted(self._rule.arguments)), *self._parameters()],
        }
        if operation.body is not None:
            found["requestBody"] = self._body(operation.body)
        answers = {str(status): self._answer(answer) for status, answer in operation.answers.items()}
        found["responses"] = answers | {
            str(status): {"$ref": f"#/components/responses/{refusals.name_of(status, codes)}"}
            for status, codes in problems.items()
        }
        return found

    def _parameters(self) -> Iterator[dict[str, Any]]:
        yield from map(_parameter, self._operation.parameters)
        if self._scopes:
            yield {"$ref": "#/components/parameters/Relay-Workspace"}
        yield {"$ref": "#/components/parameters/X-Request-Id"}

    def _scope_words(self) -> str:
        if self._scopes is None:
            return "Needs no key."
        if not self._scopes:
            return "Needs the instance's key."
        return f"Needs the scope {' or '.join(f'`{scope.value}`' for scope in self._scopes)}."

    def _security(self) -> list[dict[str, list[str]]]:
        if self._scopes is None:
            return []
        return [*({"key": [scope.value]} for scope in self._scopes), {"instance_key": []}]

    def _body(self, body: Body) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for media_type, one in body.content.items():
            content[media_type] = {"schema": self._schemas.of(one)}
            if media_type in body.examples:
                content[media_type]["example"] = body.examples[media_type]
        found: dict[str, Any] = {"required": body.required, "content": content}
        return {"description": body.says, **found} if body.says else found

    def _answer(self, answer: Answer) -> dict[str, Any]:
        headers = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *answer.headers)}
        found: dict[str, Any] = {"description": answer.says, "headers": headers}
        shape = answer.shape or answer.schema
        if shape is not None:
            found["content"] = {answer.media_type: {"schema": self._schemas.of(shape)}}
        return found


def _types() -> Iterator[type]:
    for operation in OPERATIONS.values():
        for answer in operation.answers.values():
            match answer.shape:
                case Page(of=shape):
                    yield shape
                case type():
                    yield answer.shape
        if operation.body is not None:
            yield from (one for one in operation.body.content.values() if isinstance(one, type))


def _path_parameter(name: str) -> dict[str, Any]:
    if name.endswith("_id"):
        schema, says = ID, f"The {name.removesuffix('_id').replace('_', ' ')}'s id."
    else:
        schema, says = EVENT_TYPE, "The event type."
    return {"name": name, "in": "path", "required": True, "description": says, "schema": schema}


def _parameter(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": one.where,
        "required": one.required,
        "description": one.says,
        "schema": one.schema,
    }
