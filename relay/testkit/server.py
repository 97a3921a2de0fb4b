"""A small HTTP/1.1 server on raw sockets, one thread for all connections.

Libraries that serve HTTP will not send half a status line, reset a connection or drip a byte a
millisecond. Here an answer is a list of steps (`relay.testkit.script`) that one loop plays for any
number of connections at once, so that ten thousand hanging requests cost no threads. Bytes are
counted when the kernel takes them, and no more are produced before it does.
"""

from __future__ import annotations

import enum
import heapq
import logging
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from relay.core.errors import InvalidInput
from relay.testkit.request import ChunkedBody, Head, Request, take_head
from relay.testkit.script import Answer, End, Idle, Pause, Step, response_head

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKLOG = 4096
READ_BYTES = 256 * 1024
#: Bytes of later requests that are read while an answer is being played; past them the client has to wait.
MAX_PIPELINED_BYTES = 1024 * 1024
#: Steps played for one connection before the others have their turn.
STEPS_A_TURN = 32
ACCEPTS_A_TURN = 256
#: How long nothing is accepted after the process ran out of descriptors.
ACCEPT_PAUSE_SECS = 0.05
#: epoll counts milliseconds in 32 bits, and a route may be asked for longer pauses.
MAX_SELECT_SECS = 3600.0
#: Connections whose byte counts are remembered.
MAX_COUNTED_CONNECTIONS = 100_000

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGER_NOT = struct.pack("ii", 1, 0)  # on, 0 s: close() discards what is unsent and sends a reset
_NEVER = -1  # a timer's number that no timer has
_log = logging.getLogger(__name__)


class OnConnect(enum.Enum):
    """What becomes of a new connection."""

    SERVE = "serve"
    SILENT = "silent"  # reads and never answers
    CLOSE = "close"
    RESET = "reset"


class Application(Protocol):
    """What the server asks of those who use it; all calls come from the server's thread."""

    def begin(self, request: Request) -> Answer | None:
        """The answer to a request; None, while it is not complete, to wait for its body."""

    def finished(self, request: Request, *, cut: bool) -> None:
        """An answer is over; `cut` if the client left before its end, or the server stopped."""


class _Connection:
    """One accepted socket and where it is in its exchange."""

    __slots__ = (
        "chunked", "continued", "discards", "events", "head", "idle", "inbox", "nth", "number",
        "out", "request", "sock", "steps", "timer", "written",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.nth = 0
        self.written = 0
        self.events = 0  # what the selector watches for
        self.inbox = bytearray()
        self.out = memoryview(b"")
        self.head: Head | None = None  # of the request that is being read
        self.chunked: ChunkedBody | None = None
        self.continued = False  # a 100 was sent, or is not due
        self.request: Request | None = None  # that is being answered
        self.steps: Iterator[Step] | None = None
        self.timer = 0  # number of the live timer, 0 for none, _NEVER to wait for the client alone
        self.idle: Idle | None = None
        self.discards = False  # whatever comes is read and thrown away


class Server:
    """Accepts, reads, plays answers. `start` and `stop` may alternate; the port stays the one first bound."""

    def __init__(self, application: Application, host: str, port: int, *, send_buffer: int | None = None) -> None:
        self._application = application
        self._send_buffer = send_buffer
        self.address: tuple[str, int] = (host, port)
        self.on_connect = OnConnect.SERVE
        self.accepted = 0
        self.bytes_written = 0
        self._written: OrderedDict[int, int] = OrderedDict()
        self._connections: set[_Connection] = set()
        self._timers: list[tuple[float, int, _Connection | None]] = []
        self._timer_numbers = 0
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def open_connections(self) -> int:
        """Connections that neither side has closed, as far as the server has noticed."""
        return len(self._connections)

    def bytes_written_on(self, connection: int) -> int:
        """Bytes the kernel took for one connection (1 is the first accepted); 0 for one unknown or long gone."""
        return self._written.get(connection, 0)

    def start(self) -> None:
        """Bind, listen and serve in a thread of its own; raises OSError where the address cannot be bound."""
        if self._thread is not None:
            return
        host, port = self.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
            listener.bind((host, port))
            listener.listen(BACKLOG)
            listener.settimeout(0)
        except OSError:
            listener.close()
            raise
        self.address = (host, listener.getsockname()[1])
        self._stopping = False
        self._listener = listener
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="relay-testkit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every connection, whatever it is doing, and end the thread; calling twice is fine."""
        if self._thread is None:
            return
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join()
        self._thread = None
        self._waker.close()
        self._wakened.close()  # not by the thread, which may see `_stopping` before it is woken

    # The loop

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._until_next_timer()):
                    if key.data is not None:
                        self._guarded(key.data, events)
                    elif key.fileobj is self._listener:
                        self._accept()
                self._run_timers()
        finally:
            for connection in list(self._connections):
                self._drop(connection, End.CLOSE, cut=True)
            self._timers.clear()
            self._selector.close()
            self._listener.close()

    def _guarded(self, connection: _Connection, events: int) -> None:
        """Serve one connection: whatever goes wrong ends that one alone."""
        if connection not in self._connections:
            return  # dropped earlier in this round
        try:
            if events & selectors.EVENT_READ and not self._read(connection):
                return
            self._run(connection)
        except OSError:
            self._drop(connection, End.CLOSE, cut=True)
        except Exception:  # noqa: BLE001 - the boundary of one connection: the others are served on
            _log.exception("connection %d failed", connection.number)
            self._drop(connection, End.RESET, cut=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("cannot accept: %s", error)
                self._selector.unregister(self._listener)
                self._timer_numbers += 1
                deadline = time.monotonic() + ACCEPT_PAUSE_SECS
                heapq.heappush(self._timers, (deadline, self._timer_numbers, None))
                return
            self.accepted += 1
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(sock, self.accepted)
            self._connections.add(connection)
            if self.on_connect in (OnConnect.CLOSE, OnConnect.RESET):
                self._drop(connection, End.CLOSE if self.on_connect is OnConnect.CLOSE else End.RESET)
                continue
            connection.discards = self.on_connect is OnConnect.SILENT
            self._watch(connection)

    def _until_next_timer(self) -> float | None:
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), MAX_SELECT_SECS)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, number, connection = heapq.heappop(self._timers)
            if connection is None:
                self._selector.register(self._listener, selectors.EVENT_READ)
            elif connection.timer == number:
                connection.timer = 0
                self._guarded(connection, 0)

    def _set_timer(self, connection: _Connection, seconds: float) -> None:
        self._timer_numbers += 1
        connection.timer = self._timer_numbers
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timer_numbers, connection))

    # One connection

    def _read(self, connection: _Connection) -> bool:
        """Take what has come; False if the connection was dropped, because its client left."""
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self._drop(connection, End.CLOSE, cut=True)
            return False
        if not connection.discards:
            connection.inbox += data
        return True

    def _run(self, connection: _Connection) -> None:
        """Play the answer and take up further requests until there is something to wait for."""
        if connection.idle is not None and not connection.inbox and not connection.timer:
            self._end_idle(connection, connection.idle)
            return
        while connection in self._connections:
            if connection.steps is None and not self._take_up(connection):
                break
            if connection.timer or not self._play(connection):
                break
        if connection in self._connections:
            self._watch(connection)

    def _take_up(self, connection: _Connection) -> bool:
        """Read on in the request at the front of the inbox; True once there is an answer to play."""
        try:
            if connection.head is None:
                connection.head = take_head(connection.inbox) if connection.inbox else None
                if connection.head is None:
                    return False
                connection.nth += 1
                connection.idle, connection.timer = None, 0
                connection.chunked = ChunkedBody() if connection.head.chunked else None
                connection.continued = not connection.head.expects_continue
                if not self._has_body(connection) and self._begin(connection, complete=False):
                    return True
            if not self._has_body(connection):
                if not connection.continued:
                    connection.continued = True
                    self._send(connection, _CONTINUE)
                return False
        except InvalidInput as error:
            self._refuse(connection, error)
            return True
        return self._begin(connection, complete=True)

    def _has_body(self, connection: _Connection) -> bool:
        """Whether the whole body is here."""
        assert connection.head is not None
        if connection.chunked is None:
            return len(connection.inbox) >= connection.head.length
        connection.chunked.feed(connection.inbox)
        return connection.chunked.done

    def _begin(self, connection: _Connection, *, complete: bool) -> bool:
        """Ask for the answer to the request that was read; False if it is to wait for the body."""
        head = connection.head
        assert head is not None
        body = bytes(connection.inbox[: head.length] if connection.chunked is None else connection.chunked.decoded)
        request = Request(head=head, connection=connection.number, nth=connection.nth, body=body, complete=complete)
        answer = self._application.begin(request)
        if answer is None:
            return False
        if complete and connection.chunked is None:
            del connection.inbox[: head.length]
        connection.head = connection.chunked = None
        connection.request = request
        connection.steps = iter(answer.steps)
        return True

    def _refuse(self, connection: _Connection, error: InvalidInput) -> None:
        """Answer what is not a request; it is not given to the application."""
        body = f"{error}\n".encode()
        headers = (("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close"))
        status = 413 if error.code == "too_large" else 400
        connection.head = connection.chunked = None
        connection.discards = True
        connection.inbox.clear()
        connection.steps = iter((response_head(status, headers) + body, End.CLOSE))

    def _play(self, connection: _Connection) -> bool:
        """Play steps; True when the answer is over and the connection stays, False to wait (or it was dropped)."""
        assert connection.steps is not None
        for _ in range(STEPS_A_TURN):
            if connection.out and not self._flush(connection):
                return False
            step = next(connection.steps, End.KEEP)
            if isinstance(step, bytes):
                connection.out = memoryview(step)
            elif isinstance(step, Pause):
                self._set_timer(connection, step.seconds)
                return False
            else:
                return self._finish(connection, step)
        if not connection.out or self._flush(connection):
            self._set_timer(connection, 0)
        return False

    def _finish(self, connection: _Connection, end: End | Idle) -> bool:
        """The answer's last step; True if the connection is ready for another request."""
        request = connection.request
        if end is End.HANG or end is End.HALF_CLOSE:
            connection.discards = True
            connection.timer = _NEVER
            if end is End.HALF_CLOSE:
                connection.sock.shutdown(socket.SHUT_WR)
            return False
        if isinstance(end, End) and end is not End.KEEP:
            self._drop(connection, end)
            return False
        if request is None or not request.complete or not request.head.keep_alive:
            self._drop(connection, End.CLOSE)
            return False
        connection.steps = connection.request = None
        if isinstance(end, Idle):
            connection.idle = end
            self._set_timer(connection, end.seconds)
        self._application.finished(request, cut=False)
        return not connection.timer or bool(connection.inbox)

    def _end_idle(self, connection: _Connection, idle: Idle) -> None:
        if idle.last_words:
            self._send(connection, idle.last_words)
        self._drop(connection, idle.end)

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Send outside an answer: a few bytes, which an idle socket takes at once."""
        connection.out = memoryview(data)
        self._flush(connection)
        connection.out = memoryview(b"")

    def _flush(self, connection: _Connection) -> bool:
        """Hand bytes to the kernel; False if it has no room for all of them."""
        while connection.out:
            try:
                sent = connection.sock.send(connection.out)
            except BlockingIOError:
                return False
            connection.out = connection.out[sent:]
            self.bytes_written += sent
            connection.written += sent
            self._written[connection.number] = connection.written
            if len(self._written) > MAX_COUNTED_CONNECTIONS:
                self._written.popitem(last=False)
        return True

    def _watch(self, connection: _Connection) -> None:
        """Tell the selector what this connection waits for."""
        playing = connection.request is not None
        unread = playing and connection.request is not None and not connection.request.complete
        full = playing and len(connection.inbox) > MAX_PIPELINED_BYTES
        events = 0 if (unread or full) and not connection.discards else selectors.EVENT_READ
        if connection.out:
            events |= selectors.EVENT_WRITE
        if events == connection.events:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, connection)
        elif events:
            self._selector.modify(connection.sock, events, connection)
        else:
            self._selector.unregister(connection.sock)
        connection.events = events

    def _drop(self, connection: _Connection, end: End, *, cut: bool = False) -> None:
        """Close the connection and free all it holds."""
        self._connections.discard(connection)
        if connection.events:
            self._selector.unregister(connection.sock)
            connection.events = 0
        if end is End.RESET:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        connection.sock.close()
        request, connection.request, connection.steps, connection.timer = connection.request, None, None, 0
        if request is not None:
            self._application.finished(request, cut=cut)
