"""Events as their owners read them back: what was taken in, what it fanned out to, and the very bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relay.core.model import EventSource
from relay.store.delivery_lists import LOOK
from relay.store.pages import Page, Position

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from relay.core.filters import TimeRange

# The payload's length is known without reading it.
_COLUMNS: Final = """e.id, e.type, e.source, e.content_type, octet_length(e.payload) as payload_bytes, e.api_key_id,
    e.request_id, e.idempotency_key, e.delivery_ids, e.created_at"""
_GET = sa.text(f"select {_COLUMNS} from relay.events e where e.id = :id and e.workspace_id = :workspace_id")
_PAYLOAD = sa.text("select payload from relay.events where id = :id and workspace_id = :workspace_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event without its payload."""

    id: UUID
    type: str
    source: EventSource
    content_type: str
    payload_bytes: int
    api_key_id: UUID | None
    request_id: str | None
    idempotency_key: str | None
    #: What it fanned out to: some may be deleted since.
    delivery_ids: list[UUID]
    created_at: datetime


def get(connection: sa.Connection, *, workspace_id: UUID, event_id: UUID) -> Event | None:
    """Return the event, or None where this workspace has no such one (any more)."""
    row = connection.execute(_GET, {"id": event_id, "workspace_id": workspace_id}).one_or_none()
    return None if row is None else _event(row)


def payload(connection: sa.Connection, *, workspace_id: UUID, event_id: UUID) -> bytes | None:
    """Return the event's bytes as they were received, or None where this workspace has no such event."""
    found = connection.execute(_PAYLOAD, {"id": event_id, "workspace_id": workspace_id}).scalar_one_or_none()
    return None if found is None else bytes(found)


def list_page(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    event_type: str | None,
    made: TimeRange,
    after: Position | None,
    limit: int,
) -> Page[Event]:
    """Return up to `limit` events of the workspace, the newest first, from behind `after`.

    With an `event_type` (exactly this one) a page looks at `LOOK` events at most, and may be short before the end.
    """
    where = ["e.workspace_id = :workspace_id"]
    parameters: dict[str, Any] = {"workspace_id": workspace_id, "limit": limit + 1}
    if made.since is not None:
        where.append("e.created_at >= :since")
        parameters["since"] = made.since
    if made.until is not None:
        where.append("e.created_at < :until")
        parameters["until"] = made.until
    if after is not None:
        where.append("(e.created_at, e.id) < (:after_at, cast(:after_id as uuid))")
        parameters |= {"after_at": after.created_at, "after_id": after.id}
    end = None
    if event_type is not None:
        border = connection.execute(
            sa.text(f"""
                select e.created_at, e.id from relay.events e where {" and ".join(where)}
                order by e.created_at desc, e.id desc offset {LOOK - 1} limit 1
            """),
            parameters,
        ).one_or_none()
        if border is not None:
            end = Position(border.created_at, border.id)
            where.append("(e.created_at, e.id) >= (:border_at, cast(:border_id as uuid))")
            parameters |= {"border_at": end.created_at, "border_id": end.id}
        where.append("e.type = :event_type")
        parameters["event_type"] = event_type
    found = connection.execute(
        sa.text(f"""
            select {_COLUMNS} from relay.events e where {" and ".join(where)}
            order by e.created_at desc, e.id desc limit :limit
        """),
        parameters,
    ).all()
    rows = [_event(row) for row in found[:limit]]
    return Page(rows=rows, next=Position(rows[-1].created_at, rows[-1].id) if len(found) > limit else end)


def _event(row: sa.Row[Any]) -> Event:
    return Event(
        id=row.id,
        type=row.type,
        source=EventSource(row.source),
        content_type=row.content_type,
        payload_bytes=row.payload_bytes,
        api_key_id=row.api_key_id,
        request_id=row.request_id,
        idempotency_key=row.idempotency_key,
        delivery_ids=row.delivery_ids,
        created_at=row.created_at,
    )
