"""Opens the sockets of one transfer, so that no address is dialled before the policy has judged it.

libcurl calls the hook for every new socket, after resolution and with the address as it will be
dialled, whatever spelling the URL had. That makes it the authority: checks made earlier are a courtesy.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import pycurl

log = logging.getLogger(__name__)

#: Judges an address in text form: the name of the rule that refuses it, or None where it may be dialled.
Policy = Callable[[str], str | None]

#: This machine lacks the address family: the receiver is unreachable from here, but nothing of ours is broken.
_NO_SUCH_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT})


class Guard:
    """The socket-opening hook of one curl handle, and what it decided since `reset()`.

    It runs for each address of a name in turn, for racing address families and for new connections
    after a resend. It does not run for a kept connection: that one was judged when it was opened.

    With `proxy_port` set the only addresses it sees are the egress proxy's, which the operator chose
    and which may well be private: then the port must be the proxy's and the policy is not asked. The
    receiver's address must have been judged before, because the proxy dials it.
    """

    __slots__ = ("_on_open", "_policy", "_proxy_port", "address", "allowed", "broken", "refused", "used")

    def __init__(
        self, policy: Policy, *, proxy_port: int | None = None, on_open: Callable[[int], object] = lambda _: None
    ) -> None:
        """`on_open` is told each new socket's number: what was known of that number holds no longer."""
        self._policy = policy
        self._proxy_port = proxy_port
        self._on_open = on_open
        self.reset()

    def reset(self) -> None:
        """Forget the last transfer."""
        #: Whether it ran at all. On a kept connection it does not.
        self.used = False
        #: Sockets opened, and addresses refused, for this transfer.
        self.allowed = 0
        self.refused = 0
        #: The address last dialled.
        self.address: str | None = None
        #: What of ours failed while opening (descriptors, the policy itself), in words.
        self.broken: str | None = None

    def open_socket(self, _purpose: int, address: Any) -> int:
        """Return a new socket's descriptor, which libcurl then owns, or `SOCKET_BAD`.

        Never raises: libcurl would print the traceback. A policy that raises refuses.
        """
        self.used = True
        try:
            return self._open(address)
        except Exception:  # callback boundary: whatever fails, no socket is handed out
            log.exception("the address policy failed", extra={"action": "engine.policy_failed"})
            self.broken = "the address policy failed"
            return int(pycurl.SOCKET_BAD)

    def _open(self, address: Any) -> int:
        if address.family not in (socket.AF_INET, socket.AF_INET6) or not self._may_dial(address.addr):
            self.refused += 1
            return int(pycurl.SOCKET_BAD)
        try:
            opened = socket.socket(address.family, address.socktype, address.protocol)
        except OSError as error:
            if error.errno in _NO_SUCH_FAMILY:
                self.allowed += 1
            else:
                self.broken = f"no socket: {errno.errorcode.get(error.errno or 0, 'unknown')}"
            return int(pycurl.SOCKET_BAD)
        self.allowed += 1
        self.address = address.addr[0]
        self._on_open(opened.fileno())
        return opened.detach()

    def _may_dial(self, address: tuple[Any, ...]) -> bool:
        if self._proxy_port is not None:
            return bool(address[1] == self._proxy_port)
        return self._policy(address[0]) is None
