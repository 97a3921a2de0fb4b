"""Payloads as text that a person can read in a chat, cut where the platform's limit is.

A payload is anybody's: it may be huge, deep, binary, or made to look like something else. So the work is bounded by
the room there is, no number is converted, and nothing here raises.
"""

from __future__ import annotations

import bisect
import codecs
import json
import re
import unicodedata
from typing import TYPE_CHECKING

from relay.core.jsontext import is_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Bytes of payload that are looked at for each unit of room: `\u0041` is six for one. White space can need more.
_BYTES_PER_UNIT = 8
#: Levels that are written one item a line. What lies deeper stands on its line, or indentation would fill the room.
_INDENTED_LEVELS = 5
#: Code points of one character that are kept together; a longer pile of marks is cut within.
_LONGEST_CHARACTER = 64

_PIECE = re.compile(r'[ \t\r\n]++|"(?:[^"\\]++|\\.)*+"?|[][{},:]|[^][{},:" \t\r\n]++', re.DOTALL)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
#: Controls, and the marks that turn the direction of what follows: a chat would show another text than there is.
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")

_ZWNJ, _ZWJ = "\u200c", "\u200d"


def render(payload: bytes, content_type: str, *, room: int, escapes: Mapping[int, str] | None = None) -> str:
    """Write a payload as text of at most `room` UTF-16 code units, each character escaped as `escapes` says.

    JSON is indented, its strings' escapes decoded; other text stays as it is; binary is summed up in a line. What does
    not fit is cut between two characters and says so in its last line. A cut never divides an escape.
    """
    text, whole = _readable(payload, content_type, room)
    text = text.rstrip()
    escapes = escapes or {}
    end = _fitting(text, room, escapes)
    if whole and end == len(text):
        return text.translate(escapes)
    note = f"\n… (cut: the payload has {len(payload)} bytes)"
    end = _boundary(text, _fitting(text, max(room - utf16_units(note.translate(escapes)), 0), escapes))
    return text[:end].rstrip().translate(escapes) + note.translate(escapes)


def utf16_units(text: str) -> int:
    """The length as the platforms' clients count it: 2 for what lies beyond the basic plane.

    Never less than a count of characters, so what keeps to a limit by this keeps to it by either.
    """
    return len(text.encode("utf-16-le")) // 2


def _readable(payload: bytes, content_type: str, room: int) -> tuple[str, bool]:
    """The text of a payload, at least so far as there is room for, and whether that is all of it."""
    most = _BYTES_PER_UNIT * room
    whole = len(payload) <= most
    try:
        # Not final: a character that the bound has cut is left out, not taken for an error.
        text = codecs.getincrementaldecoder("utf-8")().decode(payload[:most], final=whole)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return f"({len(payload)} bytes of {_shown(content_type)[:100]}, not text)", True
    if not is_json(content_type):
        return _shown(text.replace("\r\n", "\n")), whole
    written: list[str] = []
    length = 0
    for piece in _indented(text):
        if length > room:
            return "".join(written), False
        written.append(piece)
        length += len(piece)
    return "".join(written), whole


def _indented(text: str) -> Iterator[str]:
    """JSON, an item a line. It is not parsed: numbers and repeated members stay, and what is no JSON passes through."""
    depth = 0
    opened = False
    for found in _PIECE.finditer(text):
        piece = found.group()
        if piece[0] in " \t\r\n":
            continue
        if piece in ("}", "]"):
            if not opened:
                yield _line(depth, depth - 1)
            depth = max(depth - 1, 0)
            opened = False
            yield piece
            continue
        if opened:
            yield _line(depth, depth)
        opened = piece in ("{", "[")
        depth += opened
        if piece == ",":
            yield "," + (_line(depth, depth) or " ")
        elif piece == ":":
            yield ": "
        else:
            yield _unescaped(piece) if piece[0] == '"' else _shown(piece)


def _line(level: int, indent: int) -> str:
    return "\n" + "  " * indent if 0 < level <= _INDENTED_LEVELS else ""


def _unescaped(literal: str) -> str:
    """A JSON string with its letters as letters. Still one: line breaks and quotes keep their escapes."""
    if "\\" not in literal:
        return _shown(literal)
    try:
        text = json.dumps(json.loads(literal), ensure_ascii=False)
    except ValueError:
        return _shown(literal)
    # Half a surrogate pair is no character and has no UTF-8.
    return _shown(_SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text))


def _shown(text: str) -> str:
    return _UNSHOWN.sub("\ufffd", text)


def _fitting(text: str, room: int, escapes: Mapping[int, str]) -> int:
    """How many code points from the start fit into `room` units, each escaped."""
    more = {chr(code): utf16_units(escape) - 1 for code, escape in escapes.items()}

    def units(end: int) -> int:
        return utf16_units(text[:end]) + sum(text.count(character, 0, end) * by for character, by in more.items())

    if units(len(text)) <= room:
        return len(text)
    return bisect.bisect_right(range(len(text)), room, key=units) - 1


def _boundary(text: str, end: int) -> int:
    """The last place at or before `end` that is between two characters; `end` itself where that is too far back."""
    for place in range(end, max(end - _LONGEST_CHARACTER, 0), -1):
        if place == len(text) or not _joined(text, place):
            return place
    return end


def _joined(text: str, place: int) -> bool:
    """Whether what follows `place` belongs to the character before it (after UAX 29, what of it chats show)."""
    before, after = text[place - 1], text[place]
    return (
        unicodedata.category(after)[0] == "M"
        or _ZWJ in (before, after)
        or after == _ZWNJ
        # Skin tones, the tags of flags, vowels and finals of Korean.
        or "\U0001f3fb" <= after <= "\U0001f3ff"
        or "\U000e0020" <= after <= "\U000e007f"
        or "\u1160" <= after <= "\u11ff"
        or (before == "\r" and after == "\n")
        or (_is_flag_half(after) and _flag_halves_before(text, place) % 2 == 1)
    )


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flag_halves_before(text: str, place: int) -> int:
    start = place
    while start and _is_flag_half(text[start - 1]):
        start -= 1
    return place - start
