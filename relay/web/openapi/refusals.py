"""Problems: their one shape, and which codes a call can be refused with for its path, its key and its body."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from relay.web.openapi.headers import OF_PROBLEMS
from relay.web.problems import MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.core.model import Scope
    from relay.web.openapi.operation import Operation

_FIELD_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "One field, header or parameter at fault.",
    "properties": {
        "field": {"type": "string", "examples": ["event_types[2]"]},
        "message": {"type": "string"},
        "code": {"type": "string"},
    },
    "required": ["field", "message", "code"],
    "additionalProperties": False,
}
_PROBLEM: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "RFC 9457: `code` is stable and for programs, `detail` says what to do.",
    "properties": {
        "type": {"type": "string", "enum": ["about:blank"]},
        "title": {"type": "string"},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "code": {"type": "string", "pattern": "^[a-z_]+$"},
        "detail": {"type": "string", "minLength": 1},
        "errors": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/FieldError"}},
        "missing_scope": {"type": "string", "description": "Of `missing_scope`."},
        "position": {"type": "integer", "minimum": 0, "description": "Of `invalid_json`: bytes before the fault."},
        "line": {"type": "integer", "minimum": 1, "description": "Of `invalid_json`."},
        "column": {"type": "integer", "minimum": 1, "description": "Of `invalid_json`."},
        "indexes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "description": "Of `idempotency_key_reused` for a batch: the events whose keys were used.",
        },
        "replay_id": {"type": "string", "format": "uuid", "description": "Of `replay_unfinished`."},
        "checks": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Of `not_ready`.",
        },
    },
    "required": ["type", "title", "status", "code", "detail"],
    "additionalProperties": False,
}
SCHEMAS: Final[Mapping[str, Mapping[str, Any]]] = {"Problem": _PROBLEM, "FieldError": _FIELD_ERROR}

#: Of the server itself, whatever the call.
_ALWAYS: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("bad_request",),
    408: ("request_timeout",),
    414: ("uri_too_long",),
    431: ("headers_too_large",),
    500: ("internal_error",),
    503: ("busy", "stopping", "unavailable"),
}
_OF_BODIES: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("incomplete_body", "invalid_json", "invalid_request"),
    413: ("payload_too_large",),
    415: ("unsupported_encoding", "unsupported_media_type"),
}


def codes_of(
    operation: Operation, scopes: tuple[Scope, ...] | None, *, named: bool, needs_workspace: bool
) -> dict[int, list[str]]:
    """Return the codes that a call can be refused with, by status.

    `scopes` as `Gate.scopes_of` has them; `named` where the path has a name or id in it; `needs_workspace` as the gate
    has that, too.
    """
    found: dict[int, set[str]] = {}
    sources: list[Mapping[int, tuple[str, ...]]] = [_ALWAYS, operation.problems]
    if scopes:
        sources.append(
            {
                400: ("workspace_required",) if needs_workspace else (),
                401: ("unauthorized",),
                403: ("missing_scope", "other_workspace"),
                404: ("unknown_workspace",),
            }
        )
    elif scopes is not None:
        sources.append({401: ("unauthorized",), 403: ("instance_key_only",)})
    if scopes is not None or operation.stored:
        sources.append({503: ("database_unavailable",)})
    if named:
        # A name with a slash in it leads to another path.
        sources.append({404: ("not_found",)})
    if operation.body is not None:
        sources.append(_OF_BODIES)
    if any(parameter.where == "query" or parameter.schema for parameter in operation.parameters):
        sources.append({400: ("invalid_request",)})
    for source in sources:
        for status, codes in source.items():
            found.setdefault(status, set()).update(codes)
    return {status: sorted(found[status]) for status in sorted(found)}


def name_of(status: int, codes: list[str]) -> str:
    """Return the name of the answer of a status with these codes: calls that are refused alike share it."""
    return ".".join([str(status), *codes])


def response(status: int, codes: list[str]) -> dict[str, Any]:
    """Describe the answer of a status with these codes."""
    headers = ("X-Request-Id", *OF_PROBLEMS.get(status, ()))
    return {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(f'`{code}`' for code in codes)}.",
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers},
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "$ref": "#/components/schemas/Problem",
                    "properties": {"status": {"const": status}, "code": {"enum": codes}},
                }
            }
        },
    }
