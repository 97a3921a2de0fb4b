"""A test of an endpoint: one event of Relay's own making, with one delivery, for exactly this endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from relay.core.model import EventSource

if TYPE_CHECKING:
    from uuid import UUID

    from relay.store.endpoint_changes import By

#: The type of a test's event.
TEST_TYPE = "relay.test"

# Born as every delivery is: pending, due now, not announced. What tells it from others is its event's source.
_COMMIT = sa.text("""
with e as (
    insert into relay.events (
        id, workspace_id, type, source, content_type, payload, api_key_id, request_id, delivery_ids)
    values (:event_id, :workspace_id, :type, :source, 'application/json', :payload, :api_key_id, :request_id,
        array[cast(:delivery_id as uuid)])
)
insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type)
values (:delivery_id, :workspace_id, :event_id, :endpoint_id, :type)
""")
# An attempt without a number is a deferral. None is older than its delivery.
_IS_TRIED = sa.text("""
select d.finished_at is not null or exists (
    select 1 from relay.delivery_attempts a where a.delivery_id = d.id and a.at >= d.created_at and a.number is not null
)
from relay.deliveries d where d.id = :id and d.workspace_id = :workspace_id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTest:
    """A test that is not stored yet."""

    event_id: UUID
    delivery_id: UUID
    payload: bytes
    api_key_id: UUID | None


def commit(connection: sa.Connection, by: By, test: NewTest) -> None:
    """Store a test of a locked endpoint, and its record."""
    connection.execute(
        _COMMIT,
        {
            "event_id": test.event_id,
            "delivery_id": test.delivery_id,
            "workspace_id": by.workspace_id,
            "endpoint_id": by.endpoint_id,
            "type": TEST_TYPE,
            "source": int(EventSource.TEST),
            "payload": test.payload,
            "api_key_id": test.api_key_id,
            "request_id": by.request_id,
        },
    )
    by.write_audit(connection, "endpoint.tested", after={"delivery_id": str(test.delivery_id)})


def is_tried(connection: sa.Connection, *, workspace_id: UUID, delivery_id: UUID) -> bool:
    """Return whether a delivery has had an attempt, or came to its end without one."""
    return bool(connection.execute(_IS_TRIED, {"id": delivery_id, "workspace_id": workspace_id}).scalar_one_or_none())
