"""JSON judged as text: the payload stays the bytes that came, and only what routing reads is looked at.

The standard library's scanner does the work in C, with its additions to JSON
(NaN, a byte order mark, any depth until the stack ends) taken away again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from relay.core.errors import InvalidInput, InvalidJson

if TYPE_CHECKING:
    from collections.abc import Callable

#: Arrays and objects inside one another. Well below what Python's own recursion limit stands.
MAX_DEPTH = 100

#: RFC 8259 section 2; `str.strip` alone would take Unicode's spaces too.
_WHITE_SPACE = " \t\n\r"
_BOM = "\ufeff"
# A string's closing quote is optional in both patterns, and nothing backtracks, so that a text
# with one quote missing is read once: else each escaped quote in it would be tried as a start.
_STRING = r'"(?:[^"\\]++|\\.)*+"?'
#: Everything up to and with the next bracket that is not in a string, or the end: without that
#: alternative, what follows the last bracket would be read anew from each of its characters.
_BRACKET = re.compile(rf'[^][{{}}"]*+(?:{_STRING}[^][{{}}"]*+)*+([][{{}}]|\Z)', re.DOTALL)
#: For bytes.translate: braces as brackets, and all that is neither these nor quotes.
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_STRING_OR_CONSTANT = re.compile(rf"{_STRING}|(-?Infinity|NaN)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventText:
    """What routing needs of a body."""

    #: The top-level `type`, as spelled and not yet judged; None where the body has none.
    type: str | None


def scan_event(body: bytes, *, max_depth: int = MAX_DEPTH, read_type: bool = True) -> EventText:
    """Check that `body` is one JSON text (RFC 8259) in UTF-8 and find its top-level `type`.

    Any JSON value will do; only an object has a type. Numbers are not converted, so
    their size does not matter; duplicate keys, lone surrogates written as escapes and
    `\\u0000` are left alone. With `read_type` false (the type is known from elsewhere)
    a member called `type` is not looked at and the result's is None.

    Raises InvalidJson with the place: for bad UTF-8, a byte order mark, NaN and
    Infinity, nesting over `max_depth`, an empty body, and anything after the value.
    Raises InvalidInput with field `type` where `type` is not a string (code
    `invalid_type`) or occurs twice, however its letters are escaped (`duplicate_type`).
    """
    text = decode(body)
    # Brackets in strings count here too: the count is only a bound that spares most bodies the scan.
    if body.count(b"[") + body.count(b"{") > max_depth:
        check_depth(text, max_depth)
    start = len(text) - len(text.lstrip(_WHITE_SPACE))
    value, end = _value(text, start)
    if end != len(text) and (rest := text[end:].lstrip(_WHITE_SPACE)):
        raise invalid_at(_explain(text, "Something follows the value"), text, len(text) - len(rest))
    if not read_type or type(value) is not _Members:
        return EventText(type=None)
    types = [member for key, member in value if key == "type"]
    if not types:
        return EventText(type=None)
    if len(types) > 1:
        raise InvalidInput(
            'The body has more than one top-level "type", and receivers would differ on which counts: keep one.',
            field="type",
            code="duplicate_type",
        )
    if type(types[0]) is not str:
        raise InvalidInput(
            'The body\'s "type" is not a string: make it one, or name the type in the Relay-Event-Type header.',
            field="type",
            code="invalid_type",
        )
    return EventText(type=types[0])


def is_json(content_type: str) -> bool:
    """Whether a Content-Type is JSON's: `application/json`, or any with the suffix `+json` (RFC 6839)."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def decode(body: bytes) -> str:
    """Return the body as text; InvalidJson with the place where it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        before = body[: error.start].decode()
        raise invalid_at("The body is not UTF-8: send JSON encoded as UTF-8", before, len(before)) from None


def check_depth(text: str, max_depth: int) -> None:
    """Raise InvalidJson where the nesting passes `max_depth`. Brackets that do not match are left to the scanner."""
    if _is_shallow(text, max_depth):
        return
    depth = 0
    for index, bracket in enumerate(_BRACKET.findall(text)):
        if bracket not in ("[", "{"):
            depth -= 1
        elif depth < max_depth:
            depth += 1
        else:
            position = next(m.start(1) for i, m in enumerate(_BRACKET.finditer(text)) if i == index)
            raise invalid_at(f"The body nests more than {max_depth} levels deep: flatten it", text, position)


def _is_shallow(text: str, max_depth: int) -> bool:
    """Whether the nesting surely stays within `max_depth`: a few passes in C, that most texts need no look beyond.

    What is left of strings without brackets, when all but quotes and brackets is dropped, are pairs of quotes; and
    with these gone, each pass takes the innermost brackets away. Escapes and brackets in strings end it: then a quote
    could be misread, or is left over.
    """
    if "\\" in text:
        return False
    rest = text.encode().translate(_ONE_KIND, _NO_BRACKETS).replace(b'""', b"")
    for _ in range(max_depth):
        if not rest:
            return True
        before, rest = rest, rest.replace(b"[]", b"")
        if len(rest) == len(before):
            return False
    return not rest


def value_end(text: str, start: int) -> int:
    """Return where the JSON value ends that begins at `start`, in characters; InvalidJson where there is none.

    The depth of `text` must have been checked: the scanner calls itself.
    """
    return _value(text, start)[1]


def invalid_at(message: str, text: str, position: int) -> InvalidJson:
    """Build the error for a place in the text, counted in characters."""
    before = text[:position]
    return InvalidJson(
        message,
        position=len(before.encode()),
        line=before.count("\n") + 1,
        column=position - before.rfind("\n"),
    )


class _ConstantError(Exception):
    """The scanner met NaN or Infinity; it does not say where."""


def _refuse_constant(_spelling: str) -> NoReturn:
    raise _ConstantError


# Numbers become booleans: cheap, never a str, and without Python's limit on the digits of an int.
# Objects become iterators over their members, duplicates included, which no other value becomes.
# `scan_once` is what `decode` calls, without its two searches for white space.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(
    object_pairs_hook=iter,
    parse_int=bool,
    parse_float=bool,
    parse_constant=_refuse_constant,
).scan_once  # type: ignore[attr-defined]  # missing from the stubs
_Members: type[Any] = type(iter([]))


def _value(text: str, start: int) -> tuple[Any, int]:
    try:
        return _scan(text, start)
    except StopIteration as error:
        raise invalid_at(_explain(text, "Expecting value"), text, error.value) from None
    except json.JSONDecodeError as error:
        raise invalid_at(_explain(text, error.msg), text, error.pos) from None
    except _ConstantError:
        position = next(m.start() for m in _STRING_OR_CONSTANT.finditer(text, start) if m.group(1) is not None)
        raise invalid_at(
            "The body is not JSON: NaN and Infinity are not JSON numbers, use null or a string", text, position
        ) from None


def _explain(text: str, reason: str) -> str:
    if not text:
        return "The body is empty: send a JSON value"
    if text.startswith(_BOM):
        return "The body begins with a byte order mark: leave it out"
    reason = reason.removesuffix(" at")
    return f"The body is not JSON: {reason[0].lower()}{reason[1:]}"
