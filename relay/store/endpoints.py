"""Endpoints as their owners see and make them. What deliveries move on the row is written elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from psycopg.types.json import Jsonb

from relay.store import audit
from relay.store.pages import Page, Position, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

_COLUMNS = """id, url, description, event_types, signing, headers, max_in_flight, timeout_ms, retry, metadata, enabled,
    disabled_at, disabled_reason, created_at, updated_at"""

# Creates of one workspace queue here, so that none counts while another inserts. NO KEY: ingest's foreign keys pass.
_LOCK = sa.text("select max_endpoints from relay.workspaces where id = :workspace_id for no key update")
_COUNT = sa.text("""
select count(*) from relay.endpoints where workspace_id = :workspace_id and kind = 0 and deleted_at is null
""")
_CREATE = sa.text(f"""
insert into relay.endpoints (
    id, workspace_id, url, description, event_types, signing, headers, secret, max_in_flight, timeout_ms, retry,
    metadata, enabled, disabled_at, disabled_reason)
values (
    :id, :workspace_id, :url, :description, :event_types, :signing, :headers, :secret, :max_in_flight, :timeout_ms,
    :retry, :metadata, :enabled, case when :enabled then null else now() end, :disabled_reason)
returning {_COLUMNS}
""")
_GET = sa.text(f"""
select {_COLUMNS} from relay.endpoints
where id = :id and workspace_id = :workspace_id and kind = 0 and deleted_at is null
""")
_LIST = sa.text(f"""
select {_COLUMNS} from relay.endpoints
where workspace_id = :workspace_id and kind = 0 and deleted_at is null
  and (cast(:after_at as timestamptz) is null or (created_at, id) < (:after_at, cast(:after_id as uuid)))
order by created_at desc, id desc limit :limit
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEndpoint:
    """An endpoint that was checked and is not yet stored."""

    id: UUID
    workspace_id: UUID
    #: In its normalised form.
    url: str
    description: str
    event_types: list[str]
    signing: str
    #: Name to sealed value, in base64.
    sealed_headers: dict[str, str] = field(repr=False)
    sealed_secret: bytes = field(repr=False)
    max_in_flight: int | None
    timeout_ms: int | None
    #: As given: what is absent follows the defaults of the release that reads it.
    retry: Mapping[str, object]
    metadata: Mapping[str, object]
    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint without its secrets."""

    id: UUID
    url: str
    description: str
    event_types: list[str]
    signing: str
    header_names: list[str]
    max_in_flight: int | None
    timeout_ms: int | None
    retry: dict[str, object]
    metadata: dict[str, object]
    enabled: bool
    disabled_at: datetime | None
    disabled_reason: str | None
    created_at: datetime
    updated_at: datetime


def create(
    connection: sa.Connection,
    new: NewEndpoint,
    *,
    default_limit: int,
    actor: str,
    request_id: str | None = None,
) -> Endpoint | None:
    """Store an endpoint and its audit record; None, and nothing stored, where the workspace has as many as it may.

    The limit is the workspace's own, else `default_limit`. Holds a lock on the workspace until the transaction ends,
    so that creates at the same time cannot pass the limit together.
    """
    own_limit = connection.execute(_LOCK, {"workspace_id": new.workspace_id}).scalar_one()
    if count(connection, workspace_id=new.workspace_id) >= (default_limit if own_limit is None else own_limit):
        return None
    row = (
        connection.execute(
            _CREATE,
            {
                "id": new.id,
                "workspace_id": new.workspace_id,
                "url": new.url,
                "description": new.description,
                "event_types": new.event_types,
                "signing": new.signing,
                "headers": Jsonb(new.sealed_headers),
                "secret": new.sealed_secret,
                "max_in_flight": new.max_in_flight,
                "timeout_ms": new.timeout_ms,
                "retry": Jsonb(dict(new.retry)),
                "metadata": Jsonb(dict(new.metadata)),
                "enabled": new.enabled,
                "disabled_reason": None if new.enabled else "manual",
            },
        )
        .mappings()
        .one()
    )
    audit.write(
        connection,
        workspace_id=new.workspace_id,
        actor=actor,
        action="endpoint.created",
        target=f"endpoint:{new.id}",
        after={
            "url": new.url,
            "description": new.description,
            "event_types": new.event_types,
            "signing": new.signing,
            "header_names": list(new.sealed_headers),
            "max_in_flight": new.max_in_flight,
            "timeout_ms": new.timeout_ms,
            "retry": dict(new.retry),
            "metadata": dict(new.metadata),
            "enabled": new.enabled,
        },
        request_id=request_id,
    )
    return _endpoint(row)


def count(connection: sa.Connection, *, workspace_id: UUID) -> int:
    """Return how many endpoints the workspace has of its own making, disabled ones included."""
    return int(connection.execute(_COUNT, {"workspace_id": workspace_id}).scalar_one())


def get(connection: sa.Connection, *, workspace_id: UUID, endpoint_id: UUID) -> Endpoint | None:
    """Return the endpoint, or None where this workspace has no such one (any more)."""
    row = connection.execute(_GET, {"id": endpoint_id, "workspace_id": workspace_id}).mappings().one_or_none()
    return None if row is None else _endpoint(row)


def list_page(connection: sa.Connection, *, workspace_id: UUID, after: Position | None, limit: int) -> Page[Endpoint]:
    """Return up to `limit` endpoints of the workspace, the newest first, from behind `after`."""
    rows = connection.execute(
        _LIST,
        {
            "workspace_id": workspace_id,
            "after_at": None if after is None else after.created_at,
            "after_id": None if after is None else after.id,
            "limit": limit + 1,
        },
    ).mappings()
    return page_of([_endpoint(row) for row in rows], limit)


def _endpoint(row: Mapping[Any, Any]) -> Endpoint:
    fields = dict(row)
    return Endpoint(header_names=list(fields.pop("headers")), **fields)
