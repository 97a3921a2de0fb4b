"""Relay's client: sends events, looks after endpoints, and verifies what arrives.

    from relay.client import Relay, verify

    with Relay() as relay:                      # RELAY_URL, RELAY_API_KEY
        relay.send("order.paid", {"amount": 4999})

It needs `requests` and nothing else of what the server is made of; `verify` alone needs no network at all, and the
package `cryptography` only for public keys.
"""

from __future__ import annotations

from relay.client.answers import (
    Attempt,
    Delivery,
    Endpoint,
    Enqueued,
    Event,
    Job,
    Replay,
    Rotated,
    Sent,
    Tested,
)
from relay.client.client import Relay
from relay.client.errors import (
    ApiError,
    Conflict,
    FieldError,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotVerified,
    ServerFault,
    TooManyRequests,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
    WaitedTooLong,
)
from relay.client.verification import Verified, verify
from relay.core.errors import ConfigurationError, InvalidInput, RelayError

__all__ = [
    "ApiError",
    "Attempt",
    "ConfigurationError",
    "Conflict",
    "Delivery",
    "Endpoint",
    "Enqueued",
    "Event",
    "FieldError",
    "Forbidden",
    "InvalidInput",
    "InvalidRequest",
    "Job",
    "NotFound",
    "NotVerified",
    "Relay",
    "RelayError",
    "Replay",
    "Rotated",
    "Sent",
    "ServerFault",
    "Tested",
    "TooManyRequests",
    "Unauthorized",
    "UnexpectedAnswer",
    "Unreachable",
    "Verified",
    "WaitedTooLong",
    "verify",
]
