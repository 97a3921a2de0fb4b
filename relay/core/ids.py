"""Identifiers: time-ordered UUIDs, made here because the standard library has no version 7 yet."""

from __future__ import annotations

import re
import uuid

from relay.core.errors import InvalidInput

#: Bytes of randomness that one identifier takes; 74 of their 80 bits are used.
RANDOM_BYTES = 10

_MAX_MS = (1 << 48) - 1
_VERSION = 0x7 << 76
_VARIANT = 0b10 << 62
_CANONICAL = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")


def uuid7(now_ms: int, random: bytes) -> uuid.UUID:
    """Make a version 7 UUID (RFC 9562 section 5.7) from a Unix time in milliseconds and `RANDOM_BYTES` random bytes.

    Ids of different milliseconds sort by time. Within one millisecond their order
    is that of the random bytes: it is not the order in which they were made.
    Raises ValueError for a time outside 48 bits or the wrong number of bytes.
    """
    if not 0 <= now_ms <= _MAX_MS:
        raise ValueError("the time must be milliseconds since 1970, below 2**48")
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"exactly {RANDOM_BYTES} random bytes are needed")
    bits = int.from_bytes(random, "big")
    return uuid.UUID(
        int=now_ms << 80 | _VERSION | (bits >> 62 & 0xFFF) << 64 | _VARIANT | bits & 0x3FFF_FFFF_FFFF_FFFF,
    )


def parse_id(text: object, field: str = "id") -> uuid.UUID:
    """Read an identifier in its canonical form of 36 characters, in either case; any UUID version will do.

    Braces, `urn:uuid:` and forms without hyphens, all of which `uuid.UUID` takes,
    raise InvalidInput: one identifier has one spelling (but for its case).
    """
    if not isinstance(text, str) or _CANONICAL.fullmatch(text) is None:
        raise InvalidInput(
            "An id is 36 characters such as 01890a5d-ac96-774b-bcce-b302099a8057: use it as Relay gave it.",
            field=field,
            code="invalid_id",
        )
    return uuid.UUID(int=int(text.replace("-", ""), 16))
