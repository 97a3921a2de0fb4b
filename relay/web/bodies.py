"""Request bodies: read whole or not at all, never past the limit, never cut.

Flask's own limit is not used: for a body without a declared length it ends the stream there, without an error, and a
cut payload would pass for a whole one.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

from flask import request
from werkzeug.wsgi import get_content_length

from relay.core.errors import InvalidInput
from relay.core.jsontext import is_json, scan_event
from relay.web.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Bytes in the body of an administrative call: the largest endpoint fits several times.
MAX_OBJECT_BYTES = 131_072
#: The environment's member in which a server of ours holds the body: its bytes, or None while it is not all there.
HELD: Final = "relay.body"
#: Bytes that the JSON values begin with whose end shows.
_BOUNDED_JSON = b'{["tfn'
#: Digits of a whole number in such a body.
_MAX_DIGITS = 300


class BodyAwaited(BaseException):
    """The view needs the body, of `limit` bytes at most, which is not there: call it again when it is.

    No error, so that nothing answers it on its way to the server.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


def read(limit: int) -> bytes:
    """Read the request's body of at most `limit` bytes, whether its length is declared or it comes in chunks.

    A view reads it before it does anything that counts: a server that holds bodies may call it once without one, and
    this then raises BodyAwaited. Raises Problem: 413 for more, having read no more than one byte beyond; 415 for a
    compressed one; 400 where less came than was declared. A body in chunks that breaks off cannot be told from a whole
    one by every server: whether what came can be taken is for the caller to judge (see `is_measured`).
    """
    declared = request.content_length
    if HELD in request.environ:
        return read_held(request.environ, limit, declared=declared)
    _check_head(request.environ, limit, declared)
    pieces: list[bytes] = []
    room = limit + 1
    stream = request.stream
    while room > 0 and (piece := stream.read(room)):
        pieces.append(piece)
        room -= len(piece)
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(body) > limit:
        raise too_large(limit)
    if declared is not None and len(body) != declared:
        raise Problem(400, "incomplete_body", f"{len(body)} of {declared} bytes came: send the request again.")
    return body


def read_held(environ: Mapping[str, Any], limit: int, *, declared: int | None = None) -> bytes:
    """Return the body that the server holds, as `read` does: raises what that raises."""
    _check_head(environ, limit, declared)
    held: bytes | None = environ[HELD]
    if held is None:
        raise BodyAwaited(limit)
    if len(held) > limit:
        raise too_large(limit)
    return held


def too_large(limit: int) -> Problem:
    """Make the problem of a body of more than `limit` bytes."""
    return Problem(413, "payload_too_large", f"The body is larger than {limit} bytes: send less.")


def is_measured(environ: dict[str, Any]) -> bool:
    """Whether the body's end is known: its length is declared, or the server held it until it was whole.

    Else the end may be that of a broken connection.
    """
    return HELD in environ or get_content_length(environ) is not None


def shows_its_end(json_body: bytes) -> bool:
    """Whether a JSON text is of those values whose end shows, so that a cut one is no JSON. A number's does not."""
    return json_body.lstrip()[:1] in _BOUNDED_JSON


def read_object() -> dict[str, Any]:
    """Read the JSON object that an administrative call takes: at most `MAX_OBJECT_BYTES`, no member named twice.

    Strings come out fit for Postgres (no U+0000, no lone surrogate), numbers finite. A missing Content-Type is taken
    for JSON. Raises Problem as `read` does, and for another type of body; InvalidInput and InvalidJson otherwise.
    """
    content_type = request.headers.get("Content-Type")
    if content_type is not None and not is_json(content_type):
        raise Problem(
            415,
            "unsupported_media_type",
            "This call takes JSON: send Content-Type: application/json (curl sends another unless told).",
        )
    body = read(MAX_OBJECT_BYTES)
    scan_event(body, read_type=False)
    value = json.loads(body, object_pairs_hook=_members, parse_int=_whole)
    if not isinstance(value, dict):
        raise InvalidInput("The body is not a JSON object: send one, such as {}.", field="body", code="not_an_object")
    _check(value, "")
    return value


def _check_head(environ: Mapping[str, Any], limit: int, declared: int | None) -> None:
    encoding = environ.get("HTTP_CONTENT_ENCODING")
    if encoding and encoding.strip().lower() != "identity":
        raise Problem(415, "unsupported_encoding", "Compressed bodies are not taken: send it without Content-Encoding.")
    if declared is not None and declared > limit:
        raise too_large(limit)


def _members(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for name, member in pairs:
        if name in value:
            raise InvalidInput("A member occurs twice in one object: keep one.", field=_shown(name), code="duplicate")
        value[name] = member
    return value


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise InvalidInput(f"A number has more than {_MAX_DIGITS} digits: shorten it.", field="body", code="too_long")
    return int(digits)


def _check(value: object, path: str) -> None:
    """Refuse what Postgres cannot store in text and jsonb. As deep as the scan let it be."""
    if isinstance(value, dict):
        for name, member in value.items():
            _check_text(name, path)
            _check(member, f"{path}.{_shown(name)}" if path else _shown(name))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            _check(member, f"{path}[{index}]")
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse("The number is beyond what a double holds: make it smaller.", path)


def _check_text(text: str, path: str) -> None:
    if not text.isascii() or "\0" in text:
        if "\0" in text:
            _refuse("The text has the character U+0000 in it: remove it.", path)
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse("The text has half a surrogate pair in it: write the whole character.", path)


def _refuse(message: str, path: str) -> NoReturn:
    raise InvalidInput(message, field=path or "body", code="invalid_text")


def _shown(name: str) -> str:
    """A member's name as a path has it: bounded, and plain where it is odd."""
    return name[:80].encode("ascii", "backslashreplace").decode()
