"""The HTTP server: one thread that reads, and threads that answer.

The reading thread waits for all connections at once and hands over whole requests, so a client that sends slowly keeps
nobody from being served. A thread calls the application, writes its answer and takes the next. Health has threads of
its own.

A body that is large, in chunks, or slow to come is asked for first: the application is called without it, and either
answers (401, 404, 413) or raises BodyAwaited where it needs it; then the body is read, up to the limit that it named,
and the application is called again. So nothing that counts may happen before a view reads its body.
"""

from __future__ import annotations

import io
import logging
import selectors
import socket
import sys
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from relay.web.bodies import HELD, BodyAwaited, too_large
from relay.web.connection import Connection, Phase
from relay.web.gateway import Gateway
from relay.web.http1 import CONTINUE, Incoming
from relay.web.lanes import Lane, Ticket
from relay.web.listener import ARRIVAL_SECS, keep_new_away
from relay.web.problems import Problem, passing, usual

if TYPE_CHECKING:
    from collections.abc import Callable
    from wsgiref.types import WSGIApplication

    from relay.web.express import Express
    from relay.web.gateway import Reply

#: Paths that have threads of their own, by lanes, and how many each lane has. Those of the second may wait for the
#: database, and the first for nothing.
HEALTH_LANES: Final = ((frozenset({"/healthz"}), 1), (frozenset({"/readyz", "/metrics"}), 2))
#: Connections held at once, unless the system allows fewer. Above it who was silent for longest makes room.
CONNECTIONS: Final = 4_096
#: Bytes read at once.
_READ_BYTES: Final = 65_536
#: Bytes of a body up to which it is waited for without asking, and seconds for how long.
SMALL_BODY_BYTES: Final = 65_536
ASK_AFTER_SECS: Final = 0.25
#: Seconds between two looks at what is overdue.
_TICK_SECS: Final = 0.25
#: Seconds that a connection may be idle, that a head may take, and that an answer may find no reader.
IDLE_SECS: Final = 75.0
HEAD_SECS: Final = 20.0
SEND_SECS: Final = 30.0
#: Seconds that a body may take, and bytes that it must bring for each more.
BODY_SECS: Final = 20.0
BODY_BYTES_PER_SEC: Final = 16_384
#: Seconds that a request may wait for a thread. Many times what one takes when all is well.
WAIT_SECS: Final = 2.0
#: Seconds, and bytes, for which what still comes is read and dropped once the last answer is out: to close with bytes
#: unread would reset the connection, and could take the answer with it.
LINGER_SECS: Final = 2.0
LINGER_BYTES: Final = 16 << 20
#: At the end: seconds that idle connections are kept for what is on its way to them, and that bodies may go on coming (a
#: quarter and half of the grace where that is less), and that an answer may take to arrive.
STOP_IDLE_SECS: Final = 1.0
STOP_LINGER_SECS: Final = 1.0
STOP_BODY_SECS: Final = 5.0
#: Seconds that nothing is done after a connection could not be accepted.
_PAUSE_SECS: Final = 0.02
_BUSY: Final = "Every thread is taken: the database is slow or away, or too much is asked at once. Try again."
#: Of the connections held at most, one in so many is let go at once to make room.
_EVICTED_PART: Final = 64

_Job = tuple[Connection, Incoming, Ticket]

log = logging.getLogger(__name__)


class Front:
    """Serves one application on one listening socket."""

    def __init__(
        self,
        app: WSGIApplication,
        listener: socket.socket,
        *,
        threads: int,
        grace_secs: float,
        connections: int = CONNECTIONS,
        on_refusal: Callable[[int], None] | None = None,
        express: Express | None = None,
    ) -> None:
        """The listener becomes the front's own. `on_refusal` is told the status of answers that the application never saw.

        What `express` takes does not come to the application either.
        """
        self._express = express
        if express is not None:
            express.start()
        self._on_refusal = on_refusal
        self._gateway = Gateway(app)
        self._listener: socket.socket | None = listener
        self._grace_secs = grace_secs
        self._most = max(connections, _EVICTED_PART)
        self._work: Lane[_Job] = Lane("relay-web", threads, self._serve)
        self._own: dict[str, Lane[_Job]] = {}
        for paths, number in HEALTH_LANES:
            self._own |= dict.fromkeys(paths, Lane("relay-web-health", number, self._serve))
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        #: Connections that threads gave back, with the limit for the body that is to be read now.
        self._given_back: deque[tuple[Connection, int | None]] = deque()
        self._bell, self._rope = socket.socketpair()
        self._rung = False
        #: When `stop` was called; None until then.
        self._stopped_at: float | None = None
        for sock in (listener, self._bell, self._rope):
            sock.settimeout(0)
        host, port = listener.getsockname()[:2]
        self._base = {
            "SCRIPT_NAME": "",
            "SERVER_NAME": host,
            "SERVER_PORT": str(port),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.errors": sys.stderr,
            "wsgi.input_terminated": True,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
        }

    def run(self) -> bool:
        """Serve until `stop`, and finish what is under way; return whether that was done within the grace."""
        self._selector.register(self._bell, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        next_tick = 0.0
        try:
            while not self._is_over():
                for key, mask in self._selector.select(_TICK_SECS if self._connections else None):
                    if isinstance(key.data, Connection):
                        self._turn(key.data, mask)
                    elif key.fileobj is self._bell:
                        self._answer_bell()
                    else:
                        self._accept()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + _TICK_SECS
                    self._tick(now)
        finally:
            left = [one for one in self._connections if one.busy]
            self._tear_down()
        if left:
            log.warning("the grace is over: requests were cut off", extra={"requests": len(left)})
        return not left

    def stop(self) -> None:
        """Take no more connections, answer what is under way, and have `run` return. From any thread or signal."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._ring()

    # The reading thread.

    def _is_over(self) -> bool:
        if self._stopped_at is None:
            return False
        self._close_listener()
        return not self._connections or time.monotonic() > self._stopped_at + self._grace_secs

    def _accept(self) -> None:
        if self._listener is None:
            return
        while True:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # It was gone again, or no descriptor is free; the listener is asked again at once, which costs a little.
                log.warning("a connection could not be accepted", extra={"error": error.strerror})
                self._make_room()
                time.sleep(_PAUSE_SECS)
                return
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, {**self._base, "REMOTE_ADDR": address[0], "REMOTE_PORT": str(address[1])})
            self._connections.add(connection)
            self._watch(connection, selectors.EVENT_READ)
            if len(self._connections) > self._most:
                self._make_room()

    def _make_room(self) -> None:
        """Let go of those that have been idle, or half sent, for longest."""
        quiet = sorted((one for one in self._connections if not one.busy), key=lambda one: one.since)
        for connection in quiet[: self._most // _EVICTED_PART]:
            self._close(connection)

    def _close_listener(self) -> None:
        if self._listener is not None:
            # What the system has accepted already would be reset: it is taken, and answered.
            if keep_new_away(self._listener):
                time.sleep(ARRIVAL_SECS)
            self._accept()
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _turn(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        elif mask & selectors.EVENT_READ:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.phase is Phase.LINGERING:
            connection.dropped += len(data)
            if not data or connection.dropped > LINGER_BYTES:
                self._close(connection)
            return
        if data:
            connection.reader.feed(data)
        with connection.lock:
            connection.ended = not data
            if connection.busy:
                # A client that does not wait for answers: one read ahead is enough.
                connection.ahead += 1
                if connection.ended or connection.ahead > 1:
                    self._watch(connection, 0)
                return
        self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        """Do what the bytes that came allow. The connection is not busy."""
        reader = connection.reader
        current = reader.current
        if reader.ready:
            self._hand_over(connection, reader.ready.popleft())
        elif reader.fault is not None:
            self._refuse(connection, reader.fault)
        elif connection.ended:
            if current is None:
                self._close(connection)
            else:
                self._refuse(connection, _incomplete(current))
        elif current is None:
            connection.enter(Phase.HEAD if reader.in_head else Phase.IDLE)
        else:
            connection.enter(Phase.BODY)
            if connection.limit is not None:
                if current.size > connection.limit:
                    self._refuse(connection, too_large(connection.limit))
            elif current.chunked or current.expects or current.declared > SMALL_BODY_BYTES:
                self._ask(connection, current)

    def _hand_over(self, connection: Connection, incoming: Incoming) -> None:
        """Have a thread answer a request that is whole. From that thread, too, where the next is there already."""
        body = incoming.body()
        incoming.environ["wsgi.input"] = io.BytesIO(body)
        incoming.environ[HELD] = body
        ticket = self._begin(connection)
        if self._express is None or not self._express.take(
            incoming.environ, ticket, partial(self._answered, connection, incoming)
        ):
            self._queue(connection, incoming, ticket)

    def _ask(self, connection: Connection, incoming: Incoming) -> None:
        """Have the application say whether it wants the body. No more of it is read until then."""
        incoming.environ["wsgi.input"] = io.BytesIO()
        incoming.environ[HELD] = None
        self._watch(connection, 0)
        self._queue(connection, incoming, self._begin(connection))

    def _begin(self, connection: Connection) -> Ticket:
        """Begin to wait for an answer; return the right to give it."""
        connection.busy = True
        connection.limit = None
        connection.since = time.monotonic()
        connection.ticket = ticket = Ticket()
        return ticket

    def _queue(self, connection: Connection, incoming: Incoming, ticket: Ticket) -> None:
        lane = self._own.get(incoming.environ["PATH_INFO"], self._work)
        lane.put((connection, incoming, ticket))

    def _answer_bell(self) -> None:
        try:
            self._bell.recv(4_096)
        except BlockingIOError:
            return
        self._rung = False
        while self._given_back:
            connection, limit = self._given_back.popleft()
            if connection not in self._connections:
                continue
            if limit is not None:
                self._want(connection, limit)
            elif connection.out:
                connection.since = time.monotonic()
                self._watch(connection, selectors.EVENT_WRITE)
            elif connection.phase is Phase.LINGERING:
                if connection.ended:
                    self._close(connection)
                else:
                    self._watch(connection, selectors.EVENT_READ)
            elif not connection.busy:
                if not connection.ended:
                    self._watch(connection, selectors.EVENT_READ)
                self._advance(connection)

    def _want(self, connection: Connection, limit: int) -> None:
        """Read the body that was asked for."""
        connection.limit = limit
        connection.busy = False
        connection.enter(Phase.BODY, anew=True)
        current = connection.reader.current
        if current is not None and current.expects and not current.size:
            try:
                connection.sock.send(CONTINUE)
            except OSError:
                connection.ended = True
        if not connection.ended:
            self._watch(connection, selectors.EVENT_READ)
        self._advance(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            sent = connection.sock.send(connection.out)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        connection.since = time.monotonic()
        connection.out = connection.out[sent:]
        if not connection.out:
            self._watch(connection, selectors.EVENT_READ)
            self._sent(connection, close=connection.closing)

    def _tick(self, now: float) -> None:
        stopped_for = None if self._stopped_at is None else now - self._stopped_at
        for connection in list(self._connections):
            if connection.busy:
                self._look_at_busy(connection, now - connection.since)
            else:
                self._look_at(connection, now - connection.since, stopped_for)

    def _look_at_busy(self, connection: Connection, secs: float) -> None:
        if connection.out:
            if secs > SEND_SECS:
                self._close(connection)
        elif secs > WAIT_SECS and connection.ticket.take():
            self._refuse(connection, passing("busy", _BUSY))

    def _look_at(self, connection: Connection, secs: float, stopped_for: float | None) -> None:
        match connection.phase:
            case Phase.IDLE:
                if secs > IDLE_SECS or (stopped_for or 0.0) > min(STOP_IDLE_SECS, self._grace_secs / 4):
                    self._sent(connection, close=True)
            case Phase.HEAD:
                if secs > HEAD_SECS or (stopped_for or 0.0) > min(STOP_BODY_SECS, self._grace_secs / 2):
                    self._refuse(connection, usual(408))
            case Phase.LINGERING:
                if secs > (LINGER_SECS if stopped_for is None else STOP_LINGER_SECS):
                    self._close(connection)
            case Phase.BODY:
                current = connection.reader.current
                if current is None:
                    return
                if secs > BODY_SECS + current.size / BODY_BYTES_PER_SEC:
                    self._refuse(connection, usual(408))
                elif (stopped_for or 0.0) > min(STOP_BODY_SECS, self._grace_secs / 2):
                    self._refuse(connection, passing("stopping", "Relay stops here: try again."))
                elif connection.limit is None and secs > ASK_AFTER_SECS:
                    self._ask(connection, current)

    def _refuse(self, connection: Connection, problem: Problem) -> None:
        """Answer what never came to the application, or never will, and end the connection."""
        connection.busy = True
        if self._on_refusal is not None:
            self._on_refusal(problem.status)
        self._send(connection, self._gateway.refusal(problem), close=True)

    def _watch(self, connection: Connection, mask: int) -> None:
        if mask == connection.watched:
            return
        if not connection.watched:
            self._selector.register(connection.sock, mask, connection)
        elif mask:
            self._selector.modify(connection.sock, mask, connection)
        else:
            self._selector.unregister(connection.sock)
        connection.watched = mask

    def _close(self, connection: Connection) -> None:
        self._watch(connection, 0)
        self._connections.discard(connection)
        connection.sock.close()

    def _tear_down(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._bell.close()
        self._rope.close()
        if self._express is not None:
            self._express.stop(0.2)
        for lane in {self._work, *self._own.values()}:
            lane.stop(0.2)

    # The answering threads.

    def _serve(self, job: _Job) -> None:
        connection, incoming, ticket = job
        if not ticket.take():
            return
        close = self._is_last(incoming)
        try:
            data = self._gateway.answer(incoming, close=close)
        except BodyAwaited as awaited:
            self._give_back(connection, awaited.limit)
        else:
            self._send(connection, data, close=close)

    def _answered(self, connection: Connection, incoming: Incoming, reply: Reply | None) -> None:
        """Send what the express made of a request that it took; None where it is for the application after all."""
        if reply is None:
            self._queue(connection, incoming, self._begin(connection))
            return
        close = self._is_last(incoming)
        self._send(connection, self._gateway.render(reply, close=close), close=close)

    def _is_last(self, incoming: Incoming) -> bool:
        return not incoming.whole or not incoming.keep_alive or self._stopped_at is not None

    def _send(self, connection: Connection, data: bytes, *, close: bool) -> None:
        """Write an answer, or leave it to the reading thread where the client does not take it at once."""
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent, close, connection.ended = len(data), True, True
        if sent < len(data):
            connection.closing = close
            connection.out = data[sent:]
            self._give_back(connection)
        else:
            self._sent(connection, close=close)

    def _sent(self, connection: Connection, *, close: bool) -> None:
        """Go on after an answer."""
        following = None
        if close:
            connection.enter(Phase.LINGERING, anew=True)
            try:
                connection.sock.shutdown(socket.SHUT_WR)
            except OSError:
                connection.ended = True
        with connection.lock:
            reader = connection.reader
            connection.ahead = 0
            if not close:
                connection.enter(Phase.IDLE, anew=True)
                following = reader.ready.popleft() if reader.ready else None
            if following is None:
                connection.busy = False
            # The reading thread looks by itself when something comes. Where that was before, it must be told.
            waits = not connection.watched or connection.ended or reader.fault is not None or reader.current is not None
        if following is not None:
            self._hand_over(connection, following)
        elif waits:
            self._give_back(connection)

    def _give_back(self, connection: Connection, limit: int | None = None) -> None:
        self._given_back.append((connection, limit))
        self._ring()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            try:
                self._rope.send(b"\0")
            except OSError:
                # Full, so it rings; or closed, and nobody is there.
                return


def _incomplete(incoming: Incoming) -> Problem:
    of = "" if incoming.chunked else f" of {incoming.declared}"
    return Problem(400, "incomplete_body", f"{incoming.size}{of} bytes came: send the request again.")
