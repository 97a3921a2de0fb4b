"""The audit log: who changed what, written in the transaction of the change, without secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from psycopg.types.json import Jsonb

from relay.store.pages import Page, Position, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from relay.core.filters import TimeRange

_WRITE = sa.text("""
insert into relay.audit_log (id, workspace_id, actor, action, target, before, after, request_id)
values (relay.uuid7(), :workspace_id, :actor, :action, :target, :before, :after, :request_id)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One change: who made it, what it was, and what it was made to, before and after where that can be told."""

    id: UUID
    created_at: datetime
    actor: str
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None


def write(
    connection: sa.Connection,
    *,
    workspace_id: UUID | None,
    actor: str,
    action: str,
    target: str,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
    request_id: str | None = None,
) -> None:
    """Write one record. `actor` is `key:<id>`, `instance` or `relay`; `action` a word such as `endpoint.created`."""
    connection.execute(
        _WRITE,
        {
            "workspace_id": workspace_id,
            "actor": actor,
            "action": action,
            "target": target,
            "before": None if before is None else Jsonb(dict(before)),
            "after": None if after is None else Jsonb(dict(after)),
            "request_id": request_id,
        },
    )


def list_page(
    connection: sa.Connection, *, workspace_id: UUID | None, made: TimeRange, after: Position | None, limit: int
) -> Page[Record]:
    """Return up to `limit` records, the newest first, from behind `after`: of the workspace, or with None of none."""
    where = ["workspace_id is null" if workspace_id is None else "workspace_id = :workspace_id"]
    parameters: dict[str, Any] = {"limit": limit + 1}
    if workspace_id is not None:
        parameters["workspace_id"] = workspace_id
    if made.since is not None:
        where.append("at >= :since")
        parameters["since"] = made.since
    if made.until is not None:
        where.append("at < :until")
        parameters["until"] = made.until
    if after is not None:
        where.append("(at, id) < (:after_at, cast(:after_id as uuid))")
        parameters |= {"after_at": after.created_at, "after_id": after.id}
    rows = connection.execute(
        sa.text(f"""
            select id, at as created_at, actor, action, target, before, after, request_id from relay.audit_log
            where {" and ".join(where)} order by at desc, id desc limit :limit
        """),
        parameters,
    ).mappings()
    return page_of([Record(**dict(row)) for row in rows], limit)
