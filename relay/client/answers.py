"""What the API answers, as frozen values. Times are aware datetimes in UTC, ids are text, durations are milliseconds.

Newer releases of Relay may answer with more fields than stand here: they are passed over. Words such as a `status` are
plain text, as there may be new ones, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - read at run time, by relay/client/reading.py
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A delivery that an event was given on its way in."""

    id: str
    endpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An event that was taken. `replayed`: by an earlier request with the same idempotency key; this one made nothing."""

    id: str
    type: str
    created_at: datetime
    deliveries: tuple[Planned, ...]
    idempotency_key: str = ""
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """A job that was taken; `replayed` as for `Sent`."""

    id: str
    state: str
    created_at: datetime
    due_at: datetime
    idempotency_key: str = ""
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """`state` is closed, open or half_open."""

    state: str
    failures: int = 0
    trips: int = 0
    open_until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDay:
    """Attempts of the last 24 hours, some seconds late."""

    success: int = 0
    retryable_failure: int = 0
    permanent_failure: int = 0
    deferred: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint. `secret` is there only where it was just made; values of `headers` read back masked.

    `kind` is endpoint, or origin for one that jobs imply.
    """

    id: str
    url: str
    enabled: bool
    created_at: datetime
    updated_at: datetime
    kind: str = "endpoint"
    transport: str = "http"
    description: str = ""
    event_types: tuple[str, ...] = ()
    signing: str = "relay"
    headers: dict[str, str] = field(default_factory=dict)
    client_certificate: dict[str, str] | None = None
    rate_per_second: float
    burst: int
    max_in_flight: int | None = None
    timeout_ms: int | None = None
    retry: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    disabled_at: datetime | None = None
    disabled_reason: str | None = None
    previous_secret_expires_at: datetime | None = None
    breaker: Breaker
    held_until: datetime | None = None
    last_success_at: datetime | None = None
    last_failure_at: datetime | None = None
    last_day: LastDay = LastDay()
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """A secret that was just made: it is shown this once. The one before signs too until it expires."""

    id: str
    secret: str = field(repr=False)
    previous_secret_expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Milliseconds of one attempt; None where it is not known."""

    dns: float | None = None
    connect: float | None = None
    tls: float | None = None
    first_byte: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One line of a delivery's log. `class_` is success, retryable_failure, permanent_failure or deferred."""

    at: datetime
    class_: str
    number: int | None = None
    generation: int | None = None
    code: str | None = None
    error: str | None = None
    status: int | None = None
    body_incomplete: bool | None = None
    sends: int | None = None
    durations: Durations = Durations()
    bytes_sent: int | None = None
    bytes_received: int | None = None
    remote_address: str | None = None
    worker: str | None = None
    reply_headers: tuple[tuple[str, ...], ...] = ()
    snippet: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAttempt:
    """What a dead delivery keeps of the attempt that it died of. `total` is milliseconds."""

    at: datetime
    number: int | None = None
    generation: int | None = None
    code: str | None = None
    error: str | None = None
    status: int | None = None
    total: float | None = None
    remote_address: str | None = None
    reply_headers: tuple[tuple[str, ...], ...] = ()
    snippet: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """What holds a delivery back, since when, and how often it did."""

    reason: str
    since: datetime | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """What a delivery and a job have in common."""

    id: str
    event_id: str
    endpoint_id: str
    reason: str | None
    attempt_count: int
    created_at: datetime
    event_type: str | None = None
    generation: int = 0
    due_at: datetime | None = None
    finished_at: datetime | None = None
    deferred: Deferred | None = None
    #: Empty in lists.
    attempts: tuple[Attempt, ...] = ()
    last_attempt: LastAttempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(_Standing):
    """A delivery. `status` is pending, in_flight, delivered, dead or canceled."""

    status: str

    @property
    def is_settled(self) -> bool:
        """Whether it has come to rest."""
        return self.status in {"delivered", "dead", "canceled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(_Standing):
    """A job. `state` is queued, delivering, retrying, delivered, dead or canceled; values of `headers` are masked."""

    state: str
    url: str
    headers: tuple[tuple[str, ...], ...] = ()
    content_type: str | None = None
    signing: str = "none"
    max_attempts: int | None = None
    timeout_ms: int | None = None
    expires_at: datetime | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it has come to rest."""
        return self.state in {"delivered", "dead", "canceled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event without its payload. `deliveries` are there where the event was read by its id."""

    id: str
    type: str
    created_at: datetime
    delivery_count: int
    source: str = "producer"
    content_type: str | None = None
    payload_bytes: int | None = None
    idempotency_key: str | None = None
    api_key_id: str | None = None
    request_id: str | None = None
    deliveries: tuple[Delivery, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """What a test of an endpoint came to; `attempt` is None where none came in time."""

    delivery_id: str
    status: str
    reason: str | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Many deliveries on their way again. `state` is waiting, running, done, canceled or failed.

    `matched` counts those that were looked at so far, `replayed` those that were sent again.
    """

    id: str
    endpoint_id: str
    state: str
    matched: int
    replayed: int
    skipped: int
    created_at: datetime
    status: str | None = None
    event_type: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    finished_at: datetime | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come of it."""
        return self.finished_at is not None or self.state in {"done", "canceled", "failed"}
