"""Lists: `limit` and `cursor` in, `data` and `next_cursor` out."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypeVar

from flask import request

from relay.config import require
from relay.core import cursor
from relay.store.pages import Position
from relay.web.problems import FieldError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from relay.config import Settings
    from relay.store.pages import Listed, Page

#: Rows of a page where the caller does not say, and at most.
DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 250

T = TypeVar("T", bound="Listed")


class Cursors:
    """Makes and reads this installation's cursors.

    Their key comes from DATABASE_URL, the one secret that all API processes share; where that changes, lists that are
    being walked begin anew.
    """

    def __init__(self, settings: Settings) -> None:
        url = require(settings.database_url, "DATABASE_URL")
        self._key = hashlib.sha256(b"relay cursors\0" + url.encode()).digest()

    def read(self, of: str, *, filters: Collection[str] = (), ids: int = 1) -> tuple[Position | None, int]:
        """Return where the asked-for page begins and its limit, from the query.

        `of` names the list, its owner and, where it has `filters` (the names of further parameters), what they say. The
        list's positions have so many `ids`. Raises Problem for any other parameter, one given twice and a limit out of
        bounds, InvalidInput for a cursor of another list.
        """
        for name in request.args:
            if name not in {"limit", "cursor", *filters}:
                choices = ", ".join([*filters, "limit", "cursor"])
                message = f"There is no such parameter here: use {choices}."
                raise invalid([FieldError(field=name[:80], message=message, code="unknown_field")])
            if len(request.args.getlist(name)) > 1:
                raise invalid([FieldError(field=name, message="It is given twice: keep one.", code="duplicate")])
        limit = request.args.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
            message = f"The limit must be a number from 1 to {MAX_LIMIT}."
            raise invalid([FieldError(field="limit", message=message, code="out_of_range")])
        text = request.args.get("cursor")
        after = None if text is None else Position(*cursor.decode(text, of=of, key=self._key, ids=ids))
        return after, int(limit)

    def render(self, page: Page[T], of: str, row: Callable[[T], Mapping[str, object]]) -> dict[str, object]:
        """Return the answer for a page of the list `of`, each of its rows rendered by `row`."""
        following = None
        if page.next is not None:
            ids = [one for one in (page.next.id, page.next.within) if one is not None]
            following = cursor.encode(page.next.created_at, *ids, of=of, key=self._key)
        return {"data": [row(item) for item in page.rows], "next_cursor": following}
