"""Relay's own events: told to endpoints that name them, in the transaction of what they tell, through the same outbox.

Where nobody named the type nothing is stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from relay.core.event_types import is_reserved, patterns_for
from relay.core.model import DeadReason, EventSource
from relay.core.notices import DELIVERY_DEAD
from relay.store import arrays
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import sqlalchemy as sa

_TELL = sql.SQL("""
with n as materialized (
    select relay.uuid7() as id, r.workspace_id, r.type, r.payload, f.delivery_ids, f.endpoint_ids
    from unnest(%(workspaces)s::uuid[], %(types)s::text[], %(payloads)s::text[], %(words)s::text[], %(about)s::uuid[])
        as r(workspace_id, type, payload, words, about)
    cross join lateral (
        select array_agg(relay.uuid7()) as delivery_ids, array_agg(p.id) as endpoint_ids
        from relay.endpoints p
        where p.workspace_id = r.workspace_id and p.deleted_at is null and p.enabled and p.kind = 0
          and p.id <> r.about and p.event_types && string_to_array(r.words, ' ')
    ) f
    where f.delivery_ids is not null
),
e as (
    insert into relay.events (id, workspace_id, type, source, content_type, payload, delivery_ids)
    select id, workspace_id, type, %(source)s, 'application/json', convert_to(payload, 'UTF8'), delivery_ids from n
)
insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type)
select f.id, n.workspace_id, n.id, f.endpoint_id, n.type
from n cross join lateral unnest(n.delivery_ids, n.endpoint_ids) as f(id, endpoint_id)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened to an endpoint."""

    workspace_id: UUID
    #: A type of Relay's own, such as `relay.endpoint.disabled`.
    type: str
    #: The endpoint that it tells of, which does not get it.
    endpoint_id: UUID
    #: What is told; JSON values.
    data: Mapping[str, object]


def death(
    *,
    workspace_id: UUID,
    endpoint_id: UUID,
    delivery_id: UUID,
    event_id: str,
    event_type: str,
    reason: str | None,
    attempt_count: int,
    code: str | None = None,
    status: int | None = None,
) -> Notice | None:
    """Make the notice of a delivery that was given up; None where it is not told: of Relay's own events, and where the
    endpoint was deleted, which whoever did it knows. `code` and `status` are the last attempt's."""
    if is_reserved(event_type) or reason == DeadReason.ENDPOINT_DELETED:
        return None
    return Notice(
        workspace_id=workspace_id,
        type=DELIVERY_DEAD,
        endpoint_id=endpoint_id,
        data={
            "delivery_id": str(delivery_id),
            "event_id": event_id,
            "event_type": event_type,
            "reason": reason,
            "attempt_count": attempt_count,
            "code": code,
            "status": status,
        },
    )


def tell(connection: sa.Connection, notices: Sequence[Notice | None]) -> int:
    """Store the notices for the endpoints of their workspaces that name the type; return how many deliveries that made."""
    told = [notice for notice in notices if notice is not None]
    if not told:
        return 0
    payloads = [
        json.dumps({"type": notice.type, "data": {"endpoint_id": str(notice.endpoint_id), **notice.data}})
        for notice in told
    ]
    return run(
        connection,
        _TELL,
        {
            "workspaces": arrays.uuids([notice.workspace_id for notice in told]),
            "types": arrays.texts([notice.type for notice in told]),
            "payloads": arrays.texts(payloads),
            "words": arrays.texts([" ".join(patterns_for(notice.type)) for notice in told]),
            "about": arrays.uuids([notice.endpoint_id for notice in told]),
            "source": int(EventSource.OPERATIONAL),
        },
    ).rowcount
