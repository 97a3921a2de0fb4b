"""The sink's own process: takes POSTs, answers them, and writes down what came when, at the least CPU.

The receiver shares the machine's cores with what is measured, so each request costs one read, a few searches in what
was read, and one write: 14 µs, of which 9 are the kernel's. `relay.loadtest.sink` runs it as a file, with a descriptor
to talk over and a number of listeners, hence the standard library alone.

What a path begins with says what becomes of its requests: `/hang` is never answered, `/drop` is cut off before any
answer, `/forget` is answered and not written down; anything else is answered and written down.
HTTP/1.1 with Content-Length only; a request for `Connection: close` is answered, and its client closes.
"""

from __future__ import annotations

import heapq
import json
import re
import resource
import select
import socket
import sys
import time
from array import array
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

_ANSWERS: Final = {
    204: b"HTTP/1.1 204 No Content\r\n\r\n",
    200: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
_REFUSAL: Final = b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

#: Bytes taken with one read: a whole request of the usual size, or several.
_READ_BYTES: Final = 64 * 1024
#: Bytes of header above which a client is cut off.
_HEADER_BYTES: Final = 64 * 1024
#: Connections that may wait to be accepted, at each listener.
_BACKLOG: Final = 4096
_EVENTS_PER_TURN: Final = 512
#: Bytes of ids after which they are folded: about a millisecond's work, so that no answer waits longer.
_FOLD_BYTES: Final = 36 * 4096

_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"Content-Length: "
_ID: Final = b"Relay-Delivery-Id: "
_ID_CHARACTERS: Final = 36
_ID_FORM: Final = re.compile(rb"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class MalformedError(ValueError):
    """The request has no length that could be read, or a header without end."""


class Server:
    """The loop: listeners on loopback, every connection in one epoll, and the control channel beside them."""

    def __init__(self, control: Connection, listeners: int) -> None:
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._listeners: dict[int, socket.socket] = {}
        self._connections: dict[int, socket.socket] = {}
        #: What came of a request that is not whole yet, by descriptor; None where nothing is answered any more.
        self._unusual: dict[int, bytes | None] = {}
        #: (when, descriptor, answer): answers held back by the delay.
        self._delayed: list[tuple[float, int, bytes]] = []
        self._answer = _ANSWERS[204]
        self._delay_secs = 0.0
        #: The ids that came, 36 characters each, and what was folded of them: 16 bytes each.
        self._texts = bytearray()
        self._ids = bytearray()
        self._times = array("d")
        self._unnamed = 0
        self._running = True
        for _ in range(listeners):
            listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            listener.settimeout(0.0)
            # Accepted sockets inherit it (Linux): an answer must not wait for the client's acknowledgement.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._listeners[listener.fileno()] = listener
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    @property
    def ports(self) -> list[int]:
        """The listeners' ports."""
        return [listener.getsockname()[1] for listener in self._listeners.values()]

    def run(self) -> None:
        """Serve until told to stop, or until the parent is gone."""
        poll, connections = self._epoll.poll, self._connections
        while self._running:
            wait = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None
            for descriptor, _ in poll(wait, _EVENTS_PER_TURN):
                connection = connections.get(descriptor)
                if connection is None:
                    self._serve_other(descriptor)
                    continue
                try:
                    data = connection.recv(_READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                # The usual case, here for its cost: one whole request, of the usual spelling and kind of path.
                end = data.find(_END)
                at = data.find(_LENGTH, 0, end)
                if (
                    at > 0
                    and (named := data.find(_ID, 0, end)) > 0
                    and data.startswith(b"POST /e")
                    and data[named + 55 : named + 56] == b"\r"
                    and data[at + 16 : data.find(b"\r", at)] == b"%d" % (len(data) - end - 4)
                    and descriptor not in self._unusual
                    and not self._delay_secs
                ):
                    self._texts += data[named + 19 : named + 55]
                    self._times.append(time.time())
                    try:
                        connection.send(self._answer)
                    except OSError:
                        self._close(descriptor)
                elif data:
                    self._take(descriptor, connection, data)
                else:
                    self._close(descriptor)
            if self._delayed:
                self._answer_delayed()
            if len(self._texts) > _FOLD_BYTES:
                self._fold()

    def _serve_other(self, descriptor: int) -> None:
        if descriptor in self._listeners:
            self._accept(self._listeners[descriptor])
        elif descriptor == self._control.fileno():
            self._obey()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            connection.settimeout(0.0)
            self._connections[connection.fileno()] = connection
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _take(self, descriptor: int, connection: socket.socket, data: bytes) -> None:
        """Serve whatever whole requests there are, and keep the rest for the next read."""
        kept = self._unusual.pop(descriptor, b"")
        if kept is None:
            self._unusual[descriptor] = None
            return
        data = kept + data
        answers = b""
        start = 0
        try:
            while (head := head_of(data, start)) is not None and head.end <= len(data):
                start = head.end
                if head.path.startswith(b"/hang"):
                    self._unusual[descriptor] = None
                    break
                if head.path.startswith(b"/drop"):
                    self._close(descriptor)
                    return
                if not head.path.startswith(b"/forget"):
                    self._note(head.delivery_id)
                answers += self._answer
            else:
                if start < len(data):
                    self._unusual[descriptor] = data[start:]
        except MalformedError:
            self._send(descriptor, connection, answers + _REFUSAL)
            self._close(descriptor)
            return
        if answers and self._delay_secs:
            heapq.heappush(self._delayed, (time.monotonic() + self._delay_secs, descriptor, answers))
        elif answers:
            self._send(descriptor, connection, answers)

    def _note(self, delivery_id: bytes | None) -> None:
        if delivery_id is None:
            self._unnamed += 1
        else:
            self._texts += delivery_id
            self._times.append(time.time())

    def _fold(self) -> None:
        """Make 16 bytes of each id's 36 characters; many at once cost a tenth of one at a time.

        Raises where one was not an id: a sink that ends is noticed, wrong books are not.
        """
        folded = bytes.fromhex(self._texts.replace(b"-", b"").decode("ascii"))
        if len(folded) != len(self._texts) // _ID_CHARACTERS * 16:
            raise MalformedError("what came as ids are none")
        self._ids += folded
        self._texts.clear()

    def _send(self, descriptor: int, connection: socket.socket, answer: bytes) -> None:
        try:
            connection.send(answer)
        except OSError:
            # Gone, or so far behind with reading that a few dozen bytes have no room: either way no client of ours.
            self._close(descriptor)

    def _answer_delayed(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, descriptor, answer = heapq.heappop(self._delayed)
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._send(descriptor, connection, answer)

    def _close(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        self._unusual.pop(descriptor, None)
        # The number is free for another connection from now on: its answers must not go there.
        if self._delayed:
            self._delayed = [held for held in self._delayed if held[1] != descriptor]
            heapq.heapify(self._delayed)
        connection.close()

    def _obey(self) -> None:
        """Carry out one command of the parent's; its end of file ends this process."""
        try:
            command, _, argument = self._control.recv_bytes().partition(b" ")
        except (EOFError, OSError):
            self._running = False
            return
        if command == b"ports":
            self._control.send_bytes(json.dumps(self.ports).encode())
        elif command == b"count":
            self._control.send_bytes(b"%d" % (len(self._times) + self._unnamed))
        elif command == b"snapshot":
            self._fold()
            self._control.send_bytes(bytes(self._ids))
            self._control.send_bytes(self._times.tobytes())
        elif command == b"reset":
            self._texts.clear()
            self._ids.clear()
            self._times = array("d")
            self._unnamed = 0
            self._control.send_bytes(b"done")
        elif command == b"answer":
            mode = json.loads(argument)
            self._answer, self._delay_secs = _ANSWERS[mode["status"]], mode["delay_ms"] / 1000
            self._control.send_bytes(b"done")
        else:
            self._running = False
            self._control.send_bytes(b"done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What matters of one request."""

    #: Where its body ends, and the next request begins.
    end: int
    path: bytes
    #: The 36 characters of its delivery's id, where it names one.
    delivery_id: bytes | None


def head_of(data: bytes, start: int) -> Head | None:
    """Read the request that begins at `start`; names of headers in any case. None while its header is not whole.

    The body need not be there yet. Raises MalformedError.
    """
    end = data.find(_END, start)
    if end < 0:
        if len(data) - start > _HEADER_BYTES:
            raise MalformedError
        return None
    lines = data[start:end].split(b"\r\n")
    words = lines[0].split(b" ")
    length: int | None = None
    delivery_id: bytes | None = None
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                length = int(value) if value.strip().isdigit() else None
            case b"relay-delivery-id":
                delivery_id = value.strip()
            case b"transfer-encoding":
                raise MalformedError
    if len(words) != 3 or length is None or (delivery_id is not None and not _ID_FORM.fullmatch(delivery_id)):
        raise MalformedError
    return Head(end=end + len(_END) + length, path=words[1], delivery_id=delivery_id)


def main(arguments: list[str]) -> None:
    """Serve on as many listeners as asked, over the control descriptor given."""
    descriptor, listeners = map(int, arguments)
    # Workers keep hundreds of connections each; the usual soft limit is 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Connection(descriptor) as control:
        Server(control, listeners).run()


if __name__ == "__main__":
    main(sys.argv[1:])
