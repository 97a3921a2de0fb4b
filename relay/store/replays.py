"""Replays of many deliveries by filter, as their owners make, read and stop them.

The row is the job: nothing else tells a worker of it (see store/replay_steps.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from psycopg.types.json import Jsonb

from relay.core.filters import DeliveryFilter, parse_delivery_filter
from relay.store import audit
from relay.store.pages import Page, Position, page_of

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from relay.core.filters import TimeRange

#: The states of a job. The first two are unfinished.
WAITING: Final = "waiting"
RUNNING: Final = "running"
DONE: Final = "done"
CANCELED: Final = "canceled"
#: Its endpoint was deleted before it was done.
FAILED: Final = "failed"
STATES: Final = (WAITING, RUNNING, DONE, CANCELED, FAILED)

_COLUMNS: Final = "id, endpoint_id, filters, state, matched, replayed, skipped, created_at, finished_at"

# Two requests at once queue here, so that only one finds no unfinished job.
_LOCK_ENDPOINT = sa.text("""
select deleted_at is not null as deleted from relay.endpoints
where id = :endpoint_id and workspace_id = :workspace_id
for no key update
""")
_UNFINISHED = sa.text("""
select id from relay.replays
where finished_at is null and endpoint_id = :endpoint_id and workspace_id = :workspace_id
""")
_CREATE = sa.text(f"""
insert into relay.replays (id, workspace_id, endpoint_id, filters)
values (:id, :workspace_id, :endpoint_id, :filters)
returning {_COLUMNS}
""")
_GET = sa.text(f"select {_COLUMNS} from relay.replays where id = :id and workspace_id = :workspace_id")
_LOCK = sa.text(f"""
select {_COLUMNS} from relay.replays where id = :id and workspace_id = :workspace_id for no key update
""")
_CANCEL = sa.text(f"""
update relay.replays set state = 'canceled', finished_at = now(), lease_until = null
where id = :id and workspace_id = :workspace_id and finished_at is null
returning {_COLUMNS}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A job as its owner sees it."""

    id: UUID
    endpoint_id: UUID
    wanted: DeliveryFilter
    state: str
    #: Deliveries that met the filter so far: those sent again, and those that may not be any more.
    matched: int
    replayed: int
    skipped: int
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class By:
    """Who acts, for the WHERE clause and the audit log."""

    workspace_id: UUID
    actor: str
    request_id: str | None = None


class EndpointDeleted(Exception):
    """The endpoint is deleted: nothing can be sent to it again."""


class Unfinished(Exception):
    """The endpoint has a job that is not finished."""

    def __init__(self, replay_id: UUID) -> None:
        super().__init__(str(replay_id))
        self.replay_id = replay_id


def create(
    connection: sa.Connection, by: By, *, replay_id: UUID, endpoint_id: UUID, wanted: DeliveryFilter
) -> Replay | None:
    """Make a job; None where the workspace has no such endpoint. Raises EndpointDeleted and Unfinished."""
    parameters = {"endpoint_id": endpoint_id, "workspace_id": by.workspace_id}
    deleted = connection.execute(_LOCK_ENDPOINT, parameters).scalar_one_or_none()
    if deleted is None:
        return None
    if deleted:
        raise EndpointDeleted
    unfinished = connection.execute(_UNFINISHED, parameters).scalar()
    if unfinished is not None:
        raise Unfinished(unfinished)
    row = connection.execute(_CREATE, {"id": replay_id, "filters": Jsonb(wanted.to_json()), **parameters}).one()
    made = _replay(row)
    write_audit(connection, by, "replay.created", made.id, after={"endpoint_id": str(endpoint_id), **wanted.to_json()})
    return made


def get(connection: sa.Connection, *, workspace_id: UUID, replay_id: UUID) -> Replay | None:
    """Return the job, or None where this workspace has no such one."""
    row = connection.execute(_GET, {"id": replay_id, "workspace_id": workspace_id}).one_or_none()
    return None if row is None else _replay(row)


def list_page(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    endpoint_id: UUID | None,
    state: str | None,
    made: TimeRange,
    after: Position | None,
    limit: int,
) -> Page[Replay]:
    """Return up to `limit` jobs of the workspace, the newest first, from behind `after`."""
    asked = (
        ("workspace_id =", "workspace_id", workspace_id),
        ("endpoint_id =", "endpoint_id", endpoint_id),
        ("state =", "state", state),
        ("created_at >=", "since", made.since),
        ("created_at <", "until", made.until),
    )
    where = [f"{left} :{name}" for left, name, value in asked if value is not None]
    parameters: dict[str, Any] = {name: value for _, name, value in asked if value is not None}
    if after is not None:
        where.append("(created_at, id) < (:after_at, cast(:after_id as uuid))")
        parameters |= {"after_at": after.created_at, "after_id": after.id}
    # They are few, as each goes a month after its end: no index serves this.
    rows = connection.execute(
        sa.text(f"""
            select {_COLUMNS} from relay.replays where {" and ".join(where)}
            order by created_at desc, id desc limit :limit
        """),
        {**parameters, "limit": limit + 1},
    )
    return page_of([_replay(row) for row in rows], limit)


def cancel(connection: sa.Connection, by: By, *, replay_id: UUID) -> Replay | None:
    """Stop a job at the end of the batch under way; return it as it is then: a finished one is as it was."""
    parameters = {"id": replay_id, "workspace_id": by.workspace_id}
    row = connection.execute(_LOCK, parameters).one_or_none()
    if row is None or row.finished_at is not None:
        return None if row is None else _replay(row)
    after = _replay(connection.execute(_CANCEL, parameters).one())
    write_audit(connection, by, "replay.canceled", after.id, before={"state": row.state}, after=_counts(after))
    return after


def write_audit(
    connection: sa.Connection,
    by: By,
    action: str,
    replay_id: UUID,
    *,
    before: dict[str, object] | None = None,
    after: dict[str, object] | None = None,
) -> None:
    """Write the record of `action`, such as `replay.created`."""
    audit.write(
        connection,
        workspace_id=by.workspace_id,
        actor=by.actor,
        action=action,
        target=f"replay:{replay_id}",
        before=before,
        after=after,
        request_id=by.request_id,
    )


def _counts(replay: Replay) -> dict[str, object]:
    return {
        "state": replay.state,
        "matched": replay.matched,
        "replayed": replay.replayed,
        "skipped": replay.skipped,
    }


def _replay(row: sa.Row[Any]) -> Replay:
    return Replay(
        id=row.id,
        endpoint_id=row.endpoint_id,
        wanted=parse_delivery_filter(row.filters),
        state=row.state,
        matched=row.matched,
        replayed=row.replayed,
        skipped=row.skipped,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
