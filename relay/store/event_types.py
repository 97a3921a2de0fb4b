"""The registry of a workspace's event types. A type that is not in it is as good as one that is; one with a schema has
its payloads checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.store import audit
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

#: Types that a workspace may register: few enough for a list without pages.
MAX_TYPES: Final = 500

# Every change begins here, so that they come one after the other. What processes know of the workspace is older than a
# second nowhere, and then they see the new version.
_MOVE = sa.text("update relay.workspaces set event_types_version = event_types_version + 1 where id = :workspace_id")
_COLUMNS = "name, description, json_schema, created_at, updated_at"
_GET = sa.text(f"select {_COLUMNS} from relay.event_types where workspace_id = :workspace_id and name = :name")
_LIST = sa.text("""
select name, description, json_schema is not null as has_schema, created_at, updated_at
from relay.event_types where workspace_id = :workspace_id order by name
""")
_COUNT = sa.text("select count(*) from relay.event_types where workspace_id = :workspace_id")
_PUT = sa.text(f"""
insert into relay.event_types (workspace_id, name, description, json_schema)
values (:workspace_id, :name, :description, :json_schema)
on conflict (workspace_id, name) do update
set description = excluded.description, json_schema = excluded.json_schema, updated_at = now()
returning {_COLUMNS}
""")
_REMOVE = sa.text(f"""
delete from relay.event_types where workspace_id = :workspace_id and name = :name returning {_COLUMNS}
""")
_SCHEMA = sql.SQL("""
select json_schema from relay.event_types where workspace_id = %(workspace_id)s and name = %(name)s
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventType:
    """A registered type."""

    name: str
    description: str
    #: None: any payload will do.
    json_schema: Any
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedType:
    """A registered type as a list has it: its schema may be long."""

    name: str
    description: str
    has_schema: bool
    created_at: datetime
    updated_at: datetime


def put(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    name: str,
    description: str,
    json_schema: object,
    actor: str,
    request_id: str | None = None,
) -> tuple[EventType, bool] | None:
    """Register the type, or replace what is registered of it, with an audit record; return it and whether it is new.

    None, and nothing done, where it would be one more than `MAX_TYPES`. A schema of None is no schema.
    """
    key = {"workspace_id": workspace_id, "name": name}
    connection.execute(_MOVE, {"workspace_id": workspace_id})
    before = connection.execute(_GET, key).mappings().one_or_none()
    if before is None and connection.execute(_COUNT, {"workspace_id": workspace_id}).scalar_one() >= MAX_TYPES:
        return None
    values = {
        **key,
        "description": description,
        "json_schema": None if json_schema is None else Jsonb(json_schema),
    }
    row = connection.execute(_PUT, values).mappings().one()
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="event_type.created" if before is None else "event_type.changed",
        target=f"event_type:{name}",
        before=None if before is None else _audited(before),
        after=_audited(row),
        request_id=request_id,
    )
    return EventType(**dict(row)), before is None


def remove(
    connection: sa.Connection, *, workspace_id: UUID, name: str, actor: str, request_id: str | None = None
) -> bool:
    """Take the type out of the registry, with an audit record; return whether it was in it."""
    connection.execute(_MOVE, {"workspace_id": workspace_id})
    row = connection.execute(_REMOVE, {"workspace_id": workspace_id, "name": name}).mappings().one_or_none()
    if row is None:
        return False
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="event_type.deleted",
        target=f"event_type:{name}",
        before=_audited(row),
        request_id=request_id,
    )
    return True


def get(connection: sa.Connection, *, workspace_id: UUID, name: str) -> EventType | None:
    """Return a registered type, or None."""
    row = connection.execute(_GET, {"workspace_id": workspace_id, "name": name}).mappings().one_or_none()
    return None if row is None else EventType(**dict(row))


def list_all(connection: sa.Connection, *, workspace_id: UUID) -> Sequence[ListedType]:
    """Return the workspace's registered types by name."""
    rows = connection.execute(_LIST, {"workspace_id": workspace_id}).mappings()
    return [ListedType(**dict(row)) for row in rows]


def schema_of(connection: sa.Connection, *, workspace_id: UUID, name: str) -> Any:
    """Return the type's schema; None for a type without one or that is not registered. For the hot pool."""
    row = run(connection, _SCHEMA, {"workspace_id": workspace_id, "name": name}).fetchone()
    return None if row is None else row[0]


def _audited(row: Mapping[Any, Any]) -> dict[str, object]:
    return {"description": row["description"], "json_schema": row["json_schema"]}
