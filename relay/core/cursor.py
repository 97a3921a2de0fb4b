"""Cursors: where a page ended, opaque to the caller and refused by any list but its own.

A cursor is base64url of: microseconds since 1970 (8 bytes), the row's id (16; in some lists one more, of a row within
that row), and half a SHA-256 HMAC (16) over all that and the list's name. The seal is against mistakes and tampering.
It is no permission: every query names its owner.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from datetime import UTC, datetime, timedelta
from uuid import UUID

from relay.core.errors import InvalidInput

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TIME_BYTES = 8
_ID_BYTES = 16
_SEAL_BYTES = 16


def encode(created_at: datetime, *ids: UUID, of: str, key: bytes) -> str:
    """Make the cursor of a row in the list called `of`, which names its owner and filters too.

    54 characters for one id. A list always has the same number of ids.
    """
    microseconds = (created_at - _EPOCH) // _MICROSECOND
    place = microseconds.to_bytes(_TIME_BYTES, "big", signed=True) + b"".join(one.bytes for one in ids)
    return base64.urlsafe_b64encode(place + _seal(place, of, key)).rstrip(b"=").decode()


def decode(
    text: str, *, of: str, key: bytes, ids: int = 1, field: str = "cursor"
) -> tuple[datetime, *tuple[UUID, ...]]:
    """Return the row's time (UTC) and `ids` ids; InvalidInput unless `encode` made the text for this list and key."""
    try:
        sealed = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        sealed = b""
    length = _TIME_BYTES + ids * _ID_BYTES
    place, seal = sealed[:length], sealed[length:]
    # The decoder skips characters that are not of its alphabet: only the one spelling counts.
    canonical = base64.urlsafe_b64encode(sealed).rstrip(b"=").decode() == text
    if not canonical or len(seal) != _SEAL_BYTES or not hmac.compare_digest(seal, _seal(place, of, key)):
        raise InvalidInput(
            "The cursor is not one that this list gave out with these filters: leave it out to begin at the start.",
            field=field,
            code="invalid_cursor",
        )
    microseconds = int.from_bytes(place[:_TIME_BYTES], "big", signed=True)
    found = (UUID(bytes=place[start : start + _ID_BYTES]) for start in range(_TIME_BYTES, length, _ID_BYTES))
    return _EPOCH + microseconds * _MICROSECOND, *found


def _seal(place: bytes, of: str, key: bytes) -> bytes:
    return hmac.digest(key, place + of.encode(), "sha256")[:_SEAL_BYTES]
