"""What sending needs of an endpoint, and what sending does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from psycopg import sql

from relay.store import audit
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

_LOAD = sql.SQL("""
select id, version, transport, url, signing, headers, certificate, certificate_key, secret,
    -- One that is over is not even opened: its key may be gone.
    case when previous_secret_expires_at > now() then previous_secret end,
    extract(epoch from previous_secret_expires_at)::float8, rate_per_second, burst, max_in_flight, timeout_ms, retry,
    deleted_at is not null
from relay.endpoints where id = any(%(ids)s)
""")

# In id order, and without the lock that would wait for every ingest transaction's foreign key.
_HOLD = sql.SQL("""
with h as (
    select p.id, now() + make_interval(secs => r.secs) as until
    from unnest(%(ids)s::uuid[], %(secs)s::float8[]) as r(id, secs)
    join relay.endpoints p on p.id = any(array[r.id])
    order by r.id for no key update of p
)
update relay.endpoints p set held_until = greatest(p.held_until, h.until) from h
where p.id = any(array[h.id])
""")

_STILL_DISABLED = sql.SQL("""
select id from relay.endpoints where id = any(%(ids)s) and not enabled order by id for share
""")

_DISABLE = sa.text("""
update relay.endpoints set enabled = false, disabled_at = now(), disabled_reason = :reason, updated_at = now()
where id = :id and enabled and kind = 0
returning workspace_id
""")

_LONGEST_TIMEOUT = sa.text("select max(timeout_ms) from relay.endpoints where deleted_at is null")
_SEVERAL_WORKSPACES = sa.text("select count(*) > 1 from (select 1 from relay.workspaces limit 2) as few")


class DestinationRow(NamedTuple):
    """An endpoint's settings as stored; secrets sealed."""

    id: UUID
    version: int
    transport: str
    url: str
    signing: str
    headers: dict[str, str]
    certificate: str | None
    certificate_key: bytes | None
    secret: bytes | None
    previous_secret: bytes | None
    #: Unix seconds, by the database's clock.
    previous_secret_expires_at: float | None
    rate_per_second: float
    burst: int
    max_in_flight: int | None
    timeout_ms: int | None
    retry: dict[str, Any]
    #: Its secrets are gone, and nothing is sent to it any more.
    deleted: bool


def load(connection: sa.Connection, ids: Sequence[UUID]) -> list[DestinationRow]:
    """Return the settings of those of `ids` that exist, deleted ones among them."""
    return [DestinationRow._make(row) for row in run(connection, _LOAD, {"ids": list(ids)}).fetchall()]


def hold(connection: sa.Connection, seconds: Mapping[UUID, float]) -> None:
    """Hold endpoints back for so many seconds from now; never shorten a hold."""
    run(connection, _HOLD, {"ids": list(seconds), "secs": list(seconds.values())})


def lock_disabled(connection: sa.Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Return which of `ids` are disabled, and keep each so until the transaction ends.

    An enable either waits for the caller's pause, and then wakes its rows, or is seen here.
    """
    return {row[0] for row in run(connection, _STILL_DISABLED, {"ids": sorted(ids)}).fetchall()}


def disable(connection: sa.Connection, endpoint_id: UUID, *, reason: str, delivery_id: UUID | None) -> bool:
    """Disable an endpoint for its own answers, with an audit record; False where that was done already.

    `delivery_id` is the one whose answer did it, if it was one.
    An implicit endpoint (of jobs) is never disabled.
    """
    workspace_id = connection.execute(_DISABLE, {"id": endpoint_id, "reason": reason}).scalar_one_or_none()
    if workspace_id is None:
        return False
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor="relay",
        action="endpoint.disabled",
        target=f"endpoint:{endpoint_id}",
        before={"enabled": True},
        after={"enabled": False, "reason": reason} | ({} if delivery_id is None else {"delivery_id": str(delivery_id)}),
    )
    return True


def longest_timeout_ms(connection: sa.Connection) -> int:
    """Return the largest total time-out that an endpoint has of its own, in milliseconds; 0 where none has."""
    return int(connection.execute(_LONGEST_TIMEOUT).scalar_one() or 0)


def several_workspaces(connection: sa.Connection) -> bool:
    """Return whether this installation has more than one workspace."""
    return bool(connection.execute(_SEVERAL_WORKSPACES).scalar_one())
