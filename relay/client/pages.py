"""Lists as one sequence: pages are fetched as they are needed."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeVar

from relay.client.errors import UnexpectedAnswer
from relay.client.reading import read
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from relay.client.transport import Transport

#: Rows of a page: as many as the API gives.
PAGE_ROWS: Final = 250

T = TypeVar("T")


def walk(
    transport: Transport,
    path: str,
    cls: type[T],
    query: Mapping[str, str | None] | None = None,
    *,
    limit: int | None = None,
) -> Iterator[T]:
    """Iterate over a list, the newest first; `limit` ends it after so many rows.

    What was there before the first row was asked for comes once, whatever is added meanwhile. Raises as
    `Transport.send` does, at any row.
    """
    left = limit
    cursor: str | None = None
    while left is None or left > 0:
        rows = PAGE_ROWS if left is None else min(left, PAGE_ROWS)
        page = transport.get(path, {**(query or {}), "limit": rows, "cursor": cursor})
        data = page.get("data")
        if not isinstance(data, list):
            raise UnexpectedAnswer("the answer has no data: is this Relay's API, and of this release?")
        # A page can be short, or empty, and not be the last.
        yield from (read(cls, one) for one in data[:left])
        left = None if left is None else left - len(data)
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def time_text(value: datetime | str | None) -> str | None:
    """Write a filter's time: an aware datetime, or text that is RFC 3339 already.

    Raises InvalidInput for a time without offset, and for what is neither.
    """
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidInput(
                "the time has no offset: give an aware datetime, such as datetime.now(UTC)", code="invalid_time"
            )
        return value.isoformat()
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise InvalidInput(f"a time is not {kind}: give an aware datetime, or RFC 3339 as a str", code="invalid_time")
    return value
