"""One curl handle's life: its options, its callbacks, and what its end means.

Handles are reused, and nothing of one transfer may reach the next (B-84, B-85). So one function sets every option there
is to set. What all requests share is set after a `reset()`; what every request sets is set anew, or known to be what it
was; a request that sets anything else takes a `reset()` before and after it.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import pycurl

from relay.core.errors import InvalidInput
from relay.core.observation import Fault, Observation
from relay.delivery.guard import Guard, Policy
from relay.delivery.reply import Reply
from relay.delivery.verdict import E_ABORTED, Facts, classify, tries_next_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.delivery.request import Limits, SendRequest
    from relay.delivery.target import Target

#: Seconds that libcurl keeps the addresses that it was given. They serve the connection that is made next; and it goes
#: through all that it keeps at the end of every transfer, so that thousands of names would cost more than the sends.
DNS_CACHE_SECS = 1
#: Seconds that a connection may lie idle, and live in all: a name that moved is followed by then.
CONNECTION_IDLE_SECS = 60
CONNECTION_LIFE_SECS = 300
#: Bytes of each of libcurl's buffers. The least it takes: each transfer in flight has two.
BUFFER_BYTES = 16 * 1024

#: Bytes beside those of header and body that a reply's framing may have, and TLS; as many again as those are free.
FRAMING_BYTES = 256 * 1024

#: Where Linux keeps the bytes received in what it tells of a TCP connection: 64 bits, in its own order.
_TCP_INFO_RECEIVED: Final = slice(128, 136)

#: libcurl options that pycurl has no name for.
_SUPPRESS_CONNECT_HEADERS: Final = 265
_DISALLOW_USERNAME_IN_URL: Final = 278

# Bound once: they are looked up for every transfer.
_monotonic = time.monotonic
_TIMEOUT_MS, _CONNECT_TIMEOUT_MS = pycurl.TIMEOUT_MS, pycurl.CONNECTTIMEOUT_MS
_URL, _HTTPHEADER, _POSTFIELDS = pycurl.URL, pycurl.HTTPHEADER, pycurl.POSTFIELDS
_BYTES_SENT = pycurl.REQUEST_SIZE
_RESOLVED, _CONNECTED, _SECURED = pycurl.NAMELOOKUP_TIME_T, pycurl.CONNECT_TIME_T, pycurl.APPCONNECT_TIME_T


class Transfer:
    """A curl handle and the one request that it carries at a time.

    Only the engine's thread may touch it. `curl` leads back to it by its attribute `transfer`.
    Callbacks never raise: libcurl would print a traceback, or break its loop.
    """

    __slots__ = (
        "_brought_addresses",
        "_brought_before",
        "_connect_ends_at",
        "_connect_timeout_ms",
        "_fixed",
        "_is_stained",
        "_limits",
        "_lookup_stopped",
        "_may_send",
        "_remote",
        "_second_send",
        "_sent_at",
        "_sent_before",
        "_special",
        "_timeout_ms",
        "_url",
        "addresses",
        "curl",
        "dns_us",
        "ends_at",
        "guard",
        "reply",
        "request",
        "sends",
        "started_at",
        "target",
        "tunnelled",
    )

    request: SendRequest
    target: Target
    #: Vetted, in the order to dial; empty where the host is a literal and libcurl dials it itself.
    addresses: tuple[str, ...]
    #: `time.monotonic()` of its start, the look-up of its name included, and of its end at the latest.
    started_at: float
    ends_at: float
    #: What the look-up took.
    dns_us: int
    #: Behind the egress proxy alone: which of the addresses it is told.
    tunnelled: int
    #: How often the request went out.
    sends: int
    _sent_at: float
    _remote: str | None

    def __init__(self, limits: Limits, policy: Policy, on_open: Callable[[int], object]) -> None:
        """`on_open` is told the number of each socket that is opened."""
        self.curl = pycurl.Curl()
        self.curl.transfer = self
        proxy = limits.proxy
        self.guard = Guard(policy, proxy_port=None if proxy is None else proxy.port, on_open=on_open)
        self._limits = limits
        self.reply = Reply(max_body_bytes=limits.max_response_bytes, snippet_bytes=limits.snippet_bytes)
        self._fixed = self._fixed_options()
        #: Whether the handle holds options that not every request sets, or none of ours yet.
        self._special = True
        #: What the handle holds of options that are mostly the same from one request to the next.
        self._timeout_ms = self._connect_timeout_ms = -1
        self._url = ""
        #: Whether the next send is this start's first.
        self._may_send = True
        #: What few transfers see: a send that was stopped, a look-up of libcurl's own that was, a start after that, and
        #: what a first start has put on the wire. `_is_stained` where there is any.
        self._is_stained = True
        self._second_send = self._lookup_stopped = self._brought_addresses = False
        self._sent_before = 0
        #: Bytes that a kept connection had brought before this reply, once `is_flooded` knows.
        self._brought_before: int | None = None
        #: Behind the egress proxy alone: when all addresses must have been tried.
        self._connect_ends_at = 0.0
        self.tunnelled = 0

    def begin(
        self,
        request: SendRequest,
        target: Target,
        now: float,
        *,
        since: float | None = None,
        addresses: tuple[str, ...] = (),
        pins: list[str] | None = None,
    ) -> None:
        """Make the handle ready to be added. `now` is `time.monotonic()`, as are all times here.

        `since` is when its name began to be looked up, where that took time: it counts as part of the attempt. `pins`
        are RESOLVE entries that libcurl does not have yet. Raises InvalidInput where the URL or a header cannot be
        made into a request, and pycurl.error where libcurl refuses an option of ours.
        """
        self.request = request
        self.target = target
        self.addresses = addresses
        timeout_ms, connect_timeout_ms = request.timeout_ms, request.connect_timeout_ms
        self.sends = 0
        if since is None:
            self.started_at = now
            self.dns_us = 0
        else:
            self.started_at = since
            waited = now - since
            self.dns_us = int(waited * 1_000_000)
            timeout_ms -= int(waited * 1000)
            connect_timeout_ms -= int(waited * 1000)
        self.ends_at = now + timeout_ms / 1000
        if self._limits.proxy is not None:
            self.tunnelled = 0
            self._connect_ends_at = now + connect_timeout_ms / 1000
        self._may_send = True
        self._sent_at = 0.0
        self._remote = None
        if self._is_stained or self.guard.used:
            self._clean()
        self._set_options(timeout_ms, connect_timeout_ms, pins=pins, fresh=False)

    def begin_again(self, now: float, pins: list[str] | None) -> bool:
        """Make the handle ready for the one resend, on a new connection (B-42), or for a start with its addresses, or
        with the next of them.

        False if no time is left.
        """
        left_ms = int((self.ends_at - now) * 1000)
        if left_ms <= 0:
            return False
        resend, brought = self._second_send, self._lookup_stopped
        sent_before = self.curl.getinfo(_BYTES_SENT) if self.sends else 0
        self.reply.reset()
        self._clean()
        self._may_send = self._is_stained = True
        self._brought_addresses = brought
        self._sent_before = sent_before
        if resend:
            self._connect_ends_at = now + self.request.connect_timeout_ms / 1000
        self._set_options(left_ms, self.request.connect_timeout_ms, pins=pins, fresh=resend)
        return True

    def finish(self, code: int, text: str, now: float) -> Observation | None:
        """Say what the transfer came to; `code` and `text` are libcurl's. None asks for one more start.

        That is where a kept connection broke under the request, or a new one had to be made and libcurl did not have
        the addresses any more, or the egress proxy did not get through to one of several.
        """
        if self.reply.complete:
            return self._observe(now, body_incomplete=code != 0)
        if code == E_ABORTED:
            if self._second_send and self.sends == 1:
                return None
            if self._lookup_stopped and self.addresses and not self._brought_addresses:
                return None
        facts = self._facts()
        if self.tunnelled + 1 < len(self.addresses) and tries_next_address(code, facts) and now < self._connect_ends_at:
            self.tunnelled += 1
            return None
        seen = self._observe(now)
        seen.fault, seen.text = classify(code, text, facts)
        if seen.fault is Fault.REFUSED:
            seen.remote_address = None
        return seen

    def cut(self, fault: Fault, text: str, now: float) -> Observation:
        """Say what a transfer came to that the engine ended itself. A complete answer stays one."""
        if self.reply.complete:
            return self._observe(now, body_incomplete=True)
        seen = self._observe(now)
        seen.fault, seen.text = fault, text
        return seen

    def release(self) -> None:
        """Let go of the request and of what came back."""
        del self.request
        self.reply.reset()

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
        if self.reply.begun_at or (self.sends and self.target.is_plain and last_input > self._sent_at):
            return max(last_input, self._sent_at)
        return None

    def is_flooded(self, descriptor: int) -> bool:
        """Whether far more came over the connection than the reply consists of: framing without end.

        libcurl takes chunk extensions of any length and tells nobody. To be asked now and then while the body lasts;
        on a kept connection the first time only takes note of what it had brought before.
        """
        if not self.reply.complete or descriptor < 0:
            return False
        received = _received_bytes(descriptor)
        counted = self.reply.header_bytes + self.reply.body_bytes
        if self._brought_before is None:
            self._is_stained = True
            self._brought_before = 0 if self.guard.used else received - counted
        return received - self._brought_before - counted > FRAMING_BYTES + counted

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
            self._sent_at = _monotonic()
            return 0
        self._is_stained = self._second_send = True
        return int(pycurl.PREREQFUNC_ABORT)

    def _on_lookup(self) -> int:
        """Runs before libcurl resolves a host that it was not given addresses for: a literal is all that it may."""
        proxy = self._limits.proxy
        if self.target.is_literal if proxy is None else proxy.is_literal:
            return 0
        self._is_stained = self._lookup_stopped = True
        return 1

    # Options.

    def _clean(self) -> None:
        """Forget what few transfers leave behind."""
        self._is_stained = self._brought_addresses = self._second_send = self._lookup_stopped = False
        self._sent_before = 0
        self._brought_before = None
        self.guard.reset()

    def _fixed_options(self) -> tuple[tuple[int, Any], ...]:
        """The options that are the same for every request. Made once: the bound methods cost."""
        proxy = self._limits.proxy
        options: list[tuple[int, Any]] = [
            (pycurl.NOSIGNAL, 1),
            # Empty, not unset: the environment must not choose a proxy, nor an exception to ours.
            (pycurl.PROXY, "" if proxy is None else proxy.url),
            (pycurl.NOPROXY, ""),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (_DISALLOW_USERNAME_IN_URL, 1),
            (pycurl.PATH_AS_IS, 1),
            (pycurl.FOLLOWLOCATION, 0),
            (pycurl.NETRC, pycurl.NETRC_IGNORED),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
            # An answer without a status line comes as a body then, and is counted before it is refused.
            (pycurl.HTTP09_ALLOWED, 1),
            (pycurl.OPENSOCKETFUNCTION, self.guard.open_socket),
            (pycurl.PREREQFUNCTION, self._on_send),
            (pycurl.RESOLVER_START_FUNCTION, self._on_lookup),
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
        if proxy is not None:
            options += [
                (pycurl.HTTPPROXYTUNNEL, 1),
                (_SUPPRESS_CONNECT_HEADERS, 1),
                (pycurl.PROXY_CAINFO, self._limits.ca_file),
            ]
            if proxy.credentials:
                options += [(pycurl.PROXYUSERPWD, proxy.credentials), (pycurl.PROXYAUTH, pycurl.HTTPAUTH_BASIC)]
        return tuple(options)

    def _set_options(self, timeout_ms: int, connect_timeout_ms: int, *, pins: list[str] | None, fresh: bool) -> None:
        """Set every option, so that none is left of the request before."""
        request = self.request
        headers = request.headers
        joined = "".join(headers)
        if "\r" in joined or "\n" in joined or "\0" in joined:
            # libcurl writes them as they are: a second request could be smuggled.
            raise InvalidInput("a header holds a line break or a NUL", code="unbuildable")
        setopt = self.curl.setopt
        special = (
            fresh
            or request.certificate is not None
            or request.private_key is not None
            or self._limits.proxy is not None
            # Setting an empty list changes nothing: the headers of the request before would stay.
            or not headers
        )
        if special or self._special:
            self._reset()
        self._special = special
        # To libcurl 0 means for ever.
        timeout_ms = max(timeout_ms, 1)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            setopt(_TIMEOUT_MS, timeout_ms)
        connect_timeout_ms = max(1, connect_timeout_ms if connect_timeout_ms < timeout_ms else timeout_ms)
        if connect_timeout_ms != self._connect_timeout_ms:
            self._connect_timeout_ms = connect_timeout_ms
            setopt(_CONNECT_TIMEOUT_MS, connect_timeout_ms)
        url = self.target.url
        if url != self._url:
            self._url = url
            setopt(_URL, url)
        try:
            setopt(_HTTPHEADER, headers)
        except ValueError as error:  # UnicodeEncodeError is one
            raise InvalidInput("a header cannot be encoded", code="unbuildable") from error
        setopt(_POSTFIELDS, request.body)
        if pins is not None:
            # libcurl takes them in when the transfer starts, once, for all handles: what stays here has no effect.
            setopt(pycurl.RESOLVE, pins)
        if special:
            self._set_special(fresh=fresh)

    def _reset(self) -> None:
        # It drops the guard with the rest.
        self.curl.reset()
        for option, value in self._fixed:
            self.curl.setopt(option, value)
        self._timeout_ms = self._connect_timeout_ms = -1
        self._url = ""

    def _set_special(self, *, fresh: bool) -> None:
        request, setopt = self.request, self.curl.setopt
        if fresh:
            setopt(pycurl.FRESH_CONNECT, 1)
        if request.certificate is not None:
            setopt(pycurl.SSLCERT_BLOB, request.certificate)
        if request.private_key is not None:
            setopt(pycurl.SSLKEY_BLOB, request.private_key)
        if self._limits.proxy is not None:
            # The proxy is told one target, not a list, and never the name: it would look that up itself, unvetted.
            setopt(pycurl.CONNECT_TO, [self.target.tunnel(self.addresses[self.tunnelled])])
            if len(self.addresses) > 1:
                setopt(_CONNECT_TIMEOUT_MS, self._turn_ms())

    def _turn_ms(self) -> int:
        """How long the proxy may take for the address whose turn it is: half of what is left, and the last one all."""
        left = self._connect_ends_at - _monotonic()
        if self.tunnelled + 1 < len(self.addresses):
            left /= 2
        return max(1, int(left * 1000))

    # The end.

    def _observe(self, now: float, *, body_incomplete: bool = False) -> Observation:
        """Facts that hold whatever the end was; the caller adds the fault."""
        getinfo, reply, guard = self.curl.getinfo, self.reply, self.guard
        begun_at = reply.begun_at
        # By place, in the order of its fields: by name it would cost twice as much, for every transfer.
        seen = Observation(
            None,
            None,
            reply.status if reply.complete else None,
            body_incomplete,
            reply.headers() if reply.complete else [],
            reply.snippet,
            self.sends,
            self._remote or guard.address,
            self.dns_us,
            0,
            0,
            int((begun_at - self._sent_at) * 1_000_000) if begun_at else 0,
            int((now - self.started_at) * 1_000_000),
            self._sent_before + getinfo(_BYTES_SENT),
            reply.header_bytes + reply.body_bytes,
        )
        if guard.used:
            # Fields of libcurl's are cumulative, and 0 for what did not take place.
            resolved, connected, secured = getinfo(_RESOLVED), getinfo(_CONNECTED), getinfo(_SECURED)
            seen.connect_us = max(0, connected - resolved) if connected else 0
            seen.tls_us = max(0, secured - connected) if connected and secured else 0
        return seen

    def _facts(self) -> Facts:
        guard = self.guard
        return Facts(
            url=self.target.url,
            sends=self.sends,
            second_send=self._second_send,
            begun=bool(self.reply.begun_at),
            broken_off=None if self.reply.fault is None else (self.reply.fault, self.reply.fault_text),
            guard_broken=guard.broken,
            refused=guard.refused,
            allowed=guard.allowed,
            connected=bool(self.curl.getinfo(_CONNECTED)),
            proxied=self._limits.proxy is not None,
            proxy_answer=self.curl.getinfo(pycurl.HTTP_CONNECTCODE),
        )


def _received_bytes(descriptor: int) -> int:
    """Return the bytes that a connection has brought in its life."""
    connection = socket.socket(fileno=descriptor)
    try:
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RECEIVED.stop)
    finally:
        # It is libcurl's.
        connection.detach()
    return int.from_bytes(facts[_TCP_INFO_RECEIVED], sys.byteorder)
