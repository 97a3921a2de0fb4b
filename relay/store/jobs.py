"""Jobs: one request to any URL. A job is an event of its own with one delivery, and a row that says what to send where.

The delivery's endpoint is implied: one for each workspace and origin, made by the first job that goes there. It carries
breaker, rate and caps, so that nothing on a delivery's way is special to jobs (B-111).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.core import backoff
from relay.core.errors import Unavailable
from relay.core.model import EventSource
from relay.store import audit, idempotency
from relay.store.engine import run, transaction
from relay.store.events import Taken
from relay.store.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from relay.store.idempotency import Claim

#: The type of a job's event: no subscription is asked, and no pattern of a producer's means it.
JOB_TYPE: Final = "job"
#: Times that a key may be found taken, and then free again, before the caller is asked to come back.
_TRIES: Final = 10

# The origin's row is locked against the sweep that removes unused ones. With a key that is taken nothing is stored, and
# without the origin nothing is found: two results that the last line tells apart.
_STORE = sql.SQL("""
with p as materialized (
    select id from relay.endpoints
    where workspace_id = %(workspace_id)s and origin = %(origin)s and kind = 1 and deleted_at is null
    for key share
),
r as materialized (
    select p.id as endpoint_id, now() + make_interval(secs => %(delay)s) as due_at,
        convert_to('{"id":"' || %(id)s::uuid::text || '","state":"queued","created_at":"'
            || to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') || '","due_at":"'
            || to_char((now() + make_interval(secs => %(delay)s)) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
            || E'"}\\n', 'UTF8') as answer
    from p
),
claimed as (
    insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response)
    select %(workspace_id)s, %(key)s::text, %(fingerprint)s::bytea, %(event_id)s, answer from r
    where %(key)s::text is not null
    on conflict (workspace_id, key) do nothing
    returning event_id
),
s as materialized (select * from r where %(key)s::text is null or exists (select 1 from claimed)),
e as (
    insert into relay.events (id, workspace_id, type, source, content_type, payload, api_key_id, request_id,
        idempotency_key, delivery_ids)
    select %(event_id)s, %(workspace_id)s, %(type)s, %(source)s, %(content_type)s, %(payload)s, %(api_key_id)s,
        %(request_id)s, %(key)s::text, array[%(id)s::uuid]
    from s
),
d as (
    insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, due_at, expires_at)
    select %(id)s, %(workspace_id)s, %(event_id)s, endpoint_id, %(type)s, due_at,
        now() + make_interval(secs => %(expires_in)s::float8)
    from s
),
j as (
    insert into relay.jobs (delivery_id, url, headers, headers_sealed, signing, max_attempts, timeout_ms)
    select %(id)s, %(url)s, %(headers)s::jsonb, %(headers_sealed)s, %(signing)s, %(max_attempts)s, %(timeout_ms)s::int4
    from s
)
select r.answer, exists (select 1 from s) from r
""")
_MAKE_ORIGIN = sql.SQL("""
insert into relay.endpoints (id, workspace_id, kind, origin, url, description, signing, retry)
values (%(id)s, %(workspace_id)s, 1, %(origin)s, %(origin)s || '/', 'Implied by jobs to this origin.', 'none', %(retry)s)
on conflict (workspace_id, origin) where kind = 1 do nothing
""")
# A previous secret is left out once its time is over: nothing sweeps it.
_LOAD = sql.SQL("""
select j.delivery_id, d.workspace_id, j.url, j.headers, j.headers_sealed, j.signing, j.max_attempts, j.timeout_ms,
    w.job_secret,
    case when w.job_previous_secret_expires_at > now() then w.job_previous_secret end,
    extract(epoch from w.job_previous_secret_expires_at)::float8
from relay.jobs j join relay.deliveries d on d.id = j.delivery_id
left join relay.workspaces w on w.id = d.workspace_id and j.signing <> 'none'
where j.delivery_id = any(%(ids)s)
""")
_BUDGETS = sql.SQL("select delivery_id, max_attempts from relay.jobs where delivery_id = any(%(ids)s)")
_GET = sa.text("""
select j.url, j.headers, j.signing, j.max_attempts, j.timeout_ms, e.content_type, d.expires_at,
    d.attempt_count > d.budget_from as is_tried
from relay.jobs j join relay.deliveries d on d.id = j.delivery_id join relay.events e on e.id = d.event_id
where j.delivery_id = :id and d.workspace_id = :workspace_id
""")
_HAS_SECRET = sa.text("select job_secret is not null from relay.workspaces where id = :workspace_id")
# One statement: of two rotations at once the second finds the first one's secret, and makes that the old one. Its time
# is read once the row is its own, so that the later expiry belongs to the later rotation, whichever began first.
_ROTATE_SECRET = sa.text("""
update relay.workspaces
set job_previous_secret = case when :overlap > 0 then job_secret end,
    job_previous_secret_expires_at = case when :overlap > 0 and job_secret is not null
        then clock_timestamp() + make_interval(secs => :overlap) end,
    job_secret = :secret
where id = :workspace_id
returning job_previous_secret_expires_at
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job that was checked and is not yet stored."""

    #: The delivery's, which the job is known by.
    id: UUID
    event_id: UUID
    workspace_id: UUID
    #: In its normalised form, and where that leads: scheme, host and port.
    url: str
    origin: str
    #: Name and value, in order, repeats among them; the values sealed and in base64 where `headers_sealed` says so.
    headers: list[tuple[str, str]]
    headers_sealed: bool
    signing: str
    max_attempts: int
    #: None: the installation's.
    timeout_ms: int | None
    #: As it came; empty where none did.
    content_type: str
    payload: bytes
    api_key_id: UUID | None
    request_id: str | None
    #: Seconds from the commit on until it is due.
    delay: float = 0.0
    #: Seconds from the commit on after which it is given up.
    expires_in: float | None = None
    claim: Claim | None = None


class JobRow(NamedTuple):
    """What sending a job needs beside its delivery, as stored; secrets sealed for the workspace."""

    delivery_id: UUID
    workspace_id: UUID
    url: str
    #: Pairs of name and value; values sealed for the delivery where `headers_sealed` says so.
    headers: list[list[str]]
    headers_sealed: bool
    signing: str
    max_attempts: int
    timeout_ms: int | None
    #: None where the job is not signed, too.
    secret: bytes | None
    previous_secret: bytes | None
    #: Unix seconds, by the database's clock.
    previous_secret_expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its owner reads it, beside its delivery (`deliveries.get`)."""

    url: str
    #: Of its headers, in order; values are not shown.
    header_names: list[str]
    signing: str
    max_attempts: int
    timeout_ms: int | None
    content_type: str
    expires_at: datetime | None
    #: Whether it has had an attempt since it was made or last replayed.
    is_tried: bool


def enqueue(connection: sa.Connection, job: NewJob, *, retention_secs: int) -> Taken:
    """Store a job, or answer as before where its idempotency key was used by the same request.

    For an autocommit connection of the hot pool: durable on return. Raises KeyReused where the key belongs to another
    request; nothing is stored then.
    """
    parameters = _parameters(job)
    for _ in range(_TRIES):
        found = run(connection, _STORE, parameters).fetchone()
        if found is None:
            with transaction(connection):
                run(connection, _MAKE_ORIGIN, _origin_of(job))
                found = run(connection, _STORE, parameters).fetchone()
            if found is None:
                # Made by another, and removed again in between.
                continue
        answer, is_stored = found
        if is_stored or job.claim is None:
            return Taken(answer, replayed=False)
        kept = idempotency.answers(
            connection, {0: job.claim}, workspace_id=job.workspace_id, retention_secs=retention_secs
        )
        if kept:
            return Taken(kept[0], replayed=True)
    raise Unavailable("The idempotency key is being used and given up all the time: try again.")


def load(connection: sa.Connection, ids: Sequence[UUID]) -> dict[UUID, JobRow]:
    """Return what those of the deliveries `ids` that are jobs are to be sent as."""
    rows = run(connection, _LOAD, {"ids": list(ids)})
    return {row[0]: JobRow._make(row) for row in rows}


def budgets(connection: sa.Connection, ids: Sequence[UUID]) -> dict[UUID, int]:
    """Return how many attempts those of the deliveries `ids` that are jobs may have."""
    return {row[0]: row[1] for row in run(connection, _BUDGETS, {"ids": list(ids)})}


def get(connection: sa.Connection, *, workspace_id: UUID, job_id: UUID) -> Job | None:
    """Return the job, or None where this workspace has no such one."""
    row = connection.execute(_GET, {"id": job_id, "workspace_id": workspace_id}).mappings().one_or_none()
    if row is None:
        return None
    fields = dict(row)
    return Job(header_names=[name for name, _ in fields.pop("headers")], **fields)


def has_secret(connection: sa.Connection, *, workspace_id: UUID) -> bool:
    """Return whether the workspace has a secret to sign jobs with."""
    return bool(connection.execute(_HAS_SECRET, {"workspace_id": workspace_id}).scalar_one_or_none())


def rotate_secret(
    connection: sa.Connection,
    *,
    workspace_id: UUID,
    sealed: bytes,
    overlap_secs: float,
    actor: str,
    request_id: str | None,
) -> datetime | None:
    """Put a new job secret in place and record that; return until when the old one signs too, None where it does not.

    What was old before goes. Nothing ends the overlap but its time.
    """
    expires_at: datetime | None = connection.execute(
        _ROTATE_SECRET, {"workspace_id": workspace_id, "secret": sealed, "overlap": float(overlap_secs)}
    ).scalar_one()
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="job_secret.rotated",
        target=f"workspace:{workspace_id}",
        after={"previous_secret_expires_at": None if expires_at is None else expires_at.isoformat()},
        request_id=request_id,
    )
    return expires_at


def _parameters(job: NewJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "event_id": job.event_id,
        "workspace_id": job.workspace_id,
        "origin": job.origin,
        "type": JOB_TYPE,
        "source": int(EventSource.JOB),
        "content_type": job.content_type,
        "payload": job.payload,
        "api_key_id": job.api_key_id,
        "request_id": job.request_id,
        "key": None if job.claim is None else job.claim.key,
        "fingerprint": None if job.claim is None else job.claim.fingerprint,
        "delay": float(job.delay),
        "expires_in": job.expires_in,
        "url": job.url,
        "headers": Jsonb([list(pair) for pair in job.headers]),
        "headers_sealed": job.headers_sealed,
        "signing": job.signing,
        "max_attempts": job.max_attempts,
        "timeout_ms": job.timeout_ms,
    }


def _origin_of(job: NewJob) -> dict[str, Any]:
    return {
        "id": new_id(),
        "workspace_id": job.workspace_id,
        "origin": job.origin,
        # The number of attempts is each job's own.
        "retry": Jsonb(backoff.to_json(backoff.JOB_POLICY)),
    }
