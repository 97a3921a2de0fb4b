"""Keyset paging: a page ends at a row, and the next one starts behind that row, whatever was inserted meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID


class Position(NamedTuple):
    """A row's place in a list. The id settles rows of one time, such as those of one statement."""

    created_at: datetime
    id: UUID
    #: The row within that row, in lists that are walked by what holds their rows.
    within: UUID | None = None


class Listed(Protocol):
    """What a list holds."""

    @property
    def created_at(self) -> datetime: ...

    @property
    def id(self) -> UUID: ...


T = TypeVar("T", bound=Listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of a list, and where the next ones begin: None after the last. It may be short, and not be the last."""

    rows: Sequence[T]
    next: Position | None


def page_of(rows: Sequence[T], limit: int) -> Page[T]:
    """Make a page of at most `limit` rows from a query for one row more, which tells whether there is a next page."""
    if len(rows) <= limit:
        return Page(rows=rows, next=None)
    kept = rows[:limit]
    return Page(rows=kept, next=Position(kept[-1].created_at, kept[-1].id))
