"""The server's own bounds, with an application of a few lines: who is slow is let go, and who reads slowly gets it all."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from relay.web import front as serving
from relay.web.bodies import HELD, BodyAwaited
from relay.web.front import CONNECTIONS, Front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: More than the kernel's buffers take.
LARGE = b"0123456789abcdef" * (1 << 20)


def _app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer with the body that came; /large with a large one; /broken not at all."""
    if environ[HELD] is None:
        raise BodyAwaited(1_000)
    match environ["PATH_INFO"]:
        case "/large":
            body = LARGE
        case "/broken":
            raise ValueError("broken")
        case _:
            body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [body]


@contextmanager
def _running(connections: int = CONNECTIONS) -> Iterator[tuple[Front, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    front = Front(_app, listener, threads=2, grace_secs=5, connections=connections)
    thread = threading.Thread(target=front.run)
    thread.start()
    try:
        yield front, port
    finally:
        front.stop()
        thread.join(20)
        assert not thread.is_alive()


def _open(port: int, data: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=10)
    peer.sendall(data)
    return peer


def _rest(peer: socket.socket) -> bytes:
    """Read until the server closes."""
    answer = bytearray()
    with peer:
        while piece := peer.recv(1 << 20):
            answer += piece
    return bytes(answer)


def test_who_is_slow_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head or body that does not come in time is 408; an idle connection is closed; one that sends on is not."""
    for name, secs in (("HEAD_SECS", 0.6), ("BODY_SECS", 0.6), ("IDLE_SECS", 0.6)):
        monkeypatch.setattr(serving, name, secs)
    monkeypatch.setattr(serving, "BODY_BYTES_PER_SEC", 10)
    with _running() as (_, port):
        head = _open(port, b"POST / HT")
        idle = _open(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        never = _open(port, b"")
        slow = _open(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60\r\n\r\n")
        steady = _open(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60\r\nConnection: close\r\n\r\n")
        for _ in range(12):
            # Not a wait for anything: this is how fast the client is.
            time.sleep(0.1)
            steady.sendall(b"steady"[:5])
        assert _rest(steady).endswith(b"\r\n\r\n" + b"stead" * 12)
        assert _rest(head).startswith(b"HTTP/1.1 408 ")
        assert _rest(slow).startswith(b"HTTP/1.1 408 ")
        assert _rest(idle).startswith(b"HTTP/1.1 200 ")
        assert _rest(never) == b""


def test_large_answers_reach_slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer larger than the buffers arrives whole, also while the server stops; one nobody reads is given up."""
    monkeypatch.setattr(serving, "SEND_SECS", 1.0)
    with _running() as (front, port):
        unread = _open(port, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        request = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        answer = _rest(_open(port, request))
        assert answer.count(LARGE) == 1
        assert len(re.findall(rb"HTTP/1.1 200 OK\r\n", answer)) == 2
        stopped = _open(port, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        begun = stopped.recv(1)
        front.stop()
        assert (begun + _rest(stopped)).endswith(LARGE)
        with pytest.raises(ConnectionRefusedError):
            _open(port, b"")
    with unread:
        assert len(_rest(unread)) < len(LARGE)


def test_there_is_always_room() -> None:
    """Where all connections are taken by silent clients, the longest silent make room; a failing application is a 500."""
    with _running(connections=64) as (_, port), ExitStack() as open_:
        for index in range(400):
            open_.enter_context(_open(port, b"POST / HTTP/1.1\r\nHost: a\r\n" if index % 2 else b""))
        for path, status in ((b"/", b"200"), (b"/broken", b"500"), (b"/%2f%C3%A9?a=%20", b"200")):
            ask = b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            assert _rest(_open(port, ask)).startswith(b"HTTP/1.1 " + status)
