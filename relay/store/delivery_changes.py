"""What a delivery's owner does to it: send it again, or call it off. Each with its audit record.

The row is locked first, waiting for whoever holds it, and judged as it is then: of two replays at once the second finds
it pending, and a claim that came first makes a cancel too late. A claim that comes second passes over the locked row
and, once this is committed, finds what was decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from relay.core.model import Status
from relay.core.replay import Refusal, cancel_refusal, replay_refusal
from relay.store import audit
from relay.store.deliveries import COLUMNS, Delivery, from_row

if TYPE_CHECKING:
    from uuid import UUID

_LOCK = sa.text(f"""
select {COLUMNS}, p.deleted_at is not null as endpoint_deleted
from relay.deliveries d join relay.endpoints p on p.id = d.endpoint_id
where d.id = :id and d.workspace_id = :workspace_id
for no key update of d
""")
# The evidence of the attempt that it died of stays until a later one has its own: the log's window may be over.
_REPLAY = sa.text(f"""
update relay.deliveries d
set status = 0, reason = null, generation = generation + 1, budget_from = attempt_count, due_at = now(),
    announced_at = null, lease_token = null, lease_until = null, expires_at = null, finished_at = null,
    deferred_reason = null, deferred_since = null, deferred_count = 0
where d.id = :id and d.workspace_id = :workspace_id
returning {COLUMNS}
""")
_CANCEL = sa.text(f"""
update relay.deliveries d
set status = 4, announced_at = null, lease_token = null, finished_at = now(),
    deferred_reason = null, deferred_since = null, deferred_count = 0
where d.id = :id and d.workspace_id = :workspace_id and status = 0
returning {COLUMNS}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class By:
    """Who acts on which delivery, for the WHERE clause and the audit log."""

    workspace_id: UUID
    delivery_id: UUID
    actor: str
    request_id: str | None = None


def replay(connection: sa.Connection, by: By, *, max_replays: int, force: bool = False) -> Delivery | Refusal | None:
    """Make a finished delivery pending, due now, with a fresh budget and without expiry: same id, next generation.

    Returns it as it is then, without its log; why it was left alone; or None where the workspace has no such delivery.
    `force` takes a delivered one too. It may be replayed `max_replays` times.
    """
    found = _lock(connection, by)
    if found is None:
        return None
    before, endpoint_deleted = found
    refusal = replay_refusal(
        before.status,
        generation=before.generation,
        max_replays=max_replays,
        endpoint_deleted=endpoint_deleted,
        force=force,
    )
    if refusal is not None:
        return refusal
    return _change(connection, by, before, _REPLAY, "delivery.replayed")


def cancel(connection: sa.Connection, by: By) -> Delivery | Refusal | None:
    """Call a pending delivery off: once this is committed, no request for it starts; an earlier one may have arrived.

    Returns it as it is then, without its log, also where it was canceled before; why it was left alone; or None where
    the workspace has no such delivery.
    """
    found = _lock(connection, by)
    if found is None:
        return None
    before, _ = found
    refusal = cancel_refusal(before.status)
    if refusal is not None:
        return refusal
    if before.status is Status.CANCELED:
        return before
    return _change(connection, by, before, _CANCEL, "delivery.canceled")


def _lock(connection: sa.Connection, by: By) -> tuple[Delivery, bool] | None:
    """Lock the delivery; return it, and whether its endpoint was deleted."""
    row = connection.execute(_LOCK, _key(by)).one_or_none()
    return None if row is None else (from_row(row), bool(row.endpoint_deleted))


def _change(connection: sa.Connection, by: By, before: Delivery, statement: sa.TextClause, action: str) -> Delivery:
    after = from_row(connection.execute(statement, _key(by)).one())
    audit.write(
        connection,
        workspace_id=by.workspace_id,
        actor=by.actor,
        action=action,
        target=f"delivery:{by.delivery_id}",
        before=_audited(before),
        after=_audited(after),
        request_id=by.request_id,
    )
    return after


def _key(by: By) -> dict[str, Any]:
    return {"id": by.delivery_id, "workspace_id": by.workspace_id}


def _audited(delivery: Delivery) -> dict[str, object]:
    return {"status": delivery.status.label, "reason": delivery.reason, "generation": delivery.generation}
