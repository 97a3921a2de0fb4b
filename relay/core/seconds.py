"""Spans of time as callers give them: seconds in a header or in JSON."""

from __future__ import annotations

import re
from typing import Final

from relay.core.errors import InvalidInput

#: Seconds after which an event may expire at the latest: 30 days.
MAX_EXPIRES_IN: Final = 2_592_000

_PLAIN: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")


def parse_seconds(text: str, field: str, *, at_least: float, at_most: float) -> float:
    """Read seconds, whole or with up to six decimals, such as 30 or 0.5; no sign, no exponent.

    Raises InvalidInput for another spelling (`invalid_seconds`) and outside of the bounds (`out_of_range`).
    """
    if not text.isascii() or _PLAIN.fullmatch(text) is None:
        raise InvalidInput(
            "The value is not a number of seconds: send one such as 30 or 0.5.", field=field, code="invalid_seconds"
        )
    value = float(text)
    if not at_least <= value <= at_most:
        raise InvalidInput(
            f"The value is not between {at_least:g} and {at_most:.0f} seconds: choose one that is.",
            field=field,
            code="out_of_range",
        )
    return value


def parse_expires_in(text: str, field: str = "Relay-Expires-In") -> float:
    """Read the seconds after which an event expires (B-34): 1 to `MAX_EXPIRES_IN`. Raises as `parse_seconds` does."""
    return parse_seconds(text, field, at_least=1, at_most=MAX_EXPIRES_IN)
