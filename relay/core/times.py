"""Times as callers write them: RFC 3339, always with an offset, since a time without one is anybody's guess."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

from relay.core.errors import InvalidInput

_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])([01]\d|2[0-3]):([0-5]\d))", re.ASCII
)
#: Digits after the point that are kept: what Postgres stores.
_DIGITS = 6


def parse_time(text: object, field: str) -> datetime:
    """Read an RFC 3339 time (section 5.6) into UTC; digits beyond the microsecond are dropped.

    Raises InvalidInput for anything else, a leap second and a time outside the years 1 to 9999 included.
    """
    match = _RFC3339.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise _invalid(field)
    *numbers, fraction, sign, hours, minutes = match.groups()
    year, month, day, hour, minute, second = (int(number) for number in numbers)
    microsecond = int((fraction or "0")[:_DIGITS].ljust(_DIGITS, "0"))
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
    zone = timezone(-offset if sign == "-" else offset)
    try:
        return datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone).astimezone(UTC)
    except (ValueError, OverflowError):
        raise _invalid(field) from None


def _invalid(field: str) -> InvalidInput:
    return InvalidInput(
        "A time is RFC 3339 with its offset, such as 2026-01-31T12:00:00Z or 2026-01-31T13:00:00+01:00 (in a URL the + "
        "is written %2B).",
        field=field,
        code="invalid_time",
    )
