"""Retry-After as RFC 9110 section 10.2.3 has it: seconds or a date. What is neither is nonsense, and ignored."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Seconds: longer waits are read as this one (ten years), so that any number of digits stays a number to reckon with.
LONGEST_S: Final = 315_360_000.0

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH: Final = f"(?P<month>{'|'.join(_MONTHS)})"
_CLOCK: Final = "(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_SHORT: Final = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG: Final = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"

_SECONDS: Final = re.compile("[0-9]+")
#: The forms of RFC 9110 section 5.6.7, in the order in which they are met.
_DATES: Final = (
    re.compile(f"{_SHORT}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_CLOCK} GMT"),
    re.compile(f"{_LONG}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_CLOCK} GMT"),
    re.compile(f"{_SHORT} {_MONTH} (?P<day>[0-9]{{2}}| [0-9]) {_CLOCK} (?P<year>[0-9]{{4}})"),
)


def parse(value: str, now: float) -> float | None:
    """Seconds from `now` (epoch seconds) that the header's value asks to wait: 0 for the past, at most LONGEST_S.

    None for all that is neither ASCII digits nor one of the three date forms. Dates are UTC, their names of days and
    months spelled as the RFC does. Whether the day of the week fits the date is not checked.
    """
    value = value.strip(" \t")
    if _SECONDS.fullmatch(value):
        digits = value.lstrip("0")
        return LONGEST_S if len(digits) > 9 else min(float(digits or "0"), LONGEST_S)
    for form in _DATES:
        if matched := form.fullmatch(value):
            moment = _moment(matched, now)
            return None if moment is None else min(max(moment - now, 0.0), LONGEST_S)
    return None


def find(headers: Iterable[tuple[str, str]], now: float) -> float | None:
    """`parse` of a reply's headers (names lower-cased): the first line that is valid counts, the others do not."""
    for name, value in headers:
        if name == "retry-after" and (seconds := parse(value, now)) is not None:
            return seconds
    return None


def _moment(matched: re.Match[str], now: float) -> float | None:
    """Epoch seconds of a date; None where the calendar or the clock has no such moment."""
    year, day = int(matched["year"]), int(matched["day"])
    month = _MONTHS.index(matched["month"]) + 1
    hour, minute, second = int(matched["hour"]), int(matched["minute"]), int(matched["second"])
    if second > 60:
        return None

    def at(year: int) -> float:
        # A leap second is the second after the 59th.
        leap = second == 60
        return dt.datetime(year, month, day, hour, minute, 59 if leap else second, tzinfo=dt.UTC).timestamp() + leap

    try:
        if len(matched["year"]) == 4:
            return at(year)
        # Two digits: the latest such year that is not more than 50 years ahead.
        today = dt.datetime.fromtimestamp(now, tz=dt.UTC)
        year = today.year + 50 - (today.year + 50 - year) % 100
        ahead = (month, day, hour, minute, second) > (today.month, today.day, today.hour, today.minute, today.second)
        return at(year - 100 if year == today.year + 50 and ahead else year)
    except ValueError:
        return None
