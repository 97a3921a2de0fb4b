"""What the send engine is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.core.observation import Observation
    from relay.delivery.target import Proxy

# Thousands of these are made a second: so neither is frozen, and both can be made by place, at half the cost.


@dataclass(slots=True)
class SendRequest:
    """One POST, ready to go."""

    #: The caller's own; comes back untouched.
    key: Any
    #: In the normalised, stored form.
    url: str
    body: bytes
    #: libcurl header lines, complete: the removals (`Accept:`, `Expect:`) are the caller's, too.
    headers: list[str]
    timeout_ms: int
    connect_timeout_ms: int
    #: Silence that is allowed once the reply has begun.
    idle_timeout_ms: int
    #: `time.monotonic()` after which it must not start: its lease would run out under it.
    start_by: float
    #: The client's PEM certificate (with its chain) and key.
    certificate: bytes | None = None
    private_key: bytes | None = None
    #: The host's addresses, in the order to try. None, as a rule: the engine looks the name up. The policy judges
    #: them either way.
    addresses: tuple[str, ...] | None = None


@dataclass(slots=True)
class Completed:
    """A request that came back."""

    request: SendRequest
    #: What was seen; None where nothing was sent.
    observation: Observation | None
    #: It was not started in time, or not at all: no byte of it went out.
    not_sent: bool = False
    #: It was broken off by a stop, its answer unknown: the receiver may have it.
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What holds for every request of an engine."""

    #: Bytes of a reply's body that are read before the connection is dropped undrained.
    max_response_bytes: int
    #: Bytes of a reply's body that are kept.
    snippet_bytes: int
    #: PEM file of the authorities that a receiver's certificate must lead to.
    ca_file: str
    #: The egress proxy.
    proxy: Proxy | None = None
