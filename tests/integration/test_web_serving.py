"""The API as it is served: Granian over real sockets, and how it stops."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import psycopg
import pytest

from tests.conftest import MASTER_KEYS
from tests.instance import ADMIN_KEY, Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 2000


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API in this process, to set things up with, on the same database."""
    with instance(database) as made:
        made.workspace()
        yield made


def _environment(database: str, bind: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    return inherited | {
        "DATABASE_URL": database,
        "RELAY_ADMIN_KEY": ADMIN_KEY,
        "RELAY_MASTER_KEYS": MASTER_KEYS,
        "RELAY_MAX_PAYLOAD_BYTES": str(LIMIT),
        "RELAY_BIND": bind,
        "RELAY_LOG_FORMAT": "json",
        "RELAY_API_THREADS": "4",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


@contextmanager
def _serving(database: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `relay api` on a port of the system's choice; yield the process and the port once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.cli.main", "api"],
        env=_environment(database, "127.0.0.1:0"),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        port = _port_of(process.stderr)
        drain.start()
        _wait_until_answering(port)
        yield process, port
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
        if drain.ident is not None:
            drain.join(10)
        process.stderr.close()


def _port_of(lines: IO[str]) -> int:
    for line in lines:
        entry = json.loads(line)
        if "url" in entry:
            return int(entry["url"].rpartition(":")[2])
    raise AssertionError("the API said no port before it ended")


def _wait_until_answering(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            connection.close()
        except OSError:
            assert time.monotonic() < deadline, "the API does not answer"
            time.sleep(0.05)
        else:
            return


def _raw(port: int, data: bytes, *, cut: bool = False) -> bytes:
    """Send bytes, then end the sending side if `cut`; return all that comes back until the server closes or pauses."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(data)
        if cut:
            peer.shutdown(socket.SHUT_WR)
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = peer.recv(65_536)
            if not piece:
                break
            answer += piece
        return answer


def _chunks(key: dict[str, str], *chunks: bytes, headers: bytes = b"", end: bytes = b"0\r\n\r\n") -> bytes:
    head = (
        b"POST /v1/events HTTP/1.1\r\nHost: relay\r\nTransfer-Encoding: chunked\r\nAuthorization: "
        + key["Authorization"].encode()
        + b"\r\n"
        + headers
        + b"\r\n"
    )
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def test_bodies_over_sockets(relay: Instance, database: str, tmp_path: Path) -> None:
    """C-33: in chunks or declared, a body over the limit is 413; a cut one is never stored; whole ones are."""
    key = relay.key()
    as_json = b"Content-Type: application/json\r\n"
    as_text = b"Content-Type: text/plain\r\nRelay-Event-Type: x\r\n"
    with _serving(database, tmp_path) as (_, port):
        big = b'{"type":"x","v":"' + b"x" * LIMIT
        assert b" 413 " in _raw(port, _chunks(key, big[:1000], big[1000:], headers=as_json))
        declared = f"POST /v1/events HTTP/1.1\r\nHost: relay\r\nAuthorization: {key['Authorization']}\r\n".encode()
        declared += b"Content-Length: %d\r\n\r\n" % (LIMIT + 1)
        assert b" 413 " in _raw(port, declared + b"x" * (LIMIT + 1))
        assert b" 202 " not in _raw(port, _chunks(key, b'{"type":"x",', headers=as_json, end=b""), cut=True)
        assert b" 202 " not in _raw(port, _chunks(key, b"whole, perhaps", headers=as_text, end=b""), cut=True)
        assert b" 411 " in _raw(port, _chunks(key, b"whole", headers=as_text))
        assert relay.query("select count(*) from relay.events") == [(0,)]
        assert b" 202 " in _raw(port, _chunks(key, b'{"type":', b'"x"}', headers=as_json))
        assert relay.query("select payload from relay.events") == [(b'{"type":"x"}',)]


def test_connections_are_kept(relay: Instance, database: str, tmp_path: Path) -> None:
    """Requests follow one another on one connection, after an error too."""
    key = relay.key()
    with _serving(database, tmp_path) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.connect()
        first = connection.sock
        for body, status in ((b'{"type":"x"}', 202), (b"{", 400), (b'{"type":"x"}', 202)):
            connection.request("POST", "/v1/events", body, headers={**key, "Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status
        assert connection.sock is first
        connection.close()


def test_termination_finishes_what_is_under_way(relay: Instance, database: str, tmp_path: Path) -> None:
    """SIGTERM: the request under way is answered, the process then exits with 0, idle connections or not."""
    key = relay.key()
    answers: list[int] = []
    with _serving(database, tmp_path) as (process, port):
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        idle.request("GET", "/healthz")
        idle.getresponse().read()

        def post() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            body = json.dumps({"url": "https://hooks.example.com/"})
            connection.request("POST", "/v1/endpoints", body, headers={**key, "Content-Type": "application/json"})
            answers.append(connection.getresponse().status)
            connection.close()

        with psycopg.connect(database) as blocking:
            blocking.execute("select 1 from relay.workspaces for update")
            thread = threading.Thread(target=post)
            thread.start()
            deadline = time.monotonic() + 10
            waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
            while relay.query(waiting) != [(1,)]:
                assert time.monotonic() < deadline, "the request never came to the lock"
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            _wait_until_refusing(port)
            assert answers == []
        thread.join(20)
        assert answers == [201]
        assert process.wait(20) == 0
        idle.close()


def _wait_until_refusing(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        assert time.monotonic() < deadline, "the API still takes connections after SIGTERM"
        time.sleep(0.01)


def test_address_in_use(database: str, tmp_path: Path) -> None:
    """A port that somebody listens on is refused at start with the setting's name, not shared unnoticed."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        ended = subprocess.run(
            [sys.executable, "-m", "relay.cli.main", "api"],
            env=_environment(database, f"127.0.0.1:{other.getsockname()[1]}"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert "RELAY_BIND" in ended.stderr
    assert "Traceback" not in ended.stderr
