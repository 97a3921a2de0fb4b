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
# The two results are stacked and put together by the caller: a join of them would cost events times deliveries.
_INGEST = sql.SQL("""
with r as materialized (
    select id, workspace_id, type, content_type, payload, api_key_id, request_id,
        string_to_array(words, ' ') as patterns, everything
    from unnest(
        %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::bytea[], %s::uuid[], %s::text[], %s::text[], %s::bool[]
    ) as r(id, workspace_id, type, content_type, payload, api_key_id, request_id, words, everything)
),
e as (
    insert into relay.events (id, workspace_id, type, content_type, payload, api_key_id, request_id)
    select id, workspace_id, type, content_type, payload, api_key_id, request_id from r
    returning id, created_at
),
d as (
    insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type)
    select relay.uuid7(), r.workspace_id, r.id, p.id, r.type
    from r join relay.endpoints p on p.workspace_id = r.workspace_id
    where p.deleted_at is null and p.enabled and p.kind = 0
      and (p.event_types && r.patterns or (p.event_types = '{}' and r.everything))
    returning event_id, id, endpoint_id
)
select id, created_at, null::uuid, null::uuid from e
union all
select event_id, null, id, endpoint_id from d
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
    deliveries: list[tuple[UUID, NewDelivery]] = []
    for event_id, created_at, delivery_id, endpoint_id in run(
        connection, _INGEST, [list(column) for column in zip(*rows, strict=True)]
    ).fetchall():
        if delivery_id is None:
            found[event_id] = Ingested(id=event_id, created_at=created_at)
        else:
            deliveries.append((event_id, NewDelivery(delivery_id, endpoint_id)))
    for event_id, delivery in deliveries:
        found[event_id].deliveries.append(delivery)
    return [found[event.id] for event in batch]
