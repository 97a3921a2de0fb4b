"""What an endpoint's owner does to it: changes, enabling, disabling, ending. Each with its audit record.

The row is locked first, so that what is compared, changed and recorded is of one moment. NO KEY UPDATE: ingest's
foreign keys pass, and a worker's pause of a disabled endpoint's rows (see `destinations.lock_disabled`) does not.
Rows that are to move are not moved here: `wakes` takes the request in the same transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relay.core.model import BreakerState, Status
from relay.core.notices import ENDPOINT_DISABLED
from relay.store import audit, operational, wakes
from relay.store.endpoints import COLUMNS, Endpoint, Fields, audited, endpoint_of, get
from relay.store.operational import Notice
from relay.store.tables import endpoints

if TYPE_CHECKING:
    from uuid import UUID

_LOCK = sa.text(f"""
select {COLUMNS} from relay.endpoints p
where p.id = :id and p.workspace_id = :workspace_id and p.deleted_at is null
for no key update
""")
# What in-flight attempts report under the old generation no longer counts.
_CLOSE_BREAKER = sa.text("""
update relay.endpoints
set breaker_state = 0, breaker_failures = 0, breaker_trips = 0, breaker_open_until = null, probe_delivery_id = null,
    probe_deadline = null, breaker_generation = breaker_generation + 1, held_until = null
where id = :id and workspace_id = :workspace_id
returning breaker_generation
""")
_NOTE_CLOSED = sa.text("""
insert into relay.breaker_changes (endpoint_id, generation, state) values (:id, :generation, 0) on conflict do nothing
""")
# Requests in flight hold theirs in memory; nothing else needs a secret of an endpoint that is gone.
_DELETE = sa.text("""
update relay.endpoints
set deleted_at = now(), updated_at = now(), enabled = false, secret = null, previous_secret = null,
    previous_secret_expires_at = null, public_key = null, previous_public_key = null, headers = '{}',
    certificate = null, certificate_key = null
where id = :id and workspace_id = :workspace_id and deleted_at is null
""")

#: Columns whose values show in the audit log under another name, and those that show not at all.
_AUDITED_AS: Final = {"headers": "header_names", "certificate": "client_certificate", "certificate_key": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class By:
    """Who acts on which endpoint, for the WHERE clause and the audit log."""

    workspace_id: UUID
    endpoint_id: UUID
    actor: str
    request_id: str | None = None

    def write_audit(
        self,
        connection: sa.Connection,
        action: str,
        *,
        before: dict[str, object] | None = None,
        after: dict[str, object] | None = None,
    ) -> None:
        """Write the record of `action`, such as `endpoint.changed`."""
        audit.write(
            connection,
            workspace_id=self.workspace_id,
            actor=self.actor,
            action=action,
            target=f"endpoint:{self.endpoint_id}",
            before=before,
            after=after,
            request_id=self.request_id,
        )


def lock(connection: sa.Connection, by: By) -> Endpoint | None:
    """Lock the endpoint until the transaction ends; None where this workspace has no such one (any more)."""
    row = connection.execute(_LOCK, _key(by)).mappings().one_or_none()
    return None if row is None else endpoint_of(row)


def change(connection: sa.Connection, by: By, before: Endpoint, fields: Fields) -> None:
    """Change what differs of a locked endpoint, and do what follows from it.

    A new URL closes the breaker and ends a hold; so does enabling, which counts failures anew. Both, and a new rate,
    ask for waiting rows to be brought forward. What is given and does not differ is no change; header values and keys,
    which cannot be compared, always are one.
    """
    sealed = {"headers", "certificate_key"}
    moved: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if (name in sealed and not _stays_empty(before, name, value))
        or (name not in sealed and value != getattr(before, name))
    }
    if not moved:
        return
    names = {name: _AUDITED_AS.get(name, name) for name in moved}
    if "enabled" in moved:
        moved |= _switched(enabled=moved["enabled"])
    connection.execute(
        sa.update(endpoints)
        .where(endpoints.c.id == by.endpoint_id, endpoints.c.workspace_id == by.workspace_id)
        .values(**moved, updated_at=sa.func.now())
    )
    after = get(connection, workspace_id=by.workspace_id, endpoint_id=by.endpoint_id)
    assert after is not None, "its row is locked"
    shown = sorted({shown for shown in names.values() if shown is not None})
    action = "endpoint.changed"
    if set(names) == {"enabled"}:
        action = "endpoint.enabled" if after.enabled else "endpoint.disabled"
    by.write_audit(connection, action, before=audited(before, shown), after=audited(after, shown))
    if before.enabled and not after.enabled:
        operational.tell(connection, [_disabled_notice(by, after)])
    enabled = after.enabled and not before.enabled
    if enabled or "url" in moved:
        close_breaker(connection, by, before)
    if after.enabled and (enabled or "url" in moved or "rate_per_second" in moved):
        wakes.ask_to_bring_forward(connection, by.endpoint_id)


def reset_breaker(connection: sa.Connection, by: By, before: Endpoint) -> None:
    """Close the breaker of a locked endpoint, end its hold, and ask for its waiting rows; recorded in any case."""
    close_breaker(connection, by, before)
    if before.enabled:
        wakes.ask_to_bring_forward(connection, by.endpoint_id)
    by.write_audit(connection, "endpoint.breaker_reset", before={"breaker": before.breaker_state.name.lower()})


def close_breaker(connection: sa.Connection, by: By, before: Endpoint) -> None:
    """Close the breaker of a locked endpoint and end its hold; into the history only where it was not closed."""
    generation = connection.execute(_CLOSE_BREAKER, _key(by)).scalar_one()
    if before.breaker_state is not BreakerState.CLOSED:
        connection.execute(_NOTE_CLOSED, {"id": by.endpoint_id, "generation": generation})


def retry_now(connection: sa.Connection, by: By) -> None:
    """Ask for all rows of a locked endpoint that wait, its retries among them, to be brought forward at its rate."""
    wakes.ask_to_bring_forward(connection, by.endpoint_id, retries_too=True)
    by.write_audit(connection, "endpoint.retry_now")


def cancel_pending(connection: sa.Connection, by: By) -> None:
    """Ask for the pending rows of a locked endpoint to be canceled."""
    wakes.ask_to_end(connection, by.endpoint_id, Status.CANCELED)
    by.write_audit(connection, "endpoint.cancel_pending")


def delete(connection: sa.Connection, by: By, before: Endpoint) -> None:
    """End a locked endpoint: its secrets go at once, its pending rows die, its history stays."""
    connection.execute(_DELETE, _key(by))
    wakes.ask_to_end(connection, by.endpoint_id, Status.DEAD)
    by.write_audit(connection, "endpoint.deleted", before=audited(before))


def _disabled_notice(by: By, endpoint: Endpoint) -> Notice:
    return Notice(
        workspace_id=by.workspace_id,
        type=ENDPOINT_DISABLED,
        endpoint_id=by.endpoint_id,
        data={"url": endpoint.url, "reason": endpoint.disabled_reason},
    )


def _key(by: By) -> dict[str, object]:
    return {"id": by.endpoint_id, "workspace_id": by.workspace_id}


def _switched(*, enabled: bool) -> dict[str, Any]:
    """Return what goes along with the switch."""
    if enabled:
        return {"disabled_at": None, "disabled_reason": None, "failing_since": None, "failing_attempts": 0}
    return {"disabled_at": sa.func.now(), "disabled_reason": "manual"}


def _stays_empty(before: Endpoint, name: str, value: object) -> bool:
    """Whether a sealed column has nothing in it before and after."""
    had = before.header_names if name == "headers" else before.certificate
    return not had and not value
