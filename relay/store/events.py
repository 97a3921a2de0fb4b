"""Events, and their fan-out to the endpoints that want them: one statement, so one commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from relay.core.event_types import is_reserved, patterns_for
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    import sqlalchemy as sa

# The endpoints are read in this very statement: one that was committed before it began gets the event.
# Each event brings the patterns that would match it, as words of one text, since unnest flattens arrays of arrays.
# Its fan-out is gathered into two arrays beside it, so that nothing has to be joined again.
_INGEST = sql.SQL("""
with r as materialized (
    select id, workspace_id, type, content_type, payload, api_key_id, request_id,
        coalesce(f.delivery_ids, '{}') as delivery_ids, coalesce(f.endpoint_ids, '{}') as endpoint_ids
    from unnest(
        %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::bytea[], %s::uuid[], %s::text[], %s::text[], %s::bool[]
    ) as r(id, workspace_id, type, content_type, payload, api_key_id, request_id, words, everything)
    cross join lateral (
        select array_agg(relay.uuid7()) as delivery_ids, array_agg(p.id) as endpoint_ids
        from relay.endpoints p
        where p.workspace_id = r.workspace_id and p.deleted_at is null and p.enabled and p.kind = 0
          and (p.event_types && string_to_array(r.words, ' ') or (p.event_types = '{}' and r.everything))
    ) f
),
e as (
    insert into relay.events (id, workspace_id, type, content_type, payload, api_key_id, request_id, delivery_ids)
    select id, workspace_id, type, content_type, payload, api_key_id, request_id, delivery_ids from r
),
d as (
    insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type)
    select f.id, r.workspace_id, r.id, f.endpoint_id, r.type
    from r cross join lateral unnest(r.delivery_ids, r.endpoint_ids) as f(id, endpoint_id)
)
select id, now(), delivery_ids, endpoint_ids from r
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event that was checked and is not yet stored."""

    id: UUID
    workspace_id: UUID
    type: str
    content_type: str
    #: The bytes as received.
    payload: bytes
    api_key_id: UUID | None
    request_id: str | None


class NewDelivery(NamedTuple):
    """A delivery that an event was given."""

    id: UUID
    endpoint_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """An event that is durable, with its deliveries: none where no endpoint wants it."""

    id: UUID
    created_at: datetime
    deliveries: list[NewDelivery] = field(default_factory=list)


def ingest(connection: sa.Connection, batch: Sequence[NewEvent]) -> list[Ingested]:
    """Commit the events with a delivery for each endpoint that is enabled and subscribed; answer in the batch's order.

    For an autocommit connection of the hot pool: on return all of it is durable, on an error none of it is stored (but
    for an error that hides the commit's reply, after which nobody knows). Touches Postgres only. The events' ids must
    differ; their types are not checked here.
    """
    rows = [
        (
            event.id,
            event.workspace_id,
            event.type,
            event.content_type,
            event.payload,
            event.api_key_id,
            event.request_id,
            " ".join(patterns_for(event.type)),
            not is_reserved(event.type),
        )
        for event in batch
    ]
    found: dict[UUID, Ingested] = {}
    for event_id, created_at, delivery_ids, endpoint_ids in run(
        connection, _INGEST, [list(column) for column in zip(*rows, strict=True)]
    ).fetchall():
        deliveries = [NewDelivery(*pair) for pair in zip(delivery_ids, endpoint_ids, strict=True)]
        found[event_id] = Ingested(id=event_id, created_at=created_at, deliveries=deliveries)
    return [found[event.id] for event in batch]
