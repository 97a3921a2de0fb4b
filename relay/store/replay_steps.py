"""The work of replays: whoever has the lease of a job's row works on it, a batch a transaction.

What was done stands in the row, committed with the doing. The lease's own end is the fence: it changes with every
batch, so a worker that comes back too late finds another and stops. A worker that dies loses at most the batch that it
had not committed, and another goes on behind the last one that it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relay.core.filters import parse_delivery_filter
from relay.core.model import Status
from relay.store.replays import DONE, FAILED, RUNNING, By, write_audit

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

_ANY_FREE = sa.text("""
select 1 from relay.replays where finished_at is null and (lease_until is null or lease_until <= now()) limit 1
""")
# The one that was left alone for longest: a lease that was given back ends at that moment.
_TAKE = sa.text("""
update relay.replays r set state = 'running', lease_until = clock_timestamp() + make_interval(secs => :lease)
from (
    select id from relay.replays
    where finished_at is null and (lease_until is null or lease_until <= now())
    order by coalesce(lease_until, created_at), id limit 1
    for no key update skip locked
) free
where r.id = free.id
returning r.id, r.lease_until
""")
_RELEASE = sa.text("""
update relay.replays set lease_until = clock_timestamp() where id = :id and lease_until = :lease_until
""")
# The endpoint is not deleted while a batch is under way: what ends its pending rows would miss those not committed.
_HELD = sa.text("""
select r.workspace_id, r.endpoint_id, r.filters, r.created_at, r.after_created_at, r.after_id, r.paced_until,
    p.rate_per_second, p.deleted_at is not null as endpoint_deleted
from relay.replays r join relay.endpoints p on p.id = r.endpoint_id
where r.id = :id and r.lease_until = :lease_until and r.finished_at is null
for no key update of r for share of p
""")
# `looked` ends the batch, `matched` locks what is still as wanted, in the order that all who lock several rows keep.
# What died since the job was made is not among it: a row that it has sent again, and that dies again, is not taken
# twice. Its evidence stays with the row.
_BATCH: Final = """
with looked as materialized (
    select id, created_at from relay.deliveries
    where {where} order by created_at, id limit {batch}
),
matched as materialized (
    select d.id, d.created_at, d.generation from looked l join relay.deliveries d on d.id = l.id
    where {wanted}
    order by d.id for no key update of d
),
taken as (
    select id, row_number() over (order by created_at, id) - 1 as place from matched where generation < :max_replays
),
replayed as (
    update relay.deliveries d
    set status = 0, reason = null, generation = generation + 1, budget_from = attempt_count,
        due_at = greatest(now(), cast(:paced_until as timestamptz))
            + make_interval(secs => t.place / cast(:rate as float8)),
        announced_at = null, lease_token = null, lease_until = null, expires_at = null, finished_at = null,
        deferred_reason = null, deferred_since = null, deferred_count = 0
    from taken t where d.id = t.id
    returning d.due_at
)
select (select count(*) from looked) as looked, (select count(*) from matched) as matched,
    (select count(*) from replayed) as replayed,
    (select max(due_at) from replayed) + make_interval(secs => 1 / cast(:rate as float8)) as paced_until,
    last.created_at, last.id
from (values (true)) as one
left join lateral (select created_at, id from looked order by created_at desc, id desc limit 1) last on true
"""
_ADVANCE = sa.text("""
update relay.replays
set matched = matched + :matched, replayed = replayed + :replayed, skipped = skipped + :matched - :replayed,
    after_created_at = coalesce(:after_created_at, after_created_at), after_id = coalesce(:after_id, after_id),
    paced_until = coalesce(:paced_until, paced_until),
    state = :state, finished_at = case when :finished then now() end,
    lease_until = case when :finished then null else clock_timestamp() + make_interval(secs => :lease) end
where id = :id
returning workspace_id, matched, replayed, skipped, lease_until
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A job's lease: good until that moment, by the database's clock, and for whoever knows it."""

    replay_id: UUID
    lease_until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one batch came to."""

    replayed: int
    #: None where the job is finished.
    held: Held | None


def any_free(connection: sa.Connection) -> bool:
    """Whether there is a job to take."""
    return connection.execute(_ANY_FREE).one_or_none() is not None


def take(connection: sa.Connection, *, lease_secs: float) -> Held | None:
    """Lease the unfinished job that was left alone for longest; None where there is none."""
    row = connection.execute(_TAKE, {"lease": lease_secs}).one_or_none()
    return None if row is None else Held(replay_id=row.id, lease_until=row.lease_until)


def release(connection: sa.Connection, held: Held) -> None:
    """Give the lease back, so that another may go on at once."""
    connection.execute(_RELEASE, {"id": held.replay_id, "lease_until": held.lease_until})


def step(connection: sa.Connection, held: Held, *, batch: int, max_replays: int, lease_secs: float) -> Step:
    """Look at the job's next `batch` deliveries and send again those that are wanted, all in this one transaction.

    They come back one after the other at the endpoint's rate, behind those of the batches before. Without the lease, or
    once the job is canceled, nothing is done; where the endpoint is deleted the job fails.
    """
    identity = {"id": held.replay_id, "lease_until": held.lease_until}
    job = connection.execute(_HELD, identity).one_or_none()
    if job is None:
        return Step(replayed=0, held=None)
    if job.endpoint_deleted:
        return _advance(connection, held, state=FAILED, lease_secs=lease_secs)
    statement, parameters = _batch(job, batch)
    found = connection.execute(statement, parameters | {"max_replays": max_replays}).one()
    return _advance(
        connection,
        held,
        state=RUNNING if found.looked == batch else DONE,
        lease_secs=lease_secs,
        matched=found.matched,
        replayed=found.replayed,
        after_created_at=found.created_at,
        after_id=found.id,
        paced_until=found.paced_until,
    )


def _batch(job: sa.Row[Any], batch: int) -> tuple[sa.TextClause, dict[str, Any]]:
    """Return the statement for a job's next batch: what an index leads to, and what is wanted of that."""
    wanted = parse_delivery_filter(job.filters)
    assert wanted.status is not None
    where = ["endpoint_id = :endpoint_id", "workspace_id = :workspace_id", "created_at <= :began"]
    condition = ["d.status + 0 = :status", "d.finished_at <= :began"]
    parameters: dict[str, Any] = {
        "endpoint_id": job.endpoint_id,
        "workspace_id": job.workspace_id,
        "began": job.created_at,
        "status": int(wanted.status),
        "paced_until": job.paced_until,
        "rate": job.rate_per_second,
    }
    if wanted.status is Status.DEAD:
        # As a constant: only then does the index of dead rows come into question.
        where.append("status = 3")
    for clause, name, value in (
        ("created_at >= :since", "since", wanted.made.since),
        ("created_at < :until", "until", wanted.made.until),
    ):
        if value is not None:
            where.append(clause)
            parameters[name] = value
    if job.after_id is not None:
        where.append("(created_at, id) > (:after_created_at, cast(:after_id as uuid))")
        parameters |= {"after_created_at": job.after_created_at, "after_id": job.after_id}
    for name in ("event_type", "reason"):
        value = getattr(wanted, name)
        if value is not None:
            condition.append(f"d.{name} = :{name}")
            parameters[name] = value
    text = _BATCH.format(where=" and ".join(where), wanted=" and ".join(condition), batch=batch)
    return sa.text(text), parameters


def _advance(
    connection: sa.Connection,
    held: Held,
    *,
    state: str,
    lease_secs: float,
    matched: int = 0,
    replayed: int = 0,
    after_created_at: datetime | None = None,
    after_id: UUID | None = None,
    paced_until: datetime | None = None,
) -> Step:
    """Write what a batch came to, and the job's end where this is it."""
    row = connection.execute(
        _ADVANCE,
        {
            "id": held.replay_id,
            "state": state,
            "finished": state != RUNNING,
            "lease": lease_secs,
            "matched": matched,
            "replayed": replayed,
            "after_created_at": after_created_at,
            "after_id": after_id,
            "paced_until": paced_until,
        },
    ).one()
    if state == RUNNING:
        return Step(replayed=replayed, held=Held(replay_id=held.replay_id, lease_until=row.lease_until))
    counts = {"state": state, "matched": row.matched, "replayed": row.replayed, "skipped": row.skipped}
    by = By(workspace_id=row.workspace_id, actor="relay")
    write_audit(connection, by, "replay.finished", held.replay_id, after=counts)
    return Step(replayed=replayed, held=None)
