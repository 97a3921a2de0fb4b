"""Leases that ran out: the rows of workers that died, or were paused too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from relay.store.engine import run

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    import sqlalchemy as sa

_EXPIRED = sql.SQL("""
select d.id, d.lease_token, d.attempt_count, d.budget_from, d.generation, p.retry, now(), d.workspace_id, d.endpoint_id,
    d.event_id, d.event_type
from relay.deliveries d join relay.endpoints p on p.id = any(array[d.endpoint_id])
where d.status = 1 and d.lease_until < now()
order by d.lease_until limit %(limit)s
for update of d skip locked
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredLease:
    """A delivery whose worker did not come back in time."""

    delivery_id: UUID
    lease_token: UUID
    attempt_count: int
    budget_from: int
    generation: int
    #: The endpoint's retry policy, as stored.
    retry: dict[str, object]
    now: datetime
    workspace_id: UUID
    endpoint_id: UUID
    event_id: UUID
    event_type: str


def lock_expired(connection: sa.Connection, *, limit: int) -> list[ExpiredLease]:
    """Lock and return up to `limit` rows whose lease ran out. The caller records them in the same transaction."""
    return [
        ExpiredLease(
            delivery_id=row[0],
            lease_token=row[1],
            attempt_count=row[2],
            budget_from=row[3],
            generation=row[4],
            retry=row[5],
            now=row[6],
            workspace_id=row[7],
            endpoint_id=row[8],
            event_id=row[9],
            event_type=row[10],
        )
        for row in run(connection, _EXPIRED, {"limit": limit}).fetchall()
    ]
