"""What an attempt comes to: facts in, one verdict out. No other place classifies an answer or a fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from relay.core import retry_after
from relay.core.model import AttemptClass, BreakerEffect, DeadReason
from relay.core.observation import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.core.observation import Observation

#: 4xx that are worth another try without being asked: the request was late, early, or met the wrong server.
ALWAYS_RETRIED: Final = frozenset({408, 421, 425, 429})
#: Seconds: the first wait after a fault of ours, and the longest.
INTERNAL_WAIT_S: Final = 5.0
INTERNAL_WAIT_MAX_S: Final = 300.0
#: One text for every refusal: a precise one would tell a customer what our networks look like.
REFUSED_TEXT: Final = "refused by the address policy"

_HOST: Final = re.compile(r"[a-z0-9._:-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one attempt. What to do about it is `decision`'s to say."""

    cls: AttemptClass
    #: None on success; the fault's word; `redirect` for 3xx; `http_<status>` for every other answer.
    code: str | None = None
    #: For the operator; None on success.
    text: str | None = None
    breaker: BreakerEffect = BreakerEffect.NONE
    #: Set exactly where `cls` is PERMANENT_FAILURE.
    dead_reason: DeadReason | None = None
    #: Seconds that the receiver asked for, cut to the cap; None where it did not or may not ask.
    retry_after_s: float | None = None
    #: Whether the whole endpoint waits for `retry_after_s`.
    holds_endpoint: bool = False
    #: Whether the receiver wants no more: 410.
    disables_endpoint: bool = False
    #: The answer stands, though its body was not read to its end.
    body_incomplete: bool = False


PAYLOAD_TOO_LARGE: Final = Outcome(
    cls=AttemptClass.PERMANENT_FAILURE,
    code="payload_too_large",
    text="the stored payload is larger than RELAY_MAX_PAYLOAD_BYTES",
    dead_reason=DeadReason.PAYLOAD_TOO_LARGE,
)
WORKER_LOST: Final = Outcome(
    cls=AttemptClass.RETRYABLE_FAILURE,
    code="worker_lost",
    text="the worker died or lost its lease; whether the request arrived is not known",
)

_SUCCESS: Final = Outcome(cls=AttemptClass.SUCCESS, breaker=BreakerEffect.ANSWERED)
_SUCCESS_INCOMPLETE: Final = Outcome(cls=AttemptClass.SUCCESS, breaker=BreakerEffect.ANSWERED, body_incomplete=True)

_RETRYABLE, _PERMANENT, _DEFERRED = (
    AttemptClass.RETRYABLE_FAILURE,
    AttemptClass.PERMANENT_FAILURE,
    AttemptClass.DEFERRED,
)
_NONE, _ANSWERED, _FAILED = BreakerEffect.NONE, BreakerEffect.ANSWERED, BreakerEffect.FAILED

#: Fault to class, code, breaker, dead reason, and the text where the sender has none.
_FAULTS: Final[dict[Fault, tuple[AttemptClass, str, BreakerEffect, DeadReason | None, str]]] = {
    Fault.TIMEOUT: (_RETRYABLE, "timeout", _FAILED, None, "no answer in time"),
    Fault.CONNECTION: (_RETRYABLE, "connection", _FAILED, None, "the connection failed or was closed"),
    Fault.TLS: (_RETRYABLE, "tls", _FAILED, None, "the TLS handshake failed"),
    Fault.DNS: (_RETRYABLE, "dns", _FAILED, None, "the host name does not exist or has no address"),
    # Our own resolver may be the one that is down: that must not open every breaker.
    Fault.DNS_TEMPORARY: (_RETRYABLE, "dns_temporary", _NONE, None, "the host name could not be looked up just now"),
    Fault.PROTOCOL: (_RETRYABLE, "protocol", _FAILED, None, "the answer is not HTTP/1.1"),
    # Any answer, 101 as well, shows that the endpoint is there.
    Fault.UPGRADE: (
        _PERMANENT,
        "protocol",
        _ANSWERED,
        DeadReason.PERMANENT_FAILURE,
        "the receiver answered 101; only plain HTTP/1.1 is spoken",
    ),
    Fault.REFUSED: (_PERMANENT, "refused", _NONE, DeadReason.REFUSED, REFUSED_TEXT),
    Fault.UNBUILDABLE: (
        _PERMANENT,
        "unbuildable",
        _NONE,
        DeadReason.PERMANENT_FAILURE,
        "the URL or the headers cannot be made into a request",
    ),
    Fault.INTERNAL: (_DEFERRED, "internal", _NONE, None, "a fault of Relay's own; it will be tried again"),
}


def judge(
    observation: Observation,
    *,
    retry_statuses: frozenset[int],
    now: float,
    retry_after_max_s: float,
    asked_s: float | None = None,
) -> Outcome:
    """The verdict on one request.

    `retry_statuses` are the policy's further 4xx; `now` is epoch seconds, for dates in Retry-After, which is cut to
    `retry_after_max_s` seconds. `asked_s` is what the reply asks for in the words of its platform (see `transports`), and
    counts in the header's place. An answer counts before any fault: one that came after the header block is the body's
    (RFC 9110 section 15: the status is the result). Deferrals by the gate are not judged here.
    """
    status = observation.status
    if status is None:
        return _faulty(observation)
    if 200 <= status < 300:
        return _SUCCESS_INCOMPLETE if observation.body_incomplete else _SUCCESS

    wait_s: float | None = None
    if status in {413, 429, 503}:
        wait_s = retry_after.find(observation.headers, now) if asked_s is None else asked_s
        if wait_s is not None:
            wait_s = min(wait_s, retry_after_max_s)
    retried = (
        status >= 500
        or status in ALWAYS_RETRIED
        or (status == 413 and wait_s is not None)
        or (status >= 400 and status != 410 and status in retry_statuses)
        # Below 200 nothing is final; the sender lets none through, and a second try costs little.
        or status < 200
    )
    return Outcome(
        cls=_RETRYABLE if retried else _PERMANENT,
        code="redirect" if 300 <= status < 400 else f"http_{status}",
        text=_text(status, observation.headers),
        breaker=_ANSWERED if 300 <= status < 500 else _FAILED,
        dead_reason=None if retried else DeadReason.GONE if status == 410 else DeadReason.PERMANENT_FAILURE,
        retry_after_s=wait_s,
        holds_endpoint=status != 413 and wait_s is not None and wait_s > 0,
        disables_endpoint=status == 410,
        body_incomplete=observation.body_incomplete,
    )


def internal_wait_seconds(deferrals: int) -> float:
    """Seconds to wait after a fault of ours, having waited `deferrals` times before: 5, 10, 20 … up to 300."""
    return min(INTERNAL_WAIT_S * 2.0 ** min(max(deferrals, 0), 16), INTERNAL_WAIT_MAX_S)


def _faulty(observation: Observation) -> Outcome:
    # Neither an answer nor a fault is a bug of the sender, and so a fault of ours.
    fault = observation.fault or Fault.INTERNAL
    cls, code, breaker, dead_reason, usual = _FAULTS[fault]
    uniform = fault in {Fault.REFUSED, Fault.UPGRADE}
    return Outcome(
        cls=cls,
        code=code,
        text=usual if uniform else observation.text or usual,
        breaker=breaker,
        dead_reason=dead_reason,
    )


def _text(status: int, headers: Sequence[tuple[str, str]]) -> str:
    if status == 410:
        return "the receiver answered 410: it is gone for good"
    if not 300 <= status < 400:
        return f"the receiver answered {status}"
    host = _location_host(headers)
    return f"the receiver answered {status}; redirects are not followed" + (f" (to {host})" if host else "")


def _location_host(headers: Sequence[tuple[str, str]]) -> str | None:
    """The host that a redirect points to; None where it stays on its host or cannot be read. Never path or query:
    those can carry credentials."""
    location = next((value for name, value in headers if name == "location"), "")
    try:
        host = urlsplit(location.strip()).hostname
    except ValueError:
        return None
    return host if host and _HOST.fullmatch(host) else None
