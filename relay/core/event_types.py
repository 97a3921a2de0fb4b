"""Event types and the patterns that endpoints subscribe with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Characters in a type, and in a pattern.
MAX_TYPE_LENGTH = 128

#: The pattern of every type but Relay's own.
EVERYTHING = "*"

#: The form of a type.
TYPE = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_RULE = f"1 to {MAX_TYPE_LENGTH} letters, digits, _ and - in segments with dots between, such as order.paid"


def check_event_type(text: object, field: str = "type") -> str:
    """Return `text` if it is an event type, else raise InvalidInput. Reserved types pass: see `is_reserved`."""
    if not isinstance(text, str) or len(text) > MAX_TYPE_LENGTH or TYPE.fullmatch(text) is None:
        raise InvalidInput(f"An event type is {_RULE}.", field=field, code="invalid_type")
    return text


def is_reserved(event_type: str) -> bool:
    """Whether the type is Relay's own, which producers may not send. Types are case-sensitive."""
    return event_type.startswith("relay.") or event_type == "relay"


def check_pattern(text: object, field: str = "event_types") -> str:
    """Return `text` if it is a pattern: a type, `*`, or a type followed by `.*`; else raise InvalidInput."""
    if (
        not isinstance(text, str)
        or len(text) > MAX_TYPE_LENGTH
        or (text != EVERYTHING and TYPE.fullmatch(text.removesuffix(".*")) is None)
    ):
        raise InvalidInput(
            f"A pattern is an event type ({_RULE}), or * alone, or a * as the last segment, such as order.*",
            field=field,
            code="invalid_pattern",
        )
    return text


def matches(patterns: Sequence[str], event_type: str) -> bool:
    """Whether an endpoint with these (checked) patterns gets events of this (checked) type.

    No patterns mean every type. Neither that nor `*` takes in Relay's own types:
    they need a pattern that names them (B-3). `order.*` does not match `order`.
    """
    reserved = is_reserved(event_type)
    if not patterns:
        return not reserved
    for pattern in patterns:
        if pattern == EVERYTHING:
            if not reserved:
                return True
        elif pattern == event_type or (pattern.endswith(".*") and event_type.startswith(pattern[:-1])):
            return True
    return False


def patterns_for(event_type: str) -> list[str]:
    """List every pattern that matches the type, most particular first, so that a query can match by overlap.

    An endpoint gets the type if its patterns overlap with these, or if it has none
    and the type is not reserved. At most 65 patterns.
    """
    found = [event_type]
    end = event_type.rfind(".")
    while end > 0:
        found.append(event_type[: end + 1] + "*")
        end = event_type.rfind(".", 0, end)
    if not is_reserved(event_type):
        found.append(EVERYTHING)
    return found
