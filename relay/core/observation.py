"""What the sender saw of one request: facts only. `outcome` says what they mean."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Fault(enum.StrEnum):
    """Why no complete answer came. The value is the attempt's error code."""

    TIMEOUT = "timeout"
    #: Refused, unreachable, reset, or closed before the header block ended.
    CONNECTION = "connection"
    TLS = "tls"
    #: The name does not exist, or has no address.
    DNS = "dns"
    #: The resolver failed or was silent: it may be ours that is down.
    DNS_TEMPORARY = "dns_temporary"
    #: What came back is not HTTP/1.1 within the bounds.
    PROTOCOL = "protocol"
    #: 101: the receiver wants to speak something else.
    UPGRADE = "upgrade"
    #: The address policy refused every address of the host.
    REFUSED = "refused"
    #: The URL or the headers cannot be made into a request.
    UNBUILDABLE = "unbuildable"
    #: A fault of ours: descriptors, memory, a bug.
    INTERNAL = "internal"


@dataclass(slots=True)
class Observation:
    """One request as libcurl saw it. Not frozen, and made by place where it is made for every request.

    Durations are microseconds; 0 where the phase did not take place (a kept
    connection has no dns, connect or tls). `status` is set only when the blank
    line of a final (200 or above) header block was seen: that alone is an answer.
    """

    fault: Fault | None = None
    #: For the operator's log: cleaned of control characters, at most 300 characters, no URL.
    text: str | None = None
    status: int | None = None
    #: The answer was complete, its body was not (cut, over the cap, late).
    body_incomplete: bool = False
    #: The final block's header lines, in order, names lower-cased, values latin-1 decoded. Bounded.
    headers: list[tuple[str, str]] = field(default_factory=list)
    #: The first bytes of the body, at most RELAY_SNIPPET_BYTES.
    snippet: bytes = b""
    #: How often the request went out: 2 after a resend on a fresh connection.
    sends: int = 0
    remote_address: str | None = None
    dns_us: int = 0
    connect_us: int = 0
    tls_us: int = 0
    first_byte_us: int = 0
    total_us: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def complete(self) -> bool:
        """Whether the receiver answered."""
        return self.status is not None
