"""Headers of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEXT: Final = {"type": "string"}

#: By name: what each is. `X-Request-Id` comes with every answer.
HEADERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "X-Request-Id": {
        "description": "The request's id: the caller's own, or one that was made.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    },
    "Location": {"description": "Where to read it.", "required": True, "schema": {"type": "string", "pattern": "^/"}},
    "Relay-Idempotent-Replay": {
        "description": "There where the answer is that of an earlier request with the same Idempotency-Key.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "Retry-After": {
        "description": "Seconds to wait before the request is sent again.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[1-9][0-9]*$"},
    },
    "WWW-Authenticate": {
        "description": "The challenge of RFC 6750.",
        "required": True,
        "schema": {"type": "string", "pattern": "^Bearer "},
    },
    "Content-Disposition": {"description": "A file to save.", "required": True, "schema": _TEXT},
    "Content-Security-Policy": {"description": "Keeps a browser from running it.", "required": True, "schema": _TEXT},
    "Cache-Control": {"description": "For how long it may be kept.", "required": True, "schema": _TEXT},
    "ETag": {"description": "Names this text of it.", "required": True, "schema": _TEXT},
}
#: What problems of a status come with.
OF_PROBLEMS: Final[Mapping[int, tuple[str, ...]]] = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}
