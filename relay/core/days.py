"""Which partition of the attempt log a moment belongs to: days are UTC days, whatever zone a server or session has."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

PREFIX: Final = "delivery_attempts_"

_NAME: Final = re.compile(rf"{PREFIX}([0-9]{{4}})([0-9]{{2}})([0-9]{{2}})")


def day_of(moment: dt.datetime) -> dt.date:
    """The UTC day of `moment`. Raises ValueError where it has no zone: its day would depend on who asks."""
    if moment.utcoffset() is None:
        raise ValueError("a moment without a zone has no day")
    return moment.astimezone(dt.UTC).date()


def partition_name(day: dt.date) -> str:
    """The table that holds the day's attempts, such as `delivery_attempts_20261130`."""
    return f"{PREFIX}{day.year:04}{day.month:02}{day.day:02}"


def parse_partition_name(name: str) -> dt.date | None:
    """The day of a table that `partition_name` named; None for any other table, the default partition included."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        return None
    year, month, day = map(int, matched.groups())
    try:
        return dt.date(year, month, day)
    except ValueError:
        return None


def bounds(day: dt.date) -> tuple[str, str]:
    """The partition's bounds as Postgres literals, the upper one exclusive.

    They carry their offset: a bare timestamp would be read in the time zone of the session that makes the table.
    """
    return f"{day.isoformat()} 00:00:00+00", f"{(day + dt.timedelta(days=1)).isoformat()} 00:00:00+00"


def days_ahead(today: dt.date, n: int) -> list[dt.date]:
    """`today` and the `n` days after it, in order: n + 1 days in all."""
    return [today + dt.timedelta(days=ahead) for ahead in range(n + 1)]
