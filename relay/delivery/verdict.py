"""Names the fault of a request that got no complete answer, from libcurl's error and what was seen besides.

libcurl's numbers alone do not tell: a refused address and a closed port are one number, and so are a broken status
line and a scheme that is off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relay.core.observation import Fault
from relay.delivery.reply import NOT_HTTP_TEXT
from relay.delivery.resolver import REFUSED_TEXT

#: Characters of an error text that are kept.
TEXT_LENGTH = 300

#: libcurl's error numbers that are judged one by one; the rest are in the sets.
E_ABORTED = 42
_E_UNSUPPORTED, _E_URL, _E_PROXY_NAME, _E_NAME, _E_CONNECT = 1, 3, 5, 6, 7
_E_TIMEOUT, _E_SEND, _E_RECEIVE, _E_USER_IN_URL, _E_TOO_LARGE = 28, 55, 56, 67, 100
_TLS_CODES = frozenset({35, 60, 83, 90, 91})
#: Memory, options, certificates of ours that cannot be used, callbacks that failed.
_INTERNAL_CODES = frozenset({2, 23, 27, 42, 43, 49, 58, 77})
#: Broken framing; 1 and 8 are a status line that is none.
_PROTOCOL_CODES = frozenset({1, 8, 61, 92, 100})
_NOT_HTTP_CODES = frozenset({1, 8})

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")


@dataclass(slots=True, kw_only=True)
class Facts:
    """What was seen of a transfer beside libcurl's error."""

    url: str
    #: How often the request went out, and whether one more time was stopped.
    sends: int
    second_send: bool
    #: Whether a line of the reply was read.
    begun: bool
    #: Why the reply was broken off by ourselves.
    broken_off: tuple[Fault, str] | None
    #: What of ours failed in the guard; addresses that it refused, and that it opened a socket for.
    guard_broken: str | None
    refused: int
    allowed: int
    #: TCP was connected, on a new connection.
    connected: bool
    proxied: bool
    #: The status of the proxy's last answer to CONNECT; 0 for none.
    proxy_answer: int


def classify(code: int, text: str, facts: Facts) -> tuple[Fault, str]:
    """Name the fault, once and for all; `code` and `text` are libcurl's."""
    if facts.broken_off is not None:
        return facts.broken_off
    if facts.guard_broken is not None and not facts.sends:
        return Fault.INTERNAL, facts.guard_broken
    if code == _E_CONNECT and facts.refused and not facts.allowed:
        return Fault.REFUSED, REFUSED_TEXT
    if code == _E_UNSUPPORTED and not facts.sends and "disabled" in text:
        return Fault.REFUSED, REFUSED_TEXT
    if code == _E_TIMEOUT:
        return Fault.TIMEOUT, _phase(facts)
    if code == E_ABORTED and facts.second_send:
        return Fault.CONNECTION, "the connection broke again after a resend"
    if facts.proxied and not facts.sends:
        by_proxy = _classify_proxy(code, facts.proxy_answer)
        if by_proxy is not None:
            return by_proxy
    return _classify_code(code, clean(text, facts.url) or f"libcurl error {code}", text, facts)


def tries_next_address(code: int, facts: Facts) -> bool:
    """Whether the egress proxy did its part, and what failed is its way to this one address: another may do."""
    if not facts.proxied or facts.sends or not facts.connected or facts.broken_off is not None:
        return False
    if facts.proxy_answer:
        # A tunnel that stands (2xx) leads to the receiver; 407 is about the proxy's own credentials.
        return code == _E_CONNECT and facts.proxy_answer != 407
    return code in (_E_TIMEOUT, _E_RECEIVE)


def clean(text: str, url: str) -> str:
    """Make libcurl's text fit for a log: no URL, nothing unprintable, bounded.

    Receivers get bytes of their own into it: escape codes, long tokens, what is not UTF-8.
    """
    text = _URL.sub("<url>", text[: 8 * TEXT_LENGTH].replace(url, "<url>"))
    return "".join(char if char.isprintable() else "?" for char in text)[:TEXT_LENGTH]


def _classify_code(code: int, said: str, text: str, facts: Facts) -> tuple[Fault, str]:
    if code in (_E_URL, _E_USER_IN_URL) or (code == _E_UNSUPPORTED and not facts.sends):
        return Fault.UNBUILDABLE, said
    if code in _TLS_CODES or (code in (_E_SEND, _E_RECEIVE) and "SSL" in text and "alert" in text):
        return Fault.TLS, said
    if code in _INTERNAL_CODES:
        return Fault.INTERNAL, said
    if code in (_E_PROXY_NAME, _E_NAME):
        return Fault.DNS_TEMPORARY, said
    if code in _NOT_HTTP_CODES and not facts.begun:
        return Fault.PROTOCOL, NOT_HTTP_TEXT
    if code == _E_TOO_LARGE:
        return Fault.PROTOCOL, "a header line of the reply, or their number, is over the bound"
    if code in _PROTOCOL_CODES:
        return Fault.PROTOCOL, said
    if code == 0:
        return Fault.CONNECTION, "closed before the reply's header block ended"
    return Fault.CONNECTION, said


def _phase(facts: Facts) -> str:
    if facts.sends:
        return "timed out within the reply's header block" if facts.begun else "timed out waiting for the reply"
    return "timed out in the TLS handshake" if facts.connected else "timed out connecting"


def _classify_proxy(code: int, answer: int) -> tuple[Fault, str] | None:
    """A proxy that is away or wants other credentials is ours to mend; what it refuses is the target's."""
    if code == _E_PROXY_NAME:
        return Fault.INTERNAL, "the egress proxy's name cannot be resolved"
    if answer == 407 or (code == _E_CONNECT and not answer):
        return Fault.INTERNAL, f"the egress proxy cannot be used (answer {answer})"
    if code == _E_CONNECT:
        return Fault.CONNECTION, f"the egress proxy answered {answer}"
    return None
