"""Lists of deliveries: any page costs what the first one does, and no filter makes one cost more than a bounded look.

There is no index over all of a workspace's deliveries: every delivery would pay for it four times on its way. A
workspace's list walks its events instead, each of which names its deliveries, and looks these up by their ids; both
were made by one statement and so at one time. Dead letters have indexes of their own. What no index tells apart, such
as a status within an endpoint, is looked for among at most `LOOK` rows a page: a page may then be short, or empty,
and still have a next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa

from relay.core.model import Status
from relay.store.deliveries import COLUMNS, Delivery, from_row
from relay.store.pages import Page, Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.core.filters import DeliveryFilter

#: Rows that one page looks at, at most, where an index cannot tell which of them are wanted.
LOOK: Final = 5_000
#: Before every id.
_NO_ID: Final = UUID(int=0)

_ENDPOINT = sa.text("select 1 from relay.endpoints where id = :endpoint_id and workspace_id = :workspace_id")
_BY_IDS = sa.text(f"""
select {COLUMNS} from relay.deliveries d
where d.id = any(:ids) and d.workspace_id = :workspace_id
order by d.created_at, d.id
""")


def has_endpoint(connection: sa.Connection, *, workspace_id: UUID, endpoint_id: UUID) -> bool:
    """Whether the workspace has, or had, such an endpoint: what was sent to a deleted one can still be read."""
    parameters = {"workspace_id": workspace_id, "endpoint_id": endpoint_id}
    return connection.execute(_ENDPOINT, parameters).one_or_none() is not None


def by_ids(connection: sa.Connection, *, workspace_id: UUID, ids: Sequence[UUID]) -> list[Delivery]:
    """Return those of the workspace's deliveries that are still there, the oldest first."""
    rows = connection.execute(_BY_IDS, {"ids": list(ids), "workspace_id": workspace_id})
    return [from_row(row) for row in rows]


def walks_events(wanted: DeliveryFilter, endpoint_id: UUID | None) -> bool:
    """Whether such a list is walked by events, its positions being those of a delivery within an event."""
    return endpoint_id is None and wanted.status is not Status.DEAD


def list_page(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    endpoint_id: UUID | None,
    wanted: DeliveryFilter,
    after: Position | None,
    limit: int,
) -> Page[Delivery]:
    """Return up to `limit` wanted deliveries, the newest first, from behind `after`; of one endpoint, or of all.

    `after` must come from a page of the same list. A short page is the last one only where it has no next position.
    """
    if walks_events(wanted, endpoint_id):
        return _page_by_events(connection, workspace_id=workspace_id, wanted=wanted, after=after, limit=limit)
    return _page_by_index(
        connection, workspace_id=workspace_id, endpoint_id=endpoint_id, wanted=wanted, after=after, limit=limit
    )


def _page_by_index(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    endpoint_id: UUID | None,
    wanted: DeliveryFilter,
    after: Position | None,
    limit: int,
) -> Page[Delivery]:
    """Walk an endpoint's index, or one of the two of dead letters."""
    where, parameters = _span("d.created_at", "d.id", wanted, after)
    where.append("d.workspace_id = :workspace_id")
    parameters |= {"workspace_id": workspace_id, "limit": limit + 1}
    if endpoint_id is not None:
        where.append("d.endpoint_id = :endpoint_id")
        parameters["endpoint_id"] = endpoint_id
    if wanted.status is Status.DEAD:
        # As a constant: only then do the indexes of dead rows come into question.
        where.append("d.status = 3")
    conditions, more = _conditions(wanted)
    border = None
    if conditions:
        border = connection.execute(
            sa.text(f"""
                select d.created_at, d.id from relay.deliveries d where {" and ".join(where)}
                order by d.created_at desc, d.id desc offset {LOOK - 1} limit 1
            """),
            parameters,
        ).one_or_none()
        where += conditions
        parameters |= more
    if border is not None:
        where.append("(d.created_at, d.id) >= (:border_at, cast(:border_id as uuid))")
        parameters |= {"border_at": border.created_at, "border_id": border.id}
    rows = connection.execute(
        sa.text(f"""
            select {COLUMNS} from relay.deliveries d where {" and ".join(where)}
            order by d.created_at desc, d.id desc limit :limit
        """),
        parameters,
    ).all()
    end = None if border is None else Position(border.created_at, border.id)
    return _page([(Position(row.created_at, row.id), from_row(row)) for row in rows], limit, end)


def _page_by_events(
    connection: sa.Connection, *, workspace_id: UUID, wanted: DeliveryFilter, after: Position | None, limit: int
) -> Page[Delivery]:
    """Walk the workspace's events, newest first, and within each its deliveries."""
    where, parameters = _span("e.created_at", "e.id", wanted, after, within=True)
    where.append("e.workspace_id = :workspace_id")
    parameters |= {"workspace_id": workspace_id, "no_id": _NO_ID}
    # An event without deliveries counts as one row, so that there is an end to a stretch of such.
    place = "(e.created_at, e.id, coalesce(x.id, cast(:no_id as uuid)))"
    walk = f"""
        from relay.events e left join lateral unnest(e.delivery_ids) as x(id) on true where {" and ".join(where)}
    """
    if after is not None:
        walk += f" and {place} < (:after_at, cast(:after_id as uuid), cast(:after_within as uuid))"
        parameters["after_within"] = after.within
    order = "order by e.created_at desc, e.id desc, coalesce(x.id, cast(:no_id as uuid)) desc"
    border = connection.execute(
        sa.text(
            f"select e.created_at, e.id, coalesce(x.id, cast(:no_id as uuid)) as within {walk} {order} offset {LOOK - 1} limit 1"
        ),
        parameters,
    ).one_or_none()
    if border is not None:
        walk += f"""
            and (e.created_at, e.id) >= (:border_at, cast(:border_id as uuid))
            and {place} >= (:border_at, cast(:border_id as uuid), cast(:border_within as uuid))
        """
        parameters |= {"border_at": border.created_at, "border_id": border.id, "border_within": border.within}
    if wanted.event_type is not None:
        walk += " and e.type = :event_type"
    conditions, more = _conditions(wanted)
    # The inner limits are fences: what is behind one is done for each row, by the primary key, and never planned as
    # one join over all deliveries.
    rows = connection.execute(
        sa.text(f"""
            select {COLUMNS}, w.at as walked_at, w.event_id as walked_event, w.id as walked_id
            from (select e.created_at as at, e.id as event_id, x.id {walk} {order} limit {LOOK}) w
            cross join lateral (
                select * from relay.deliveries d
                where {" and ".join(["d.id = w.id", "d.workspace_id = :workspace_id", *conditions])}
                limit 1
            ) d
            order by w.at desc, w.event_id desc, w.id desc limit :limit
        """),
        parameters | more | {"limit": limit + 1},
    ).all()
    end = None if border is None else Position(border.created_at, border.id, border.within)
    found = [(Position(row.walked_at, row.walked_event, row.walked_id), from_row(row)) for row in rows]
    return _page(found, limit, end)


def _span(
    at: str, row_id: str, wanted: DeliveryFilter, after: Position | None, *, within: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Return the conditions on a row's place that an index on (time, id) can serve, with their parameters."""
    where: list[str] = []
    parameters: dict[str, Any] = {}
    if wanted.made.since is not None:
        where.append(f"{at} >= :since")
        parameters["since"] = wanted.made.since
    if wanted.made.until is not None:
        where.append(f"{at} < :until")
        parameters["until"] = wanted.made.until
    if after is not None:
        where.append(f"({at}, {row_id}) {'<=' if within else '<'} (:after_at, cast(:after_id as uuid))")
        parameters |= {"after_at": after.created_at, "after_id": after.id}
    return where, parameters


def _conditions(wanted: DeliveryFilter) -> tuple[list[str], dict[str, Any]]:
    """Return the conditions that each row must be looked at for."""
    where: list[str] = []
    parameters: dict[str, Any] = {}
    if wanted.status is not None and wanted.status is not Status.DEAD:
        # `+ 0`: the indexes of pending and leased rows are in no useful order here.
        where.append("d.status + 0 = :status")
        parameters["status"] = int(wanted.status)
    for name in ("event_type", "reason"):
        value = getattr(wanted, name)
        if value is not None:
            where.append(f"d.{name} = :{name}")
            parameters[name] = value
    return where, parameters


def _page(found: Sequence[tuple[Position, Delivery]], limit: int, end: Position | None) -> Page[Delivery]:
    """Make a page of up to one row more than it takes; `end` is where the look had to stop, None at the list's end."""
    rows = [delivery for _, delivery in found[:limit]]
    return Page(rows=rows, next=found[limit - 1][0] if len(found) > limit else end)
