"""The end of a listening socket, with real connections."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from relay.web.listener import keep_new_away

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such filter")


def test_newcomers_are_ignored_and_the_connected_live_on() -> None:
    """Once new ones are kept away, a connection that stands goes on both ways, and one that begins is neither taken nor
    refused until the listener closes; then it is refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as early:
            assert keep_new_away(listener)
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.3)
            accepted, _ = listener.accept()
            with accepted:
                early.sendall(b"there")
                assert accepted.recv(5) == b"there"
                accepted.sendall(b"back")
                assert early.recv(4) == b"back"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_nobody_is_reset_while_a_listener_is_given_up() -> None:
    """Clients that connect all the time see an accepted connection, a refusal or nothing: no reset, in many rounds."""
    resets: list[str] = []

    def keep_connecting(port: int, until: threading.Event) -> None:
        while not until.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=0.5) as client:
                    client.sendall(b"x")
                    if client.recv(1) != b"y":
                        resets.append("cut off")
            except (ConnectionRefusedError, TimeoutError):
                continue
            except OSError as error:
                resets.append(repr(error))

    def take_all(listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            accepted.settimeout(5)
            with accepted:
                accepted.recv(1)
                accepted.sendall(b"y")

    for _ in range(20):
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        over = threading.Event()
        clients = [threading.Thread(target=keep_connecting, args=(listener.getsockname()[1], over)) for _ in range(8)]
        for client in clients:
            client.start()
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            take_all(listener)
        assert keep_new_away(listener)
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            take_all(listener)
        listener.close()
        over.set()
        for client in clients:
            client.join(5)
    assert resets == []
