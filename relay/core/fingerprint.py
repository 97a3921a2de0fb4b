"""What a request with an idempotency key is known by: equal requests have equal fingerprints, others do not (B-12).

JSON is compared as a value, and numbers as they are spelled. For that the standard library's scanner makes a value in
which nothing is lost (no number is converted, no member dropped), and its encoder spells that value in one way only.
"""

from __future__ import annotations

import hashlib
import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Characters of an idempotency key.
MAX_KEY_LENGTH: Final = 255

_KEY_RULE: Final = f"1 to {MAX_KEY_LENGTH} visible ASCII characters (no space among them)"
_SPACE: Final = " \t\n\r"
_NAME: Final = itemgetter(0)


def check_key(text: object, field: str = "Idempotency-Key") -> str:
    """Return `text` if it is an idempotency key (B-10), else raise InvalidInput."""
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_KEY_LENGTH or not _is_visible(text):
        raise InvalidInput(f"An idempotency key is {_KEY_RULE}.", field=field, code="invalid_idempotency_key")
    return text


def fingerprint(parts: Iterable[str], body: bytes, *, is_json: bool) -> bytes:
    """Return the 32 bytes that stand for a request: `parts` (such as its route and its event's type) and its body.

    With `is_json` the body must have passed `jsontext.scan_event`; it is compared as a JSON value: the order of members
    and white space do not matter, but for members of one name, whose order does; numbers differ if they are spelled
    differently; strings are compared after their escapes. Any other body is compared by its bytes, and never equals a
    JSON one. Takes time in proportion to the body, but for the sorting of an object's members.
    """
    digest = hashlib.sha256()
    for part in parts:
        _add(digest.update, part.encode("utf-8", "surrogatepass"))
    _add(digest.update, b"json" if is_json else b"bytes")
    digest.update(_canonical(body.decode()) if is_json else body)
    return digest.digest()


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _add(update: Callable[[bytes], None], part: bytes) -> None:
    # With its length in front, so that no two lists of parts run together into the same bytes.
    update(b"%d:" % len(part))
    update(part)


# Arrays, strings, booleans and null stand for themselves. An object becomes {"o": [name, value, name, value ...]}, and
# a number {"n": "its spelling"}: other dicts do not occur, so that no two values are spelled alike. Members are sorted
# by name; the sort is stable, which keeps those of one name in their order.
def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    members.sort(key=_NAME)
    return {"o": [one for member in members for one in member]}


def _number(spelling: str) -> dict[str, str]:
    return {"n": spelling}


_scan: Final[Callable[[str, int], tuple[Any, int]]] = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_number,
    parse_float=_number,
).scan_once  # type: ignore[attr-defined]  # missing from the stubs
# In ASCII: half a surrogate pair, which a string may hold by its escape, is spelled as that escape again, and a whole
# pair is joined by the scanner before. `check_circular` off spares a dict of every container.
_spell: Final = json.JSONEncoder(ensure_ascii=True, check_circular=False, separators=(",", ":")).encode


def _canonical(text: str) -> bytes:
    return _spell(_scan(text, len(text) - len(text.lstrip(_SPACE)))[0]).encode("ascii")
