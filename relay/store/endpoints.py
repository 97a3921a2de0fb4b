"""Endpoints as their owners see and make them. Changes are in `endpoint_changes`, secrets in `endpoint_secrets`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

import sqlalchemy as sa

from relay.core.model import BreakerState
from relay.store import audit
from relay.store.pages import Page, Position, page_of
from relay.store.tables import endpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

#: `kind` of an endpoint that its owner made, and of one that is implied by jobs to an origin.
OWNED: Final = 0
ORIGIN: Final = 1

#: Hours that an endpoint's counts look back over.
COUNTED_HOURS: Final = 24

# Held and old secrets count while they last, by the database's clock.
COLUMNS: Final = """p.id, p.kind, p.origin, p.transport, p.url, p.description, p.event_types, p.signing,
    p.headers, p.certificate, p.rate_per_second, p.burst, p.max_in_flight, p.timeout_ms, p.retry, p.metadata,
    p.enabled, p.disabled_at, p.disabled_reason, p.created_at, p.updated_at, p.public_key,
    p.breaker_state, p.breaker_failures, p.breaker_trips, p.breaker_open_until,
    case when p.held_until > now() then p.held_until end as held_until,
    case when p.previous_secret_expires_at > now() then p.previous_secret_expires_at end as previous_secret_expires_at"""

# Sums of at most 1,441 rows; the last times are found from the newest row on.
_COUNTED: Final = f"""
left join lateral (
    select sum(successes) as successes, sum(retryable_failures) as retryable_failures,
        sum(permanent_failures) as permanent_failures, sum(deferrals) as deferrals
    from relay.endpoint_minutes
    where endpoint_id = p.id and minute > now() - interval '{COUNTED_HOURS} hours'
) c on true
left join lateral (
    select last_success_at from relay.endpoint_minutes
    where endpoint_id = p.id and last_success_at is not null order by minute desc limit 1
) s on true
left join lateral (
    select last_failure_at from relay.endpoint_minutes
    where endpoint_id = p.id and last_failure_at is not null order by minute desc limit 1
) f on true"""
_ACTIVITY: Final = """c.successes, c.retryable_failures, c.permanent_failures, c.deferrals,
    s.last_success_at, f.last_failure_at"""

# Creates of one workspace queue here, so that none counts while another inserts. NO KEY: ingest's foreign keys pass.
_LOCK = sa.text("select max_endpoints from relay.workspaces where id = :workspace_id for no key update")
_COUNT = sa.text("""
select count(*) from relay.endpoints where workspace_id = :workspace_id and kind = 0 and deleted_at is null
""")
_GET = sa.text(f"""
select {COLUMNS}, {_ACTIVITY} from relay.endpoints p {_COUNTED}
where p.id = :id and p.workspace_id = :workspace_id and p.deleted_at is null
""")
_LIST = sa.text(f"""
select {COLUMNS}, {_ACTIVITY} from (
    select * from relay.endpoints
    where workspace_id = :workspace_id and deleted_at is null
      and (cast(:after_at as timestamptz) is null or (created_at, id) < (:after_at, cast(:after_id as uuid)))
    order by created_at desc, id desc limit :limit
) p {_COUNTED}
order by p.created_at desc, p.id desc
""")


class Fields(TypedDict, total=False):
    """Columns that an endpoint's owner sets, checked; secrets sealed."""

    transport: str
    #: In its normalised form.
    url: str
    description: str
    event_types: list[str]
    signing: str
    #: Name to sealed value, in base64.
    headers: dict[str, str]
    certificate: str | None
    certificate_key: bytes | None
    secret: bytes
    public_key: bytes | None
    rate_per_second: float
    burst: int
    max_in_flight: int | None
    timeout_ms: int | None
    #: As given: what is absent follows the defaults of the release that reads it.
    retry: dict[str, Any]
    metadata: dict[str, Any]
    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What an endpoint answered lately. Lags by some seconds: a success writes nothing to the endpoint's row."""

    #: Of the last `COUNTED_HOURS`.
    successes: int
    retryable_failures: int
    permanent_failures: int
    deferrals: int
    #: As far back as minutes are kept.
    last_success_at: datetime | None
    last_failure_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint without its secrets."""

    id: UUID
    kind: int
    #: Of an implicit endpoint only: scheme, host and port.
    origin: str | None
    transport: str
    url: str
    description: str
    event_types: list[str]
    signing: str
    header_names: list[str]
    certificate: str | None
    rate_per_second: float
    burst: int
    max_in_flight: int | None
    timeout_ms: int | None
    retry: dict[str, object]
    metadata: dict[str, object]
    enabled: bool
    disabled_at: datetime | None
    disabled_reason: str | None
    created_at: datetime
    updated_at: datetime
    #: Where its secret is an ed25519 key, whatever it signs with now.
    public_key: bytes | None
    breaker_state: BreakerState
    breaker_failures: int
    breaker_trips: int
    breaker_open_until: datetime | None
    #: None where no hold is in force.
    held_until: datetime | None
    #: None where no earlier secret signs any more.
    previous_secret_expires_at: datetime | None
    #: None where it was not asked for.
    activity: Activity | None = None


def create(
    connection: sa.Connection,
    fields: Fields,
    *,
    endpoint_id: UUID,
    workspace_id: UUID,
    default_limit: int,
    actor: str,
    request_id: str | None = None,
) -> Endpoint | None:
    """Store an endpoint and its audit record; None, and nothing stored, where the workspace has as many as it may.

    The limit is the workspace's own, else `default_limit`. Holds a lock on the workspace until the transaction ends,
    so that creates at the same time cannot pass the limit together.
    """
    own_limit = connection.execute(_LOCK, {"workspace_id": workspace_id}).scalar_one()
    if count(connection, workspace_id=workspace_id) >= (default_limit if own_limit is None else own_limit):
        return None
    state = {} if fields["enabled"] else {"disabled_at": sa.func.now(), "disabled_reason": "manual"}
    connection.execute(sa.insert(endpoints).values(id=endpoint_id, workspace_id=workspace_id, **fields, **state))
    made = get(connection, workspace_id=workspace_id, endpoint_id=endpoint_id)
    assert made is not None, "it was inserted in this transaction"
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="endpoint.created",
        target=f"endpoint:{endpoint_id}",
        after=audited(made),
        request_id=request_id,
    )
    return made


def count(connection: sa.Connection, *, workspace_id: UUID) -> int:
    """Return how many endpoints the workspace has of its own making, disabled ones included."""
    return int(connection.execute(_COUNT, {"workspace_id": workspace_id}).scalar_one())


def get(connection: sa.Connection, *, workspace_id: UUID, endpoint_id: UUID) -> Endpoint | None:
    """Return the endpoint, or None where this workspace has no such one (any more)."""
    row = connection.execute(_GET, {"id": endpoint_id, "workspace_id": workspace_id}).mappings().one_or_none()
    return None if row is None else endpoint_of(row)


def list_page(connection: sa.Connection, *, workspace_id: UUID, after: Position | None, limit: int) -> Page[Endpoint]:
    """Return up to `limit` endpoints of the workspace, implicit ones too, the newest first, from behind `after`."""
    rows = connection.execute(
        _LIST,
        {
            "workspace_id": workspace_id,
            "after_at": None if after is None else after.created_at,
            "after_id": None if after is None else after.id,
            "limit": limit + 1,
        },
    ).mappings()
    return page_of([endpoint_of(row) for row in rows], limit)


def audited(endpoint: Endpoint, names: Iterable[str] | None = None) -> dict[str, object]:
    """Return what the audit log keeps of an endpoint: all that its owner set, or `names` of it; no secret."""
    values: dict[str, object] = {
        "transport": endpoint.transport,
        "url": endpoint.url,
        "description": endpoint.description,
        "event_types": endpoint.event_types,
        "signing": endpoint.signing,
        "header_names": endpoint.header_names,
        # The certificate is no secret, but long: what `sha256sum` says of it tells one from another.
        "client_certificate": None
        if endpoint.certificate is None
        else f"sha256:{hashlib.sha256(endpoint.certificate.encode()).hexdigest()}",
        "rate_per_second": endpoint.rate_per_second,
        "burst": endpoint.burst,
        "max_in_flight": endpoint.max_in_flight,
        "timeout_ms": endpoint.timeout_ms,
        "retry": endpoint.retry,
        "metadata": endpoint.metadata,
        "enabled": endpoint.enabled,
    }
    return values if names is None else {name: values[name] for name in names}


def endpoint_of(row: Mapping[Any, Any]) -> Endpoint:
    """Make an endpoint of a row of `COLUMNS`, with its activity where that was selected too."""
    fields = dict(row)
    activity = None
    if "last_success_at" in fields:
        activity = Activity(
            successes=fields.pop("successes") or 0,
            retryable_failures=fields.pop("retryable_failures") or 0,
            permanent_failures=fields.pop("permanent_failures") or 0,
            deferrals=fields.pop("deferrals") or 0,
            last_success_at=fields.pop("last_success_at"),
            last_failure_at=fields.pop("last_failure_at"),
        )
    return Endpoint(
        header_names=list(fields.pop("headers")),
        breaker_state=BreakerState(fields.pop("breaker_state")),
        activity=activity,
        **fields,
    )
