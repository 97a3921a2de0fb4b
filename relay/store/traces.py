"""The trace that an event belongs to, for processes that trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import sqlalchemy as sa

_OF = sql.SQL("""
select d.id, e.traceparent from relay.deliveries d join relay.events e on e.id = any(array[d.event_id])
where d.id = any(%(ids)s) and e.traceparent is not null
""")


def of(connection: sa.Connection, delivery_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return the `traceparent` of each of the deliveries whose event is traced."""
    return dict(run(connection, _OF, {"ids": list(delivery_ids)}).fetchall()) if delivery_ids else {}
