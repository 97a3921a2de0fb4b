"""What fields of endpoints and attempts mean, in the words that requests and answers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from relay.core.outcome import ALWAYS_RETRIED

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDPOINT: Final[Mapping[str, str]] = {
    "transport": "How it is sent: as a webhook (`http`), or as a message on that chat platform. It does not change.",
    "url": "Where it is sent: a URL; for a chat platform the address of the chat there.",
    "description": "For people.",
    "event_types": "The events that it gets, by patterns: a type (`order.paid`); `order.*`, which takes `order.paid` and "
    "`order.item.added` and not `order`; or `*`. An empty list: all. Neither that nor `*` takes in Relay's own, `relay.*`.",
    "signing": "What its requests are signed with. `relay` and `standard` (Standard Webhooks) go by a shared secret, "
    "`standard-ed25519` by a pair of keys. A chat platform's are `none`.",
    "headers": "Headers of your own that each request carries, by name.",
    "client_certificate": "What Relay shows to a receiver that asks for a certificate (mutual TLS). Null: none.",
    "rate_per_second": "Deliveries a second, in the long run. What comes faster waits, and is not lost.",
    "burst": "How many may go at once, after a quiet time, before the rate holds.",
    "max_in_flight": "How many requests may be under way to it at one time, from each worker process. Null: what the "
    "installation has (RELAY_MAX_IN_FLIGHT_PER_ENDPOINT).",
    "timeout_ms": "Milliseconds for the whole exchange. Null: what the installation has (RELAY_TOTAL_TIMEOUT_MS).",
    "retry": "When failed deliveries are tried again.",
    "metadata": "Any JSON object of yours. Relay keeps it, and reads nothing of it.",
    "enabled": "Whether it gets new events. Off, it gets none, and what waits for it is paused.",
    "secret": "What its requests are signed with, or a chat platform's token. Keep it: it is not shown again.",
    "kind": "`endpoint`, made by you; `origin`, which the jobs to one origin share.",
    "disabled_at": "Since when it is off. Null: it is on.",
    "disabled_reason": "Why it is off: `manual`, by a call; `gone`, as the receiver answered 410; `failing`, as nothing else "
    "came of its attempts for days. Null: it is on.",
    "previous_secret_expires_at": "Until then the secret before signs too. Null: there is none that does.",
    "breaker": "Its circuit breaker, which stops sending for a while after failures in a row.",
    "held_until": "Nothing is sent before that time, as the receiver asked (Retry-After). Null: it is not held.",
    "last_success_at": "When an attempt last succeeded.",
    "last_failure_at": "When an attempt last failed.",
    "last_day": "What the attempts of the last 24 hours came to.",
}
_RETRY: Final[Mapping[str, str]] = {
    "strategy": "How waits follow one another: `exponential` (`base_ms`, then `factor` times the one before, to "
    "`max_ms` at most), `fixed` (always `base_ms`), `schedule` (as `schedule_ms` lists them).",
    "max_attempts": "Attempts in all, the first one among them. With a schedule at most one more than it has waits.",
    "base_ms": "Milliseconds before the second attempt.",
    "max_ms": "Milliseconds that a wait of `exponential` grows to, at most.",
    "factor": "By how much each wait of `exponential` is longer than the one before.",
    "jitter": "The most that chance adds to a wait, as a share of it: 0.2 is a fifth.",
    "statuses": "Statuses from 400 to 499 that are tried again, beside those that always are: "
    f"{', '.join(map(str, sorted(ALWAYS_RETRIED)))}.",
    "schedule_ms": "Milliseconds before the second attempt, the third and so on: with `schedule` alone.",
}
_ATTEMPT: Final[Mapping[str, str]] = {
    "at": "When it began.",
    "number": "Which attempt, from 1. Null: nothing was sent.",
    "generation": "How often the delivery had been replayed by then.",
    "class": "What it came to.",
    "code": "What it came to, for programs: `http_` and the status where the receiver answered (`redirect` for any 3xx), "
    "else the fault. Null: nothing to name.",
    "error": "The fault, for people.",
    "status": "The status that the receiver answered with. Null: it gave none.",
    "body_incomplete": "Whether the answer broke off.",
    "sends": "Times that the request went out in it: 2 where a kept connection turned out to be closed, and it went "
    "out once more on a new one.",
    "durations": "Milliseconds from its beginning to the end of each step. Null: there was none.",
    "bytes_sent": "Bytes of the request.",
    "bytes_received": "Bytes of the answer.",
    "remote_address": "The address that it went to.",
    "worker": "The process that sent it.",
    "reply_headers": "Some of the answer's headers.",
    "snippet": "The beginning of the receiver's answer.",
}
#: By the schema's name: what its fields mean, unless the schema says so itself.
WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Endpoint": _ENDPOINT,
    "NewEndpoint": _ENDPOINT,
    "EndpointRequest": _ENDPOINT,
    "EndpointPatch": _ENDPOINT,
    "Retry": _RETRY,
    "Attempt": _ATTEMPT,
}
#: The same of a field that is an object without a schema of its own.
WITHIN: Final[Mapping[str, Mapping[str, str]]] = {"retry": _RETRY}
