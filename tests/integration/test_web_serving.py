"""The API as it is served: over real sockets, to clients of all manners, and how it stops."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import psycopg
import pytest

from tests.conftest import MASTER_KEYS
from tests.instance import ADMIN_KEY, Instance, instance
from tests.stack import freeze, freeze_end, own_postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

LIMIT = 2000


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API in this process, to set things up with, on the same database."""
    with instance(database) as made:
        made.workspace()
        yield made


def _environment(database: str, bind: str, settings: Mapping[str, str]) -> dict[str, str]:
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
        **settings,
    }


@contextmanager
def _serving(database: str, folder: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `relay api` on a port of the system's choice; yield the process and the port once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.cli.main", "api"],
        env=_environment(database, "127.0.0.1:0", settings),
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
    """Send bytes, then end the sending side if `cut`; return the first answer, or what came until the server closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(data)
        if cut:
            peer.shutdown(socket.SHUT_WR)
        return _answer(peer)


def _answer(peer: socket.socket) -> bytes:
    """Read one answer, with its body; what came so far where the server closes."""
    answer = b""
    while True:
        head, end, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"\r\nContent-Length: ([0-9]+)", head)
        if end and (length is None or len(body) >= int(length[1])):
            return answer
        piece = peer.recv(65_536)
        if not piece:
            return answer
        answer += piece


def _head(key: dict[str, str], *lines: str, target: str = "/v1/events") -> bytes:
    """The head of a POST."""
    said = [f"POST {target} HTTP/1.1", "Host: relay", *[f"{name}: {value}" for name, value in key.items()], *lines]
    return "\r\n".join([*said, "", ""]).encode("latin-1")


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
        assert relay.query("select count(*) from relay.events") == [(0,)]
        assert b" 202 " in _raw(port, _chunks(key, b"who", b"le", headers=as_text))
        assert b" 202 " in _raw(port, _chunks(key, b'{"type":', b'"x"}', headers=as_json))
        assert relay.query("select payload from relay.events order by id") == [(b"whole",), (b'{"type":"x"}',)]


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
            env=_environment(database, f"127.0.0.1:{other.getsockname()[1]}", {}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert "RELAY_BIND" in ended.stderr
    assert "Traceback" not in ended.stderr


BODY = b'{"type":"x"}'


def test_refusals_before_the_application(relay: Instance, database: str, tmp_path: Path) -> None:
    """What is no request, or too much of one, is answered by a problem, and the connection ended."""
    key = relay.key()
    length = f"Content-Length: {len(BODY)}"
    with _serving(database, tmp_path) as (_, port):
        for data, status, code in (
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
            (b"GET /healthz HTTP/1.1\r\n\r\n", 400, "bad_request"),
            (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "bad_request"),
            (b"GET /healthz HTTP/1.1\r\nHost : a\r\n\r\n", 400, "bad_request"),
            (_head(key, length, "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400, "bad_request"),
            (_head(key, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", 400, "bad_request"),
            (_head(key, target="/" + "a" * 9_000), 414, "uri_too_long"),
            (_head(key, "X-Long: " + "a" * 70_000), 431, "headers_too_large"),
            (_head(key, *["X-Many: a"] * 250), 431, "headers_too_large"),
            (_head(key, length, "Content-Type: text/pl\u00e4in") + BODY, 400, "invalid_request"),
            (_head(key, "Content-Length: 50", "Content-Type: application/json") + BODY, 400, "incomplete_body"),
        ):
            head, _, body = _raw(port, data, cut=True).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), (data[:60], head)
            assert b"\r\nContent-Type: application/problem+json\r\n" in head
            assert body.endswith(b"}\n")
            assert json.loads(body)["code"] == code
        assert relay.query("select count(*) from relay.events") == [(0,)]


def test_a_body_is_asked_for(relay: Instance, database: str, tmp_path: Path) -> None:
    """401, 404 and 413 come before a body is sent; 100 Continue only where it will be read; then the answer."""
    key = relay.key()
    with _serving(database, tmp_path, RELAY_MAX_PAYLOAD_BYTES="300000") as (_, port):
        expecting = (f"Content-Length: {len(BODY)}", "Expect: 100-continue")
        assert _raw(port, _head({}, *expecting)).startswith(b"HTTP/1.1 401 ")
        assert _raw(port, _head({}, "Content-Length: 200000")).startswith(b"HTTP/1.1 401 ")
        assert _raw(port, _head({}, "Content-Length: 10")).startswith(b"HTTP/1.1 401 ")
        assert _raw(port, _head(key, *expecting, target="/v1/nothing")).startswith(b"HTTP/1.1 404 ")
        assert _raw(port, _head(key, "Content-Length: 300001", *expecting[1:])).startswith(b"HTTP/1.1 413 ")
        large = b'{"type":"x","v":"' + b"x" * 200_000 + b'"}'
        for body in (BODY, large):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
                peer.sendall(
                    _head(key, f"Content-Length: {len(body)}", "Content-Type: application/json", *expecting[1:])
                )
                assert _answer(peer) == b"HTTP/1.1 100 Continue\r\n\r\n"
                for start in range(0, len(body), 50_000):
                    peer.sendall(body[start : start + 50_000])
                assert _answer(peer).startswith(b"HTTP/1.1 202 ")
                # The connection is good for more.
                peer.sendall(_head(key, f"Content-Length: {len(BODY)}", "Content-Type: application/json") + BODY)
                assert _answer(peer).startswith(b"HTTP/1.1 202 ")
        assert relay.query("select length(payload) from relay.events order by id") == [
            (len(BODY),),
            (len(BODY),),
            (len(large),),
            (len(BODY),),
        ]


def test_requests_in_a_row(relay: Instance, database: str, tmp_path: Path) -> None:
    """Requests sent without waiting are answered in their order; one that closes is the last."""
    key = relay.key()
    health = b"GET /healthz HTTP/1.1\r\nHost: relay\r\n\r\n"
    post = _head(key, f"Content-Length: {len(BODY)}", "Content-Type: application/json") + BODY
    last = b"GET /v1/nothing HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n"
    with _serving(database, tmp_path) as (_, port), socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        for piece in (post + health + post[:40], post[40:] + health, health * 20 + last + post):
            peer.sendall(piece)
        answers = b""
        while piece := peer.recv(65_536):
            answers += piece
        statuses = re.findall(rb"HTTP/1.1 ([0-9]{3}) ", answers)
        assert statuses == [b"202", b"200", b"202", b"200", *[b"200"] * 20, b"404"]
        assert relay.query("select count(*) from relay.events") == [(2,)]


def test_slow_clients_keep_nobody_waiting(relay: Instance, database: str, tmp_path: Path) -> None:
    """Hundreds of half-sent heads and bodies, and a held-up database: others are served, and health answers."""
    key = relay.key()
    slow: list[socket.socket] = []
    half = _head(key, "Content-Length: 100", "Content-Type: application/json") + BODY
    with _serving(database, tmp_path, RELAY_SHUTDOWN_GRACE_SECS="10") as (process, port):
        try:
            for index in range(300):
                slow.append(socket.create_connection(("127.0.0.1", port), timeout=10))
                slow[-1].sendall(half if index % 2 else half[:50])
            # Long enough for the server to have asked whether it should go on with them.
            for _ in range(10):
                started = time.monotonic()
                whole = _head(key, f"Content-Length: {len(BODY)}", "Content-Type: application/json") + BODY
                assert _raw(port, whole).startswith(b"HTTP/1.1 202 ")
                assert time.monotonic() - started < 2
            # Those that go on are served.
            slow[-1].sendall(b" " * (100 - len(BODY)))
            assert _answer(slow[-1]).startswith(b"HTTP/1.1 202 ")

            # Every thread waits for a lock: what does not get one is told so soon, and health has its own.
            with psycopg.connect(database) as blocking:
                blocking.execute("select 1 from relay.workspaces for update")
                body = json.dumps({"url": "https://hooks.example.com/"}).encode()
                make = _head(
                    key, f"Content-Length: {len(body)}", "Content-Type: application/json", target="/v1/endpoints"
                )
                waiting = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(12)]
                for peer in waiting:
                    peer.sendall(make + body)
                for path in (b"/healthz", b"/readyz?for=ingest"):
                    started = time.monotonic()
                    assert _raw(port, b"GET %s HTTP/1.1\r\nHost: relay\r\n\r\n" % path).startswith(b"HTTP/1.1 200 ")
                    assert time.monotonic() - started < 2
                busy = _answer(waiting[-1])
                assert busy.startswith(b"HTTP/1.1 503 ")
                assert b'"code": "busy"' in busy
                assert b"\r\nRetry-After: " in busy
            slow += waiting
            # What is half sent does not hold the process for its whole grace.
            process.terminate()
            started = time.monotonic()
            assert process.wait(20) == 0
            assert time.monotonic() - started < 8
        finally:
            for peer in slow:
                peer.close()
    assert relay.query("select count(*) from relay.events") == [(11,)]


def test_termination_under_load(relay: Instance, database: str, tmp_path: Path) -> None:
    """F-3: 50 clients that never pause see no connection broken at SIGTERM: an answer, or no connection any more."""
    key = relay.key()
    faults: list[str] = []
    accepted: list[int] = []
    headers = {**key, "Content-Type": "application/json"}

    def post() -> None:
        mine = 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            while True:
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    return
                open_ = True
                while open_:
                    connection.request("POST", "/v1/events", BODY, headers=headers)
                    answer = connection.getresponse()
                    answer.read()
                    mine += answer.status == 202
                    if answer.status not in {202, 503}:
                        faults.append(f"status {answer.status}")
                    open_ = not answer.will_close
                connection.close()
        except OSError as error:
            faults.append(repr(error))
        except http.client.HTTPException as error:
            faults.append(repr(error))
        finally:
            connection.close()
            accepted.append(mine)

    with _serving(database, tmp_path, RELAY_API_THREADS="8") as (process, port):
        clients = [threading.Thread(target=post) for _ in range(50)]
        for client in clients:
            client.start()
        deadline = time.monotonic() + 20
        while relay.query("select count(*) from relay.events")[0][0] < 200:
            assert time.monotonic() < deadline, "nothing is accepted"
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 0
        for client in clients:
            client.join(20)
    assert faults == []
    assert relay.query("select count(*) from relay.events") == [(sum(accepted),)]


def test_several_processes(relay: Instance, database: str, tmp_path: Path) -> None:
    """With two processes one that is killed is replaced; all end with their parent."""
    key = relay.key()
    post = _head(key, f"Content-Length: {len(BODY)}", "Content-Type: application/json") + BODY
    beats = "select pid from relay.heartbeats where role = 'api'"
    with _serving(database, tmp_path, RELAY_API_PROCESSES="2") as (process, port):
        pids = _wait_for(lambda: relay.query(beats), lambda rows: len(rows) == 2)
        os.kill(pids[0][0], signal.SIGKILL)
        _wait_for(lambda: relay.query(beats), lambda rows: len({row[0] for row in rows} - {pids[0][0]}) == 2)
        for _ in range(10):
            assert _raw(port, post).startswith(b"HTTP/1.1 202 ")
        process.terminate()
        assert process.wait(20) == 0


def _wait_for(look: Callable[[], list[Any]], fits: Callable[[list[Any]], bool]) -> list[Any]:
    deadline = time.monotonic() + 30
    while not fits(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_a_frozen_database_is_given_up_on(tmp_path: Path) -> None:
    """B-28: while Postgres stands still an event is 503 within seconds, however many wait; then all goes on."""
    answers: list[tuple[int, float, str | None]] = []

    def post() -> None:
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/events", BODY, headers={**key, "Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        answers.append((answer.status, time.monotonic() - began, answer.getheader("Retry-After")))
        connection.close()

    with own_postgres() as server, instance(server.url) as relay:
        relay.workspace()
        key = relay.key()
        with _serving(server.url, tmp_path) as (_, port):
            post()
            freeze(server)
            try:
                clients = [threading.Thread(target=post) for _ in range(20)]
                for client in clients:
                    client.start()
                began = time.monotonic()
                assert _raw(port, b"GET /healthz HTTP/1.1\r\nHost: relay\r\n\r\n").startswith(b"HTTP/1.1 200 ")
                assert _raw(port, b"GET /readyz HTTP/1.1\r\nHost: relay\r\n\r\n").startswith(b"HTTP/1.1 503 ")
                assert time.monotonic() - began < 2.5
                for client in clients:
                    client.join(30)
            finally:
                freeze_end(server)
            assert [status for status, _, _ in answers] == [202] + [503] * 20
            assert max(secs for _, secs, _ in answers) < 8, answers
            assert all(after for status, _, after in answers if status == 503)
            deadline = time.monotonic() + 10
            while answers[-1][0] != 202:
                assert time.monotonic() < deadline
                post()
