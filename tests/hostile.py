"""Receivers on raw sockets that misbehave to order, and a sender to try them with.

A real HTTP server would mend or refuse what these tests need: half a status line, a reset in the
middle of a body, bytes that nobody asked for.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import socket
import ssl
import struct
import termios
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from relay.delivery.engine import Completed, Engine, SendRequest
from relay.delivery.target import ANY_URL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.core.url import UrlPolicy

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#: Seconds after which a test that waits for a condition gives up.
PATIENCE = 20.0
#: What libcurl would add of its own accord, taken out.
BARE = ("Accept:", "Expect:", "User-Agent:", "Content-Type:")


def wait_until(condition: Callable[[], object], *, patience: float = PATIENCE) -> None:
    """Poll until `condition()` is true; fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def taken(peer: Peer, *, grace: float = 0.05) -> None:
    """Wait until the other side's kernel has all that was written, and `grace` seconds for its program to read it."""
    size = array.array("i", [0])

    def confirmed() -> bool:
        fcntl.ioctl(peer.socket.fileno(), termios.TIOCOUTQ, size)
        return size[0] == 0

    wait_until(confirmed)
    time.sleep(grace)


@dataclass
class Received:
    """A request as it came over the wire."""

    #: Which connection, counted from 0.
    connection: int
    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


class Peer:
    """One accepted connection, in the hands of a script."""

    def __init__(self, receiver: Receiver, connection: socket.socket, number: int) -> None:
        self.socket = connection
        self.number = number
        self._receiver = receiver
        self._buffer = b""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read(self) -> Received:
        """Read one whole request and note it. Raises EOFError at the end of the stream."""
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        received = Received(self.number, head, b"")
        length = int(received.headers.get("content-length", "0"))
        while len(self._buffer) < length:
            self._more()
        received.body, self._buffer = self._buffer[:length], self._buffer[length:]
        self._receiver.requests.append(received)
        return received

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def hold(self) -> None:
        """Say nothing more, and wait for the other side to go or the receiver to end."""
        while self._receive():
            pass

    def trickle(self, data: bytes, *, every: float) -> None:
        """Send byte by byte until the other side goes."""
        for byte in data:
            self.send(bytes([byte]))
            if self._receiver.ending.wait(every):
                return

    def _more(self) -> None:
        data = self._receive()
        if not data:
            raise EOFError
        self._buffer += data

    def _receive(self) -> bytes:
        """Wait for bytes, or the end of the stream, or that of the receiver."""
        while not self._receiver.ending.is_set():
            if self._pending() or self._poll.poll(20):
                return self.socket.recv(65536)
        return b""

    def _pending(self) -> int:
        return self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) else 0


class Receiver:
    """Accepts on loopback and gives every connection to `script`, in a thread of its own.

    A script that returns, or meets the end of the stream, has its connection closed with FIN.
    """

    def __init__(
        self,
        script: Callable[[Peer], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        send_buffer: int | None = None,
    ) -> None:
        self.requests: list[Received] = []
        #: Connections accepted, and closed by now.
        self.accepted = 0
        self.closed = 0
        self.ending = threading.Event()
        #: What a script raised beside the ends of connections.
        self.errors: list[Exception] = []
        self._script = script
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self._listener.bind((host, port))
        self._listener.listen(256)
        self._listener.settimeout(0.05)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []

    def url(self, path: str = "/hook", *, host: str | None = None) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{host or self.host}:{self.port}{path}"

    def __enter__(self) -> Self:
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._acceptor.join(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listener.close()
        assert self.errors == []

    def _accept(self) -> None:
        while not self.ending.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(PATIENCE)
                thread = threading.Thread(target=self._serve, args=(connection, self.accepted), daemon=True)
                self.accepted += 1
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                self._shake_hands(connection)
            self._script(Peer(self, connection, number))
        except (OSError, EOFError):
            pass
        except Exception as error:  # noqa: BLE001  a bug in a script must fail its test
            self.errors.append(error)
        finally:
            connection.close()
            self.closed += 1

    @staticmethod
    def _shake_hands(connection: ssl.SSLSocket) -> None:
        """Shake hands; where that fails take what comes, so that a reset does not overtake the alert."""
        try:
            connection.do_handshake()
        except ssl.SSLError:
            connection.shutdown(socket.SHUT_WR)
            while os.read(connection.fileno(), 65536):
                pass
            raise


class Hoard:
    """Accepts any number of connections and never says a word: one thread for all."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.settimeout(0.05)
        self._ending = threading.Event()
        self.held: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(PATIENCE)
        for connection in [*self.held, self._listener]:
            connection.close()

    def _accept(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                self.held.append(self._listener.accept()[0])


def keep_answering(reply: bytes = OK) -> Callable[[Peer], None]:
    """A well-behaved receiver that keeps its connections."""

    def script(peer: Peer) -> None:
        while True:
            peer.read()
            peer.send(reply)

    return script


def answer_once(reply: bytes) -> Callable[[Peer], None]:
    """Read a request, send `reply`, and close with FIN."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(reply)

    return script


def tunnel(answer: bytes = b"HTTP/1.1 200 Connected\r\nX-Proxy: 1\r\n\r\n") -> tuple[list[str], Callable[[Peer], None]]:
    """An egress proxy: notes each CONNECT's target and joins the streams."""
    targets: list[str] = []

    def script(peer: Peer) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.socket.recv(65536)
        target = head.split()[1].decode()
        targets.append(head.decode("latin-1"))
        peer.send(answer)
        if not answer.startswith(b"HTTP/1.1 200"):
            return
        host, _, port = target.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port))) as onward:
            back = threading.Thread(target=_pump, args=(onward, peer.socket), daemon=True)
            back.start()
            _pump(peer.socket, onward)
            back.join()

    return targets, script


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@dataclass
class Sender:
    """An engine with what came back from it."""

    policy: Callable[[str], str | None] = field(default=lambda _: None)
    max_response_bytes: int = 65_536
    snippet_bytes: int = 1024
    ca_file: str | None = None
    proxy: str | None = None
    #: In place of those of /etc/resolv.conf.
    name_servers: list[str] | None = None
    url_policy: UrlPolicy = ANY_URL
    done: list[Completed] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.engine = Engine(
            policy=self.policy,
            max_response_bytes=self.max_response_bytes,
            snippet_bytes=self.snippet_bytes,
            on_done=self.done.extend,
            ca_file=self.ca_file,
            proxy=self.proxy,
            name_servers=self.name_servers,
            url_policy=self.url_policy,
        )
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(time.monotonic())
        assert self.engine.in_flight == 0

    def send(self, url: str, **changes: Any) -> Completed:
        """Send one request and wait for it."""
        return self.send_all([request(url, **changes)])[0]

    def send_all(self, batch: Sequence[SendRequest]) -> list[Completed]:
        """Send a batch and wait for it; the results are in the batch's order."""
        before = len(self.done)
        self.engine.submit(batch)
        wait_until(lambda: len(self.done) >= before + len(batch), patience=60)
        by_request = {id(completed.request): completed for completed in self.done[before:]}
        return [by_request[id(sent)] for sent in batch]


def request(url: str, *, headers: Sequence[str] = (), key: object = None, **changes: Any) -> SendRequest:
    """A request with generous bounds, to be narrowed by `changes`."""
    values: dict[str, Any] = {
        "body": b'{"n":1}',
        "timeout_ms": 10_000,
        "connect_timeout_ms": 5_000,
        "idle_timeout_ms": 5_000,
        "start_by": time.monotonic() + 60,
    }
    return SendRequest(key=key, url=url, headers=[*BARE, *headers], **{**values, **changes})
