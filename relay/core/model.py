"""The nouns of a delivery and the fixed words for them: the same in the database, the API, the log and the metrics."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """Where a delivery stands. Stored as a smallint: the hot indexes hold it."""

    #: Waiting for its due time, or for a worker. `due_at` null means paused.
    PENDING = 0
    #: Leased by a worker.
    IN_FLIGHT = 1
    #: Answered with success.
    DELIVERED = 2
    #: Given up: `reason` says why.
    DEAD = 3
    #: Called off by a person.
    CANCELED = 4

    @property
    def label(self) -> str:
        """The word used outside the database, such as `in_flight`."""
        return self.name.lower()


class AttemptClass(enum.IntEnum):
    """What one attempt came to. Stored as a smallint in `delivery_attempts`."""

    SUCCESS = 0
    RETRYABLE_FAILURE = 1
    PERMANENT_FAILURE = 2
    #: No request went out and no attempt was spent.
    DEFERRED = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class DeadReason(enum.StrEnum):
    """Why a delivery was given up."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    PERMANENT_FAILURE = "permanent_failure"
    #: The address, port or scheme policy said no: somebody pointed an endpoint where they should not.
    REFUSED = "refused"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    EXPIRED = "expired"
    #: The receiver answered 410.
    GONE = "gone"
    ENDPOINT_DELETED = "endpoint_deleted"


class DeferReason(enum.StrEnum):
    """Which gate held a delivery back."""

    RATE = "rate"
    #: The per-endpoint or per-workspace cap of sends at once is full.
    SLOT = "slot"
    BREAKER = "breaker"
    #: The receiver asked for a pause with Retry-After.
    HELD = "held"
    #: The endpoint is disabled.
    PAUSED = "paused"
    #: A fault of ours, such as a secret that cannot be decrypted.
    INTERNAL = "internal"


class EventSource(enum.IntEnum):
    """Whose event a delivery carries. Stored as a smallint in `events`."""

    #: A producer's, by the API.
    PRODUCER = 0
    #: A job: one URL, named by the caller.
    JOB = 1
    #: Relay's own, about itself (`relay.*`).
    OPERATIONAL = 2
    #: A test that an endpoint's owner asked for: once, past every gate.
    TEST = 3


class BreakerEffect(enum.IntEnum):
    """What an attempt tells the endpoint's breaker."""

    #: Says nothing about the endpoint: leave the count alone.
    NONE = 0
    #: The endpoint answered: reset the count.
    ANSWERED = 1
    #: The endpoint did not answer: count it.
    FAILED = 2


class BreakerState(enum.IntEnum):
    """The state of an endpoint's circuit breaker."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Signing(enum.StrEnum):
    """How requests to an endpoint are signed."""

    RELAY = "relay"
    STANDARD = "standard"
    STANDARD_ED25519 = "standard-ed25519"
    NONE = "none"


class Scope(enum.StrEnum):
    """What an API key may do. Scopes do not include one another."""

    INGEST = "ingest"
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
