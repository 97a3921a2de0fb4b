"""What answers hold: the shapes that the views make, and that `/openapi.json` tells of.

A type checker holds the views to them, and the tests hold every answer to the schemas made of them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

# Before Python 3.12 pydantic takes no other TypedDict.
from typing_extensions import TypedDict

from relay.core.model import (
    AttemptClass,
    BreakerState,
    DeadReason,
    DeferReason,
    EventSource,
    Scope,
    Signing,
    Status,
)
from relay.core.transports import TRANSPORTS
from relay.store import replays
from relay.web.openapi.formats import EVENT_TYPE, ID, TIME, choice, shown

Id = Annotated[str, shown(ID)]
Time = Annotated[str, shown(TIME)]
EventType = Annotated[str, shown(EVENT_TYPE)]
Count = Annotated[int, Field(ge=0)]
StatusName = Annotated[str, shown(choice(one.label for one in Status))]
Reason = Annotated[str, shown(choice(one.value for one in DeadReason))]
SigningName = Annotated[str, shown(choice(one.value for one in Signing))]
#: A header's name and value.
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Milliseconds = Annotated[float, Field(ge=0)]


class EventDelivery(TypedDict):
    """One of the deliveries that an event became."""

    id: Id
    endpoint_id: Id


class TakenEvent(TypedDict):
    """An event that was taken."""

    id: Id
    type: EventType
    created_at: Time
    deliveries: list[EventDelivery]


class TakenBatch(TypedDict):
    """A batch that was taken: its events in order, and the indexes of those that were answered as before."""

    events: list[TakenEvent]
    replayed: list[Count]


class Event(TypedDict):
    """An event, without its payload."""

    id: Id
    type: EventType
    source: Annotated[str, shown(choice(one.name.lower() for one in EventSource))]
    content_type: str
    payload_bytes: Count
    idempotency_key: str | None
    api_key_id: Annotated[Id | None, Field(description="Null: taken with the instance's key, or Relay's own.")]
    request_id: str | None
    delivery_count: Count
    created_at: Time


class Deferred(TypedDict):
    """What holds a delivery back."""

    reason: Annotated[str, shown(choice(one.value for one in DeferReason))]
    since: Time | None
    count: Count


class DeliverySummary(TypedDict):
    """A delivery, without its attempts."""

    id: Id
    event_id: Id
    endpoint_id: Id
    event_type: str
    status: StatusName
    reason: Annotated[Reason | None, Field(description="Why it is dead.")]
    attempt_count: Count
    generation: Annotated[Count, Field(description="How often it was replayed.")]
    due_at: Annotated[Time | None, Field(description="Null: finished, or paused.")]
    created_at: Time
    finished_at: Time | None
    deferred: Deferred | None


class Durations(TypedDict):
    """Milliseconds from the beginning of an attempt to the end of each step."""

    dns: Milliseconds | None
    connect: Milliseconds | None
    tls: Milliseconds | None
    first_byte: Milliseconds | None
    total: Milliseconds | None


# By call: `class` is no name.
Attempt = TypedDict(
    "Attempt",
    {
        "at": Time,
        "number": Annotated[Count | None, Field(description="Null: nothing was sent.")],
        "generation": Count,
        "class": Annotated[str, shown(choice(one.label for one in AttemptClass))],
        "code": Annotated[str | None, Field(examples=["http_503"])],
        "error": str | None,
        "status": int | None,
        "body_incomplete": bool,
        "sends": Count,
        "durations": Durations,
        "bytes_sent": Count | None,
        "bytes_received": Count | None,
        "remote_address": str | None,
        "worker": str | None,
        "reply_headers": list[Pair],
        "snippet": Annotated[str | None, Field(description="The beginning of the receiver's answer.")],
    },
)
Attempt.__doc__ = "One line of a delivery's log."


class LastAttempt(TypedDict):
    """What a dead delivery keeps of the attempt that it died of."""

    at: Time
    number: Count | None
    generation: Count | None
    code: str | None
    error: str | None
    status: int | None
    total: Milliseconds | None
    remote_address: str | None
    reply_headers: list[Pair]
    snippet: str | None


class Delivery(DeliverySummary):
    """A delivery with its attempts, the oldest first."""

    last_attempt: LastAttempt | None
    attempts: list[Attempt]


class EventWithDeliveries(Event):
    """An event with what it fanned out to."""

    deliveries: list[DeliverySummary]


class TakenJob(TypedDict):
    """A job that was taken."""

    id: Id
    state: Annotated[str, shown(choice(["queued"]))]
    created_at: Time
    due_at: Time


class Job(TypedDict):
    """A job: what was asked for, and what became of it."""

    id: Id
    state: Annotated[str, shown(choice(["queued", "delivering", "retrying", "delivered", "dead", "canceled"]))]
    url: str
    headers: Annotated[list[Pair], Field(description="Values are masked.")]
    content_type: str | None
    signing: SigningName
    max_attempts: Count
    timeout_ms: Count | None
    expires_at: Time | None
    event_id: Id
    endpoint_id: Annotated[Id, Field(description="The one that the jobs of its origin share.")]
    event_type: str
    reason: Reason | None
    attempt_count: Count
    generation: Count
    due_at: Time | None
    created_at: Time
    finished_at: Time | None
    deferred: Deferred | None
    last_attempt: LastAttempt | None
    attempts: list[Attempt]


class ShownCertificate(TypedDict):
    """A client certificate; its key is masked."""

    certificate: str
    private_key: str


class Breaker(TypedDict):
    """An endpoint's circuit breaker."""

    state: Annotated[str, shown(choice(one.name.lower() for one in BreakerState))]
    failures: Count
    trips: Count
    open_until: Time | None


class LastDay(TypedDict):
    """What the attempts of the last 24 hours came to; some seconds behind."""

    success: Count
    retryable_failure: Count
    permanent_failure: Count
    deferred: Count


class Endpoint(TypedDict):
    """An endpoint, without its secret."""

    id: Id
    kind: Annotated[str, shown(choice(["endpoint", "origin"]))]
    transport: Annotated[str, shown(choice(["http", *TRANSPORTS]))]
    url: str
    description: str
    event_types: list[str]
    signing: SigningName
    headers: Annotated[dict[str, str], Field(description="Values are masked.")]
    client_certificate: ShownCertificate | None
    rate_per_second: Annotated[float, Field(gt=0)]
    burst: Annotated[int, Field(ge=1)]
    max_in_flight: Annotated[int, Field(ge=1)] | None
    timeout_ms: Annotated[int, Field(ge=1)] | None
    retry: Retry
    metadata: dict[str, Any]
    enabled: bool
    disabled_at: Time | None
    disabled_reason: Annotated[str | None, Field(examples=["manual"])]
    previous_secret_expires_at: Time | None
    breaker: Breaker
    held_until: Time | None
    last_success_at: Time | None
    last_failure_at: Time | None
    last_day: LastDay
    created_at: Time
    updated_at: Time


class _UsualRetry(TypedDict):
    strategy: Annotated[str, shown(choice(["exponential", "fixed", "schedule"]))]
    max_attempts: Annotated[int, Field(ge=1)]
    base_ms: Annotated[int, Field(ge=1)]
    max_ms: Annotated[int, Field(ge=1)]
    factor: float
    jitter: float
    statuses: list[int]


class Retry(_UsualRetry, total=False):
    """When failed deliveries are tried again."""

    schedule_ms: Annotated[list[int], Field(description="There where the strategy is `schedule`.")]


class NewEndpoint(Endpoint):
    """An endpoint that was made, with its secret, which is shown this once."""

    secret: str


class RotatedSecret(TypedDict):
    """A new secret, which is shown this once."""

    id: Id
    secret: str
    previous_secret_expires_at: Annotated[Time | None, Field(description="Until then the old one signs too.")]


class Asked(TypedDict):
    """The endpoint that something was asked for, which is done in the background."""

    id: Id


class Tested(TypedDict):
    """What a test came to; `attempt` is null where there is none yet."""

    delivery_id: Id
    status: StatusName
    reason: Reason | None
    attempt: Attempt | None


class Replay(TypedDict):
    """A replay by filter, and how far it is."""

    id: Id
    endpoint_id: Id
    state: Annotated[str, shown(choice(replays.STATES))]
    status: StatusName | None
    event_type: str | None
    reason: Reason | None
    since: Time | None
    until: Time | None
    matched: Count
    replayed: Count
    skipped: Count
    created_at: Time
    finished_at: Time | None


class RegisteredTypeSummary(TypedDict):
    """A registered event type, without its schema."""

    name: EventType
    description: str
    has_schema: bool
    created_at: Time
    updated_at: Time


class RegisteredType(TypedDict):
    """A registered event type."""

    name: EventType
    description: str
    json_schema: Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "null"]})]
    created_at: Time
    updated_at: Time


class Workspace(TypedDict):
    """A workspace; a limit of null is the installation's."""

    id: Id
    name: str
    max_endpoints: Count | None
    ingest_rate: Annotated[float, Field(gt=0)] | None
    max_payload_bytes: Annotated[int, Field(ge=1)] | None
    created_at: Time


class Key(TypedDict):
    """An API key, without its text."""

    id: Id
    workspace_id: Id
    name: str
    prefix: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^rk_[A-Za-z0-9]{12}$"})]
    scopes: list[Annotated[str, shown(choice(one.value for one in Scope))]]
    created_at: Time
    last_used_at: Time | None
    revoked_at: Time | None


class NewKey(Key):
    """A key that was made, with its text, which is shown this once."""

    key: str


class AuditRecord(TypedDict):
    """A change, and who made it."""

    id: Id
    at: Time
    actor: Annotated[str, Field(examples=["instance", "relay"])]
    action: Annotated[str, Field(examples=["delivery.replayed"])]
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None


class PublicKey(TypedDict):
    """An Ed25519 key as RFC 8037 section 2 has it."""

    crv: Annotated[str, shown(choice(["Ed25519"]))]
    kty: Annotated[str, shown(choice(["OKP"]))]
    x: str
    kid: str
    use: Annotated[str, shown(choice(["sig"]))]
    alg: Annotated[str, shown(choice(["EdDSA"]))]


class PublicKeys(TypedDict):
    """A JWK Set (RFC 7517): the current key, then the one before it while both sign."""

    keys: Annotated[list[PublicKey], Field(min_length=1, max_length=2)]


class Alive(TypedDict):
    """The process runs."""

    status: Annotated[str, shown(choice(["ok"]))]


class Ready(TypedDict):
    """What was looked at, and that it is well."""

    status: Annotated[str, shown(choice(["ready"]))]
    checks: dict[str, str]
