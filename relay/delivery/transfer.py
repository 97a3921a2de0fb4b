"""One curl handle's life: its options, its callbacks, and what its end means.

Handles are reused, and nothing of one transfer may reach the next (B-84, B-85). So one function sets every
option there is to set. What all requests share is set after a `reset()`, and stays while each request sets no more
than the five options that every request sets anew; one that sets any other takes a `reset()` before and after it.
"""

from __future__ import annotations

import functools
import re
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pycurl

from relay.core.errors import InvalidInput
from relay.core.observation import Fault, Observation
from relay.delivery.guard import Guard, Policy
from relay.delivery.reply import Reply

if TYPE_CHECKING:
    from relay.delivery.request import Limits, SendRequest

#: Characters of an error text that are kept.
TEXT_LENGTH = 300
#: Seconds that a resolved or pinned address is good for.
DNS_CACHE_SECS = 60
#: Seconds that a connection may lie idle, and live in all: a name that moved is followed by then.
CONNECTION_IDLE_SECS = 60
CONNECTION_LIFE_SECS = 300
#: Bytes of each of libcurl's buffers. The least it takes: each transfer in flight has two.
BUFFER_BYTES = 16 * 1024
#: Vetted addresses of a name that are tried: each may cost a connect within the one attempt.
MAX_ADDRESSES = 8

#: What a refusal says, whatever the address was: the text must not map the inside of a network.
REFUSED_TEXT = "refused by the address policy"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")

#: libcurl options that pycurl has no name for.
_SUPPRESS_CONNECT_HEADERS: Final = 265
_DISALLOW_USERNAME_IN_URL: Final = 278

# Bound once: they are looked up for every transfer.
_TOTAL, _BYTES_SENT = pycurl.TOTAL_TIME_T, pycurl.REQUEST_SIZE
_RESOLVED, _CONNECTED, _SECURED = pycurl.NAMELOOKUP_TIME_T, pycurl.CONNECT_TIME_T, pycurl.APPCONNECT_TIME_T
_READY, _FIRST_BYTE = pycurl.PRETRANSFER_TIME_T, pycurl.STARTTRANSFER_TIME_T

#: libcurl's error numbers that are judged one by one; the rest are in the sets.
_E_UNSUPPORTED, _E_URL, _E_PROXY_NAME, _E_NAME, _E_CONNECT = 1, 3, 5, 6, 7
_E_TIMEOUT, _E_ABORTED, _E_SEND, _E_RECEIVE, _E_USER_IN_URL = 28, 42, 55, 56, 67
_TLS_CODES = frozenset({35, 60, 83, 90, 91})
#: Memory, options, certificates of ours that cannot be used, callbacks that failed.
_INTERNAL_CODES = frozenset({2, 23, 27, 42, 43, 49, 58, 77})
_PROTOCOL_CODES = frozenset({1, 8, 61, 92, 100})


class Transfer:
    """A curl handle and the one request that it carries at a time.

    Only the engine's thread may touch it. `curl` leads back to it by its attribute `transfer`.
    Callbacks never raise: libcurl would print a traceback, or break its loop.
    """

    request: SendRequest
    started_at: float
    ends_at: float
    #: Seconds of silence that are allowed.
    idle: float
    #: How often the request went out.
    sends: int
    #: Whether the next send is this start's first, and whether a further one was stopped.
    _may_send: bool
    _second_send: bool
    _sent_at: float
    _plain: bool
    _remote: str | None
    #: What a send before this one has taken and put on the wire.
    _elapsed_us: int
    _sent_before: int
    #: Whether the handle holds options that not every request sets, or none of ours yet.
    _special: bool

    def __init__(self, limits: Limits, policy: Policy) -> None:
        proxy_port = _proxy_port(limits.proxy) if limits.proxy else None
        self.curl = pycurl.Curl()
        self.curl.transfer = self
        self.guard = Guard(policy, proxy_port=proxy_port)
        self._limits = limits
        self.reply = Reply(max_body_bytes=limits.max_response_bytes, snippet_bytes=limits.snippet_bytes)
        self._fixed = self._fixed_options()
        self._special = True

    def begin(self, request: SendRequest, now: float) -> None:
        """Make the handle ready to be added. `now` is `time.monotonic()`, as are all times here.

        Raises InvalidInput where the URL or a header cannot be made into a request, and pycurl.error
        where libcurl refuses an option of ours.
        """
        self.request = request
        self.started_at = now
        self.ends_at = now + request.timeout_ms / 1000
        self.idle = request.idle_timeout_ms / 1000
        self.sends = 0
        self._elapsed_us = 0
        self._sent_before = 0
        self._start(request.timeout_ms, fresh=False)

    def begin_again(self, now: float) -> bool:
        """Make the handle ready for the one resend, on a new connection; False if no time is left (B-42)."""
        left_ms = int((self.ends_at - now) * 1000)
        if left_ms <= 0:
            return False
        self._elapsed_us = int((now - self.started_at) * 1_000_000)
        self._sent_before = self.curl.getinfo(_BYTES_SENT)
        self._start(left_ms, fresh=True)
        return True

    def finish(self, code: int, text: str) -> Observation | None:
        """Say what the transfer came to; `code` and `text` are libcurl's. None asks for the resend."""
        if code == _E_ABORTED and self._second_send and self.sends == 1 and not self.reply.complete:
            return None
        seen = self._observe()
        seen.total_us = self._elapsed_us + self.curl.getinfo(_TOTAL)
        if self.reply.complete:
            seen.body_incomplete = code != 0
        else:
            seen.fault, seen.text = self._classify(code, text)
            if seen.fault is Fault.REFUSED:
                seen.remote_address = None
        return seen

    def cut(self, fault: Fault, text: str, now: float) -> Observation:
        """Say what a transfer came to that the engine ended itself. A complete answer stays one."""
        seen = self._observe()
        seen.total_us = int((now - self.started_at) * 1_000_000)
        if self.reply.complete:
            seen.body_incomplete = True
        else:
            seen.fault, seen.text = fault, text
        return seen

    def release(self) -> None:
        """Let go of the request and of what came back."""
        del self.request
        self.reply.release()

    def close(self) -> None:
        """Free the handle, and the cycle through its callbacks."""
        self.curl.transfer = None
        self.curl.close()
        self._fixed = ()

    def heard_at(self, last_input: float) -> float | None:
        """When the reply last gave a sign of life; None while it has not begun.

        `last_input` is when its socket was last readable. Over TLS only a whole status line says
        that the reply has begun, because session tickets make the socket readable as well.
        """
        if self.reply.begun or (self.sends and self._plain and last_input > self._sent_at):
            return max(last_input, self._sent_at)
        return None

    # Callbacks.

    def _on_send(self, remote: str, _local: str, _remote_port: int, _local_port: int) -> int:
        """Runs before each send. On a stale connection libcurl resends by itself: stop that.

        It would do so up to five times, perhaps on connections that are stale as well, and give each
        the whole time-out again.
        """
        if self._may_send:
            self._may_send = False
            self.sends += 1
            self._remote = remote
            self._sent_at = time.monotonic()
            return 0
        self._second_send = True
        return int(pycurl.PREREQFUNC_ABORT)

    def _no_lookup(self) -> int:
        """The addresses were handed over: a look-up of libcurl's own would go round the vetting."""
        return 1

    # Options.

    def _start(self, timeout_ms: int, *, fresh: bool) -> None:
        self.guard.reset()
        self.reply.reset()
        self._may_send = True
        self._second_send = False
        self._sent_at = 0.0
        self._remote = None
        self._set_options(timeout_ms, fresh=fresh)

    def _fixed_options(self) -> tuple[tuple[int, Any], ...]:
        """The options that are the same for every request. Made once: the bound methods cost."""
        options: list[tuple[int, Any]] = [
            (pycurl.NOSIGNAL, 1),
            # Empty, not unset: the environment must not choose a proxy, nor an exception to ours.
            (pycurl.PROXY, self._limits.proxy),
            (pycurl.NOPROXY, ""),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (_DISALLOW_USERNAME_IN_URL, 1),
            (pycurl.PATH_AS_IS, 1),
            (pycurl.FOLLOWLOCATION, 0),
            (pycurl.NETRC, pycurl.NETRC_IGNORED),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
            (pycurl.HTTP09_ALLOWED, 0),
            (pycurl.OPENSOCKETFUNCTION, self.guard.open_socket),
            (pycurl.PREREQFUNCTION, self._on_send),
            (pycurl.HEADERFUNCTION, self.reply.on_header),
            (pycurl.WRITEFUNCTION, self.reply.on_body),
            (pycurl.CAINFO, self._limits.ca_file),
            (pycurl.SSL_VERIFYPEER, 1),
            (pycurl.SSL_VERIFYHOST, 2),
            (pycurl.DNS_CACHE_TIMEOUT, DNS_CACHE_SECS),
            (pycurl.BUFFERSIZE, BUFFER_BYTES),
            (pycurl.UPLOAD_BUFFERSIZE, BUFFER_BYTES),
            (pycurl.MAXAGE_CONN, CONNECTION_IDLE_SECS),
            (pycurl.MAXLIFETIME_CONN, CONNECTION_LIFE_SECS),
        ]
        if self._limits.proxy:
            options += [(pycurl.HTTPPROXYTUNNEL, 1), (_SUPPRESS_CONNECT_HEADERS, 1)]
        return tuple(options)

    def _set_options(self, timeout_ms: int, *, fresh: bool) -> None:
        """Set every option, so that none is left of the request before."""
        request = self.request
        joined = "".join(request.headers)
        if "\r" in joined or "\n" in joined or "\0" in joined:
            # libcurl writes them as they are: a second request could be smuggled.
            raise InvalidInput("a header holds a line break or a NUL", code="unbuildable")
        setopt = self.curl.setopt
        special = (
            fresh
            or request.certificate is not None
            or request.private_key is not None
            or request.addresses is not None
            # Setting an empty list changes nothing: the headers of the request before would stay.
            or not request.headers
        )
        if special or self._special:
            # It drops the guard with the rest.
            self.curl.reset()
            for option, value in self._fixed:
                setopt(option, value)
        self._special = special
        # To libcurl 0 means for ever.
        setopt(pycurl.TIMEOUT_MS, max(1, timeout_ms))
        setopt(pycurl.CONNECTTIMEOUT_MS, max(1, min(request.connect_timeout_ms, timeout_ms)))
        try:
            setopt(pycurl.URL, request.url)
            setopt(pycurl.HTTPHEADER, request.headers)
        except ValueError as error:  # UnicodeEncodeError is one
            raise InvalidInput("the URL or a header cannot be encoded", code="unbuildable") from error
        setopt(pycurl.POSTFIELDS, request.body)
        self._plain = request.url.startswith("http:")
        if fresh:
            setopt(pycurl.FRESH_CONNECT, 1)
        if request.certificate is not None:
            setopt(pycurl.SSLCERT_BLOB, request.certificate)
        if request.private_key is not None:
            setopt(pycurl.SSLKEY_BLOB, request.private_key)
        if request.addresses is not None:
            if self._limits.proxy:
                # The proxy's own name is still libcurl's to look up.
                setopt(pycurl.CONNECT_TO, [_tunnel_entry(request.url, request.addresses)])
            else:
                setopt(pycurl.RESOLVE, [_resolve_entry(request.url, request.addresses)])
                setopt(pycurl.RESOLVER_START_FUNCTION, self._no_lookup)

    # The end.

    def _observe(self) -> Observation:
        """Facts that hold whatever the end was; the caller adds fault and total."""
        getinfo = self.curl.getinfo
        reply = self.reply
        seen = Observation(
            status=reply.status if reply.complete else None,
            headers=reply.headers() if reply.complete else [],
            snippet=reply.snippet,
            sends=self.sends,
            remote_address=self._remote or self.guard.address,
            bytes_sent=self._sent_before + getinfo(_BYTES_SENT),
            bytes_received=reply.header_bytes + reply.body_bytes,
        )
        if self.reply.begun:
            # Not before: after a failed connect these hold the time of the failure.
            seen.first_byte_us = max(0, getinfo(_FIRST_BYTE) - getinfo(_READY))
        if self.guard.allowed or not self.reply.begun:
            # Fields of libcurl's are cumulative, and 0 for what did not take place.
            resolved, connected = getinfo(_RESOLVED), getinfo(_CONNECTED)
            secured = getinfo(_SECURED)
            seen.dns_us = resolved
            seen.connect_us = max(0, connected - resolved) if connected else 0
            seen.tls_us = max(0, secured - connected) if connected and secured else 0
        return seen

    def _classify(self, code: int, text: str) -> tuple[Fault, str]:
        """Name the fault of a transfer without a complete answer, once and for all."""
        guard = self.guard
        if self.reply.fault is not None:
            return self.reply.fault, self.reply.fault_text
        if guard.broken is not None and not self.sends:
            return Fault.INTERNAL, guard.broken
        if code == _E_CONNECT and guard.refused and not guard.allowed:
            return Fault.REFUSED, REFUSED_TEXT
        if code == _E_UNSUPPORTED and not self.sends and "disabled" in text:
            return Fault.REFUSED, "refused by the scheme policy"
        if code == _E_TIMEOUT:
            return self._classify_timeout()
        if code == _E_ABORTED and self._second_send:
            return Fault.CONNECTION, "the connection broke again after a resend"
        if self._limits.proxy and code in (_E_CONNECT, _E_PROXY_NAME):
            return self._classify_proxy(code)
        said = clean(text, self.request.url) or f"libcurl error {code}"
        if code in (_E_URL, _E_USER_IN_URL) or (code == _E_UNSUPPORTED and not self.sends):
            return Fault.UNBUILDABLE, said
        if code in _TLS_CODES or (code in (_E_SEND, _E_RECEIVE) and "SSL" in text and "alert" in text):
            return Fault.TLS, said
        if code in _INTERNAL_CODES:
            return Fault.INTERNAL, said
        if code in (_E_PROXY_NAME, _E_NAME):
            return Fault.DNS_TEMPORARY, said
        if code in _PROTOCOL_CODES:
            return Fault.PROTOCOL, said
        if code == 0:
            return Fault.CONNECTION, "closed before the reply's header block ended"
        return Fault.CONNECTION, said

    def _classify_timeout(self) -> tuple[Fault, str]:
        if self.sends:
            if self.reply.begun:
                return Fault.TIMEOUT, "timed out within the reply's header block"
            return Fault.TIMEOUT, "timed out waiting for the reply"
        if self.request.addresses is None and not self.guard.allowed and not self.guard.refused:
            return Fault.DNS_TEMPORARY, "timed out resolving the name"
        if self.curl.getinfo(_CONNECTED):
            return Fault.TIMEOUT, "timed out in the TLS handshake"
        return Fault.TIMEOUT, "timed out connecting"

    def _classify_proxy(self, code: int) -> tuple[Fault, str]:
        """A proxy that is away or wants other credentials is ours to mend; what it refuses is the target's."""
        answer = self.curl.getinfo(pycurl.HTTP_CONNECTCODE)
        if code == _E_PROXY_NAME:
            return Fault.INTERNAL, "the egress proxy's name cannot be resolved"
        if not answer or answer == 407:
            return Fault.INTERNAL, f"the egress proxy cannot be used (answer {answer})"
        return Fault.CONNECTION, f"the egress proxy answered {answer}"


def clean(text: str, url: str) -> str:
    """Make libcurl's text fit for a log: no URL, nothing unprintable, bounded.

    Receivers get bytes of their own into it: escape codes, long tokens, what is not UTF-8.
    """
    text = _URL.sub("<url>", text[: 8 * TEXT_LENGTH].replace(url, "<url>"))
    return "".join(char if char.isprintable() else "?" for char in text)[:TEXT_LENGTH]


@functools.lru_cache(maxsize=2048)
def _resolve_entry(url: str, addresses: tuple[str, ...]) -> str:
    """Makes libcurl dial these addresses for the host of a stored URL. Raises ValueError where there are none.

    With `+` the entry ages like an answer. Without it, it would stay for ever, and for every handle.
    """
    host, port = _origin(url)
    if not addresses:
        raise ValueError("no address to dial")
    return f"+{host}:{port}:{','.join(map(_bracketed, addresses[:MAX_ADDRESSES]))}"


def _tunnel_entry(url: str, addresses: tuple[str, ...]) -> str:
    """Makes the proxy connect to the first address for the host of a stored URL: it is told one target, not a list."""
    host, port = _origin(url)
    if not addresses:
        raise ValueError("no address to dial")
    return f"{host}:{port}:{_bracketed(addresses[0])}:{port}"


def _origin(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return _bracketed(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _proxy_port(proxy: str) -> int:
    """The port that the egress proxy is dialled at; 1080 is libcurl's when none is named."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.port or (443 if parts.scheme == "https" else 1080)
