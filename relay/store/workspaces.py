"""Workspaces: what everything else belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relay.store import audit
from relay.store.pages import Page, Position, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

#: What `change` may set: limits, where None is the installation's.
LIMITS: Final = frozenset({"max_endpoints", "ingest_rate", "max_payload_bytes"})

_COLUMNS = "id, name, max_endpoints, ingest_rate, max_payload_bytes, created_at, event_types_version"
_CREATE = sa.text(f"""
insert into relay.workspaces (id, name, max_endpoints, ingest_rate, max_payload_bytes)
values (:id, :name, :max_endpoints, :ingest_rate, :max_payload_bytes)
on conflict (name) do nothing
returning {_COLUMNS}
""")
_BY_ID = sa.text(f"select {_COLUMNS} from relay.workspaces where id = :id")
# Not for update: every ingest's foreign key would wait for it.
_LOCK = sa.text(f"select {_COLUMNS} from relay.workspaces where id = :id for no key update")
_CHANGE = sa.text(f"""
update relay.workspaces
set max_endpoints = :max_endpoints, ingest_rate = :ingest_rate, max_payload_bytes = :max_payload_bytes
where id = :id returning {_COLUMNS}
""")
_BY_NAME = sa.text(f"select {_COLUMNS} from relay.workspaces where name = :name")
# There are few: a scan and a sort are cheaper than an index that every creation maintains.
_LIST = sa.text(f"""
select {_COLUMNS} from relay.workspaces
where cast(:after_at as timestamptz) is null or (created_at, id) < (:after_at, cast(:after_id as uuid))
order by created_at desc, id desc limit :limit
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A workspace. A limit that is None is the installation's."""

    id: UUID
    name: str
    max_endpoints: int | None
    #: Events per second.
    ingest_rate: float | None
    max_payload_bytes: int | None
    created_at: datetime
    #: Moves with every change of its event types; 0 while it has never had any.
    event_types_version: int


def create(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    name: str,
    max_endpoints: int | None = None,
    ingest_rate: float | None = None,
    max_payload_bytes: int | None = None,
    actor: str,
    request_id: str | None = None,
) -> Workspace | None:
    """Make a workspace and its audit record; None, and nothing made, where the name is taken."""
    fields = {
        "name": name,
        "max_endpoints": max_endpoints,
        "ingest_rate": ingest_rate,
        "max_payload_bytes": max_payload_bytes,
    }
    row = connection.execute(_CREATE, {"id": workspace_id, **fields}).mappings().one_or_none()
    if row is None:
        return None
    audit.write(
        connection,
        workspace_id=None,
        actor=actor,
        action="workspace.created",
        target=f"workspace:{workspace_id}",
        after=fields,
        request_id=request_id,
    )
    return _workspace(row)


def change(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    limits: Mapping[str, float | None],
    actor: str,
    request_id: str | None = None,
) -> Workspace | None:
    """Set some of `LIMITS`, by name, with an audit record of those that moved; None where there is no such workspace.

    Processes that know the workspace may go by the old limits for a second more. What is over a lowered limit stays.
    """
    row = connection.execute(_LOCK, {"id": workspace_id}).mappings().one_or_none()
    if row is None:
        return None
    moved = {name: value for name, value in limits.items() if row[name] != value}
    if not moved:
        return _workspace(row)
    after = {name: row[name] for name in LIMITS} | moved
    changed = connection.execute(_CHANGE, {"id": workspace_id, **after}).mappings().one()
    audit.write(
        connection,
        workspace_id=None,
        actor=actor,
        action="workspace.changed",
        target=f"workspace:{workspace_id}",
        before={name: row[name] for name in moved},
        after=moved,
        request_id=request_id,
    )
    return _workspace(changed)


def by_id(connection: sa.Connection, workspace_id: UUID) -> Workspace | None:
    """Return the workspace, or None."""
    row = connection.execute(_BY_ID, {"id": workspace_id}).mappings().one_or_none()
    return None if row is None else _workspace(row)


def by_name(connection: sa.Connection, name: str) -> Workspace | None:
    """Return the workspace called exactly `name`, or None."""
    row = connection.execute(_BY_NAME, {"name": name}).mappings().one_or_none()
    return None if row is None else _workspace(row)


def list_page(connection: sa.Connection, *, after: Position | None, limit: int) -> Page[Workspace]:
    """Return up to `limit` workspaces, the newest first, from behind `after`."""
    rows = connection.execute(
        _LIST,
        {
            "after_at": None if after is None else after.created_at,
            "after_id": None if after is None else after.id,
            "limit": limit + 1,
        },
    ).mappings()
    return page_of([_workspace(row) for row in rows], limit)


def _workspace(row: Mapping[Any, Any]) -> Workspace:
    return Workspace(**dict(row))
