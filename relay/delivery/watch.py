"""The sockets that libcurl wants watched, and epoll, which watches them."""

from __future__ import annotations

import contextlib
import errno
import logging
import select

import pycurl

log = logging.getLogger(__name__)

#: libcurl's wishes as epoll's bits.
_WATCH = {
    pycurl.POLL_NONE: 0,
    pycurl.POLL_IN: select.EPOLLIN,
    pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}
_POLL_REMOVE = pycurl.POLL_REMOVE
#: The number stands for nothing, or for something that epoll does not know.
_NOT_WATCHED = frozenset({errno.EBADF, errno.ENOENT})


class Watch:
    """One epoll set. The engine's thread alone may use it."""

    __slots__ = ("epoll", "heard", "watched")

    def __init__(self) -> None:
        """Raises OSError where there are no descriptors left."""
        self.epoll = select.epoll()
        #: Descriptor -> bits that epoll has it registered for; negative where libcurl has no interest just now.
        self.watched: dict[int, int] = {}
        #: Descriptor -> `time.monotonic()` of its last input.
        self.heard: dict[int, float] = {}

    def on_socket(self, wish: int, descriptor: int, _multi: object, _data: object) -> None:
        """Watch a socket as libcurl wishes; a raise here would break its loop.

        A registration outlives the wish's end, because a kept connection is wanted again soon, and mostly for the same:
        then nothing has to be done. `on_open` forgets it where the number comes to stand for another socket.
        """
        watched = self.watched
        known = watched.get(descriptor)
        if wish == _POLL_REMOVE:
            if known is not None and known > 0:
                watched[descriptor] = -known
            return
        bits = _WATCH[wish]
        if known == -bits:
            watched[descriptor] = bits
        elif known != bits:
            self._register(descriptor, bits, is_known=known is not None)

    def on_open(self, descriptor: int) -> None:
        """Learn that the number stands for a new socket, which epoll does not know."""
        self.watched.pop(descriptor, None)
        self.heard.pop(descriptor, None)

    def forget(self, descriptor: int) -> None:
        """Watch a socket no more. It may be closed by now: libcurl drops kept connections that died at any time."""
        self.watched.pop(descriptor, None)
        try:
            self.epoll.unregister(descriptor)
        except OSError as error:
            if error.errno not in _NOT_WATCHED:
                raise

    def _register(self, descriptor: int, bits: int, *, is_known: bool) -> None:
        try:
            if is_known:
                # It fails for one that epoll does not know: closed ones it forgets.
                with contextlib.suppress(FileNotFoundError):
                    self.epoll.modify(descriptor, bits)
                    self.watched[descriptor] = bits
                    return
            self.epoll.register(descriptor, bits)
            self.watched[descriptor] = bits
        except OSError:
            log.exception("a socket cannot be watched", extra={"action": "engine.watch_failed"})
