"""The test receiver is itself a witness in most other tests: here it is checked over real sockets."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from relay.core.errors import InvalidInput
from relay.testkit import index
from relay.testkit.main import main
from relay.testkit.misbehaviours import GARBAGE
from relay.testkit.receiver import Receiver
from relay.testkit.request import Request, take_head
from relay.testkit.routes import ROUTES, Context, RouteState
from relay.testkit.server import OnConnect
from relay.testkit.verification import sign_relay, sign_standard, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PATIENCE_SECS = 5.0
ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/signing.json").read_text())["vectors"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(secret=SECRET) as running:
        yield running


def send(
    receiver: Receiver, path: str, method: str = "POST", body: bytes = b"{}", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=PATIENCE_SECS)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def send_json(receiver: Receiver, path: str, method: str = "GET", body: bytes = b"") -> Any:
    status, _, answer = send(receiver, path, method, body)
    assert status == 200, answer
    return json.loads(answer)


@contextlib.contextmanager
def raw(receiver: Receiver, path: str = "", *, body: bytes = b"", more: bytes = b"") -> Iterator[socket.socket]:
    """A raw connection on which, if a path is given, one POST has been sent."""
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=PATIENCE_SECS) as sock:
        if path:
            sock.sendall(post(path, body, more))
        yield sock


def post(path: str, body: bytes = b"", more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n%b\r\n%b" % (path.encode(), len(body), more, body)


def read_until(sock: socket.socket, ending: bytes) -> bytes:
    got = b""
    while not got.endswith(ending):
        part = sock.recv(65536)
        assert part, f"closed after {got[-200:]!r}"
        got += part
    return got


def read_all(sock: socket.socket) -> bytes:
    """Everything up to the FIN."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def signed(body: bytes, *, secret: str = SECRET, age: int = 0) -> dict[str, str]:
    timestamp = int(time.time()) - age
    return {"Relay-Timestamp": str(timestamp), "Relay-Signature": sign_relay(secret, timestamp, body)}


# Verification


@pytest.mark.parametrize("vector", [one for one in VECTORS if one["scheme"] in {"relay", "standard"}])
def test_known_signatures_verify(vector: dict[str, Any]) -> None:
    """The published known answers of both HMAC schemes are accepted, and not with one bit of body changed (B-90)."""
    prefix = "webhook" if vector["scheme"] == "standard" else "Relay"
    body = bytes.fromhex(vector["body_hex"])
    headers = [(f"{prefix}-Timestamp", str(vector["timestamp"])), (f"{prefix}-Signature", vector["signature"])]
    if vector["scheme"] == "standard":
        headers.append(("webhook-id", vector["id"]))
    verdict = verify(headers, body, vector["secret"], now=vector["timestamp"] + 299)
    assert (verdict.valid, verdict.scheme) == (True, vector["scheme"])
    assert verify(headers, body + b" ", vector["secret"], now=vector["timestamp"]).reason == "no signature matches"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"now": 1301}, "the timestamp is too old"),
        ({"now": 699}, "the timestamp is too new"),
        ({"timestamp": "1e3"}, "the timestamp is not a count of seconds"),
        ({"timestamp": None}, "relay-timestamp is missing"),
        ({"signature": None}, "the request is not signed"),
        ({"signature": "v2=" + "0" * 64}, "no signature matches"),
        ({"signature": "v1=\xff"}, "no signature matches"),
        ({"twice": True}, "Relay-Signature was sent twice"),
    ],
)
def test_bad_signatures_are_refused_with_a_reason(change: dict[str, Any], reason: str) -> None:
    """Each way to be unverifiable has its own reason."""
    timestamp = change.get("timestamp", "1000")
    signature = change.get("signature", sign_relay("whsec_x", 1000, b"body"))
    headers = [("Relay-Timestamp", timestamp)] if timestamp else []
    headers += [("Relay-Signature", signature)] * (1 + bool(change.get("twice"))) if signature else []
    assert verify(headers, b"body", "whsec_x", now=change.get("now", 1000)).reason == reason


@pytest.mark.parametrize("vector", [one for one in VECTORS if one["scheme"] == "standard-ed25519"])
def test_known_public_key_signatures_verify(vector: dict[str, Any]) -> None:
    """The known answers of `v1a` are accepted with the key or with a JWK Set that has it, and not with a bit changed; a
    public key is never an HMAC's secret, and a secret's holder is told what is needed (B-91)."""
    body = bytes.fromhex(vector["body_hex"])
    at = vector["timestamp"]
    headers = [
        ("webhook-id", vector["id"]),
        ("webhook-timestamp", str(at)),
        ("webhook-signature", f"v1,AAAA {vector['signature']}"),
    ]
    raw = base64.b64decode(vector["public_key"].removeprefix("whpk_"))
    other = base64.urlsafe_b64encode(bytes(32)).rstrip(b"=").decode()
    own = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    keys = json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": x} for x in (other, own)]})
    for key in (vector["public_key"], keys):
        verdict = verify(headers, body, key, now=at + 299)
        assert (verdict.valid, verdict.scheme) == (True, "standard-ed25519")
        assert verify(headers, body + b" ", key, now=at).reason == "no signature matches"
        assert verify(headers, body, key, now=at + 301).reason == "the timestamp is too old"
    for key in ("whpk_AAAA", "whpk_é", "{", '{"keys": []}', '{"keys": 1}', '["x"]'[1:], "{}"):
        assert not verify(headers, body, key, now=at).valid
    forged = [("relay-timestamp", str(at)), ("relay-signature", sign_relay(vector["public_key"], at, body))]
    assert not verify(forged, body, vector["public_key"], now=at).valid
    alone = [*headers[:2], ("webhook-signature", vector["signature"])]
    assert "public key" in verify(alone, body, SECRET, now=at).reason


def test_one_of_two_signatures_is_enough() -> None:
    """During a rotation either signature may match (B-93)."""
    both = sign_relay("whsec_old", 1000, b"x") + "," + sign_relay("whsec_new", 1000, b"x")
    headers = [("relay-timestamp", "1000"), ("RELAY-SIGNATURE", both)]
    assert verify(headers, b"x", "whsec_old", now=1000).valid
    assert verify(headers, b"x", "whsec_new", now=1000).valid
    assert not verify(headers, b"x", "whsec_other", now=1000).valid


def test_verify_route(receiver: Receiver) -> None:
    """/verify takes a fresh signature of either scheme and answers 401 with a JSON reason to anything else."""
    body = b'{ "b":1.0 }\n'
    now = int(time.time())
    standard = {
        "webhook-id": "m1",
        "webhook-timestamp": str(now),
        "webhook-signature": sign_standard(SECRET, "m1", now, body),
    }
    assert send(receiver, "/verify", body=body, headers=signed(body))[0] == 200
    assert send(receiver, "/verify", body=body, headers=standard)[0] == 200
    status, _, answer = send(receiver, "/verify", body=body, headers=signed(body, age=400))
    assert (status, json.loads(answer)["error"]) == (401, "the timestamp is too old")
    assert send(receiver, "/verify", body=body, headers=signed(body, secret="whsec_no"))[0] == 401
    assert [one.verified for one in receiver.requests()] == [True, True, False, False]


def test_secret_is_set_at_run_time_and_never_shown(receiver: Receiver) -> None:
    """PUT /secret replaces the secret, also for one path; GET only tells that there is one."""
    assert send(receiver, "/secret", "PUT", b"whsec_second\n")[0] == 200
    assert send(receiver, "/secret?path=/verify/b", "PUT", b"whsec_third")[0] == 200
    assert send(receiver, "/verify", headers=signed(b"{}", secret="whsec_second"))[0] == 200
    assert send(receiver, "/verify/b", headers=signed(b"{}", secret="whsec_third"))[0] == 200
    assert send(receiver, "/verify/b", headers=signed(b"{}", secret="whsec_second"))[0] == 401
    assert send(receiver, "/secret", "GET", b"")[2] == b'{"set": true}\n'
    assert send(receiver, "/secret", "PUT", b"")[2] == b'{"set": false}\n'
    assert send(receiver, "/verify", headers=signed(b"{}"))[0] == 401
    assert receiver.count() == 4


# Answers in good HTTP


@pytest.mark.parametrize(
    ("target", "status", "header"),
    [
        ("/ok", 200, None),
        ("/ok/endpoint-17?x=1", 200, None),
        ("/status?code=418", 418, None),
        ("/status?code=204", 204, None),
        ("/always500", 500, None),
        ("/slow?ms=1&code=202", 202, None),
        ("/429?retry_after=7", 429, ("Retry-After", "7")),
        ("/503?retry_after=Fri,%2031%20Dec%202027", 503, ("Retry-After", "Fri, 31 Dec 2027")),
        ("/503", 503, None),
        ("/redirect?to=http://169.254.169.254/&code=307", 307, ("Location", "http://169.254.169.254/")),
        ("/no-body", 200, ("Content-Length", "0")),
        ("/cookie", 200, ("Set-Cookie", "testkit=crumb; Path=/; Max-Age=3600")),
        ("/flaky?pct=100", 500, None),
        ("/flaky?pct=0", 200, None),
        ("/expect", 200, None),
        ("/nowhere", 404, None),
        ("/slow?ms=soon", 400, None),
        ("/garbage?kind=none", 400, None),
    ],
)  # fmt: skip
def test_plain_routes(receiver: Receiver, target: str, status: int, header: tuple[str, str] | None) -> None:
    """Each route answers with the status and header that it was asked for, and records it."""
    got, headers, _ = send(receiver, target)
    assert got == status
    assert header is None or headers[header[0]] == header[1]
    assert [(one.status, one.target) for one in receiver.requests()] == [(status, target)]


def test_seeded_flakiness_repeats(receiver: Receiver) -> None:
    """The same seed on two paths gives the same run of failures, and both answers occur."""
    runs = [[send(receiver, f"/flaky/{name}?pct=50&seed=4")[0] for _ in range(20)] for name in ("a", "b")]
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 500}


def test_toggle_switches_one_path(receiver: Receiver) -> None:
    """PUT takes a path down and up again; other paths and the record are untouched by it."""
    assert send_json(receiver, "/toggle/a?up=0", "PUT") == {"up": False}
    assert [send(receiver, path)[0] for path in ("/toggle/a", "/toggle/b")] == [503, 200]
    receiver.set_up("/toggle/a", up=True)
    assert send(receiver, "/toggle/a")[0] == 200
    assert receiver.count() == 3


def test_expectation_is_refused_or_met(receiver: Receiver) -> None:
    """With Expect the answer is 417 before the body, or with mode=continue a 100 first."""
    request = b"POST /expect%b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with raw(receiver) as sock:
        sock.sendall(request % b"")
        assert read_all(sock).startswith(b"HTTP/1.1 417 ")
    with raw(receiver) as sock:
        sock.sendall(request % b"?mode=continue")
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hi")
        assert read_until(sock, b"ok\n").startswith(b"HTTP/1.1 200 ")
    assert [one.body for one in receiver.requests()] == [b"", b"hi"]


# Connections


def test_keep_alive_and_pipelining(receiver: Receiver) -> None:
    """Requests on one connection are answered in order, however they are cut into segments."""
    stream = post("/status?code=201", b"one") + post("/slow?ms=20") + post("/status?code=203", b"three")
    with raw(receiver) as sock:
        for start in range(0, len(stream), 7):
            sock.sendall(stream[start : start + 7])
        got = read_until(sock, b"203\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"201", b"200", b"203"]
    assert [(one.connection, one.nth, one.body) for one in receiver.requests()] == [
        (1, 1, b"one"), (1, 2, b""), (1, 3, b"three"),
    ]  # fmt: skip


def test_close_and_http10_end_the_connection(receiver: Receiver) -> None:
    """`Connection: close` and HTTP/1.0 are answered and closed."""
    with raw(receiver, "/ok", more=b"Connection: close\r\n") as sock:
        assert b"Connection: close" in read_all(sock)
    with raw(receiver) as sock:
        sock.sendall(b"GET /ok HTTP/1.0\r\n\r\n")
        assert read_all(sock).endswith(b"ok\n")


def test_chunked_bodies_are_decoded(receiver: Receiver) -> None:
    """A chunked body, cut anywhere, is recorded without its framing and the connection is still good."""
    head = b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    coded = b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
    with raw(receiver) as sock:
        for byte in head + coded:
            sock.sendall(bytes((byte,)))
        read_until(sock, b"ok\n")
        sock.sendall(head + coded)
        read_until(sock, b"ok\n")
    assert [one.body for one in receiver.requests()] == [b"abc0123456789"] * 2


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST /ok HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /ok HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /ok HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused_and_not_recorded(
    receiver: Receiver, request_bytes: bytes, status: bytes
) -> None:
    """A broken request gets a 4xx and the end of its connection."""
    with raw(receiver) as sock:
        sock.sendall(request_bytes)
        assert read_all(sock).split(b" ")[1] == status
    assert receiver.count() == 0


def test_close_idle_closes_only_when_idle(receiver: Receiver) -> None:
    """The kept connection is closed a while after the answer, with a 408 first if asked; a request stops the clock."""
    with raw(receiver, "/close-idle?ms=100&how=408") as sock:
        read_until(sock, b"ok\n")
        sock.sendall(post("/slow?ms=200"))
        read_until(sock, b"slow\n")
        sock.sendall(post("/close-idle?ms=10&how=408"))
        assert read_all(sock).endswith(b"408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    with raw(receiver, "/close-idle?ms=10&how=reset") as sock:
        read_until(sock, b"ok\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.parametrize("mode", [OnConnect.CLOSE, OnConnect.RESET])
def test_connections_cut_at_once(receiver: Receiver, mode: OnConnect) -> None:
    """A receiver may drop connections as they come, and then serve again."""
    receiver.on_connect = mode
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        send(receiver, "/ok")
    receiver.on_connect = OnConnect.SERVE
    assert send(receiver, "/ok")[0] == 200


def test_accepts_and_stays_silent(receiver: Receiver) -> None:
    """A silent receiver takes the request and answers nothing, and notices when the client leaves."""
    receiver.on_connect = OnConnect.SILENT
    with raw(receiver, "/ok") as sock:
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert receiver.open_connections == 1
    wait_until(lambda: receiver.open_connections == 0)
    assert receiver.count() == 0


# Misbehaviour


def test_interim_answers_come_first(receiver: Receiver) -> None:
    """/1xx sends its interim answers, then the final one, and keeps the connection."""
    with raw(receiver, "/1xx?code=102&n=3") as sock:
        assert re.findall(rb"HTTP/1.1 (\d+)", read_until(sock, b"ok\n")) == [b"102"] * 3 + [b"200"]
        sock.sendall(post("/ok"))
        read_until(sock, b"ok\n")


def test_trickle_may_end(receiver: Receiver) -> None:
    """With n the dripped body ends after so many bytes."""
    with raw(receiver, "/trickle?ms=1&n=5") as sock:
        assert read_all(sock).endswith(b"\r\n\r\n.....")


def test_reset_after_and_before_the_body(receiver: Receiver) -> None:
    """/reset cuts with a RST once all was read; with when=before it does so without waiting for the body."""
    with raw(receiver, "/reset", body=b"all of it") as sock, pytest.raises(ConnectionResetError):
        sock.recv(1)
    with raw(receiver) as sock:
        sock.sendall(b"POST /reset?when=before HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert [(one.body, one.complete, one.answer) for one in receiver.requests()] == [
        (b"all of it", True, "reset"), (b"", False, "reset"),
    ]  # fmt: skip


def test_hang_ends_when_the_client_leaves(receiver: Receiver) -> None:
    """A hanging request is recorded, silent, in flight, and freed as cut once its client has gone."""
    with raw(receiver, "/hang") as sock:
        receiver.wait_for(1, PATIENCE_SECS, path="/hang")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert receiver.stats()["in_flight"] == {"/hang": 1}
    wait_until(lambda: receiver.stats()["in_flight"] == {})
    assert receiver.stats()["cut"] == 1


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/half-status", b"HTTP/1.1 20"),
        ("/half-headers?then=half", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"),
        ("/short-body", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ntoo short\n"),
        ("/upgrade?then=fin", b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
        *((f"/garbage?kind={kind}", answer) for kind, answer in GARBAGE.items()),
    ],
)
def test_broken_answers_byte_for_byte(receiver: Receiver, target: str, expected: bytes) -> None:
    """Broken answers come exactly as listed and end in a FIN."""
    with raw(receiver, target) as sock:
        assert read_all(sock) == expected
    assert receiver.bytes_written == receiver.bytes_written_on(1) == len(expected)


def test_stale_connection_is_cut_on_its_second_request(receiver: Receiver) -> None:
    """The second request on a connection is read, recorded and cut without a byte (B-42)."""
    with raw(receiver, "/stale") as sock:
        read_until(sock, b"ok\n")
        sock.sendall(post("/stale", b"again"))
        assert read_all(sock) == b""
    assert [(one.nth, one.answer) for one in receiver.requests()] == [(1, "200"), (2, "stale")]


def test_early_reply_does_not_read_the_body(receiver: Receiver) -> None:
    """The answer comes while most of the body is unsent, and the connection then closes."""
    with raw(receiver) as sock:
        sock.sendall(b"POST /early-reply?status=413 HTTP/1.1\r\nContent-Length: 10000000\r\n\r\nstart")
        assert read_until(sock, b"early\n").startswith(b"HTTP/1.1 413 ")
    assert [(one.complete, one.status, one.answer) for one in receiver.requests()] == [(False, 413, "early:413")]


def test_early_reply_may_be_held_unread(receiver: Receiver) -> None:
    """With then=hold the client fills the buffers and is stuck until the time is over, then cut off."""
    with raw(receiver) as sock:
        sock.sendall(b"POST /early-reply?then=hold&ms=300 HTTP/1.1\r\nContent-Length: 64000000\r\n\r\n")
        read_until(sock, b"early\n")
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            sock.sendall(bytes(64_000_000))
        assert time.monotonic() - started > 0.2


@pytest.mark.parametrize("target", ["/trickle?ms=1", "/trickle-headers?ms=1", "/endless-1xx", "/endless-1xx?ms=1"])
def test_endless_answers_go_on_until_the_client_leaves(receiver: Receiver, target: str) -> None:
    """Drips and interim answers do not end by themselves, do not hold up others, and stop with the client."""
    with raw(receiver, target) as sock:
        got = b""
        while len(got) < 150:
            got += sock.recv(65536)
        assert got.startswith(b"HTTP/1.1 1" if "1xx" in target else b"HTTP/1.1 200 OK\r\n")
        assert send(receiver, "/ok")[0] == 200
    wait_until(lambda: receiver.open_connections == 0)


def test_a_body_that_nobody_takes_is_not_produced() -> None:
    """With a small send buffer, bytes written stay near what the client took, and are counted."""
    with Receiver(send_buffer=8192) as receiver, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(PATIENCE_SECS)
        sock.connect(("127.0.0.1", receiver.port))
        sock.sendall(post("/bigbody?kb=8192"))
        assert sock.recv(4096)
        assert send(receiver, "/ok")[0] == 200
        assert 4096 <= receiver.bytes_written_on(1) < 200_000


def test_big_body_is_whole(receiver: Receiver) -> None:
    """The body has the size asked for, and the count of bytes matches what came."""
    _, headers, body = send(receiver, "/bigbody?kb=1025")
    assert len(body) == 1025 * 1024 == int(headers["Content-Length"])
    wait_until(lambda: receiver.stats()["in_flight"] == {})
    assert len(body) < receiver.bytes_written < len(body) + 200


def test_gzip_bomb_unpacks(receiver: Receiver) -> None:
    """The bomb is sound gzip, tiny on the wire."""
    _, headers, body = send(receiver, "/gzip-bomb?mb=3")
    assert headers["Content-Encoding"] == "gzip"
    assert len(body) < 10_000
    assert gzip.decompress(body) == bytes(3 * 1024 * 1024)


def test_oversized_heads(receiver: Receiver) -> None:
    """Long lines and many lines are sent as asked."""
    with raw(receiver, "/huge-header?kb=70") as sock:
        assert b"\r\nX-Huge: " + b"h" * 70 * 1024 + b"\r\n" in read_until(sock, b"ok\n")
    with raw(receiver, "/many-headers?n=200") as sock:
        assert read_until(sock, b"ok\n").count(b"\r\nX-Header-") == 200


# The record


def test_requests_are_recorded_as_on_the_wire(receiver: Receiver) -> None:
    """Header order, case and repeats, raw target and raw body are kept; views by id and path agree."""
    body = bytes(range(256))
    before = time.time()
    with raw(
        receiver, "/ok/a?q=%41", body=body, more=b"X-b: 1\r\nx-A:  2 \r\nX-B: 3\r\nRelay-Delivery-Id: d1\r\n"
    ) as sock:
        read_until(sock, b"ok\n")
    send(receiver, "/status?code=503", headers={"webhook-id": "d2"})
    one = receiver.requests(delivery_id="d1")[0]
    assert one.headers == [
        ("Host", "test"), ("Content-Length", "256"),
        ("X-b", "1"), ("x-A", "2"), ("X-B", "3"), ("Relay-Delivery-Id", "d1"),
    ]  # fmt: skip
    assert (one.method, one.target, one.path, one.query, one.body) == ("POST", "/ok/a?q=%41", "/ok/a", "q=%41", body)
    assert before <= one.at <= time.time()
    assert one.header("X-B") == "1"
    assert receiver.requests(path="/ok") == [one]
    assert receiver.ids() == {"d1": 1, "d2": 1}
    counts = (
        receiver.count(path="/ok"),
        receiver.count("d1"),
        receiver.count("d1", "/status"),
        receiver.count(status=503),
    )
    assert counts == (1, 1, 0, 1)


def test_record_over_http(receiver: Receiver) -> None:
    """The record can be read, counted and cleared over HTTP, without entering itself."""
    for number in range(5):
        send(receiver, "/ok", body=b"\xff", headers={"Relay-Delivery-Id": f"d{number % 2}"})
    listed = send_json(receiver, "/_requests?delivery_id=d0&path=/ok&limit=2")
    assert listed["matching"] == 3
    assert [one["number"] for one in listed["requests"]] == [3, 5]
    assert (listed["requests"][0]["body"], listed["requests"][0]["body_base64"]) == (None, "/w==")
    assert send_json(receiver, "/_count?delivery_id=d1") == {"count": 2}
    assert send_json(receiver, "/_ids") == {"d0": 3, "d1": 2}
    assert send_json(receiver, "/_stats")["answers"] == {"200": 5}
    assert send(receiver, "/_requests?limit=x", "GET")[0] == 400
    assert send(receiver, "/_ids", "POST")[0] == 405
    assert send(receiver, "/_requests", "DELETE")[0] == 204
    assert send_json(receiver, "/_count") == {"count": 0}


class Asked(Request):
    """A request that notes which parameters are asked of it."""

    names: ClassVar[set[str]] = set()

    def optional_text(self, name: str) -> str | None:
        self.names.add(name)
        return super().optional_text(name)


def parameters_of(path: str, query: str) -> set[str]:
    """The parameters that a route asks for, in a request that gives it reason to ask for all."""
    head = take_head(bytearray(f"PUT {path}?{query} HTTP/1.1\r\nExpect: 100-continue\r\n\r\n".encode()))
    assert head is not None
    request = Asked(head=head, connection=1, nth=2, body=b"", complete=True)
    Asked.names.clear()
    ROUTES[path].handler(request, Context(state=RouteState(), verdict=None))
    return set(Asked.names)


def test_the_index_lists_every_route_and_its_parameters(receiver: Receiver) -> None:
    """GET / names each path with the parameters that it takes, and is no delivery; a POST to / is one."""
    status, _, answer = send(receiver, "/", "GET", b"")
    listed: dict[str, set[str]] = {}
    for target, _ in index.ROUTES:
        path, _, query = target.removeprefix("PUT ").partition("?")
        listed.setdefault(path, set()).update(part.partition("=")[0] for part in query.split("&") if part)

    assert (status, receiver.count()) == (200, 0)
    assert [target for target, _ in index.ROUTES + index.OWN if f"{target} " not in answer.decode()] == []
    reason = {"/flaky": "pct=100", "/hang": "ms=1", "/early-reply": "then=hold"}
    assert listed == {path: parameters_of(path, reason.get(path, "")) for path in ROUTES}
    own = {tuple(target.partition("?")[0].split(" ")) for target, _ in index.OWN}
    assert own == set(receiver._control._handlers)
    assert (send(receiver, "/")[0], receiver.count()) == (404, 1)


def test_what_the_index_shows_can_be_asked_for() -> None:
    """Every default that is shown is one that the route takes."""
    for target, _ in index.ROUTES:
        path, _, query = target.removeprefix("PUT ").partition("?")
        parameters_of(path, query)


def test_record_is_bounded_but_counts_go_on() -> None:
    """Old requests fall out of the record; the counts by id and path do not forget, and bodies may be hashed away."""
    with Receiver(keep=2, keep_bodies=False) as receiver:
        for number in range(3):
            send(receiver, "/ok", headers={"Relay-Delivery-Id": str(number)})
        assert [one.delivery_id for one in receiver.requests()] == ["1", "2"]
        assert (receiver.count(), receiver.count("0"), receiver.count(path="/ok")) == (3, 1, 3)
        one = receiver.requests()[0]
        assert (one.body, one.length) == (b"", 2)
        assert one.sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        assert one.verified is None


def test_wait_for_wakes_and_times_out(receiver: Receiver) -> None:
    """wait_for returns as soon as enough came, and says how many came if not."""
    sender = threading.Thread(target=lambda: [send(receiver, "/ok") for _ in range(3)])
    sender.start()
    assert len(receiver.wait_for(3, PATIENCE_SECS, path="/ok")) == 3
    sender.join()
    with pytest.raises(TimeoutError, match="3 of 4 requests"):
        receiver.wait_for(4, 0.01)


def test_most_in_flight_is_seen_by_path(receiver: Receiver) -> None:
    """Requests that overlap are counted together for their own path alone."""
    with contextlib.ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(raw(receiver, "/hang/a"))
        send(receiver, "/ok")
        receiver.wait_for(7, PATIENCE_SECS, path="/hang/a")
    seen = [receiver.max_concurrent(path) for path in ("/hang/a", "/ok", "/x")]
    assert seen == [7, 1, 0]


# The whole


def test_stop_frees_everything_and_start_takes_the_same_port() -> None:
    """Stopping ends hanging requests and frees the port; the receiver can come back on it with its record."""
    receiver = Receiver()
    receiver.start()
    port = receiver.port
    with raw(receiver, "/hang") as hanging, raw(receiver, "/trickle?ms=1"):
        receiver.wait_for(2, PATIENCE_SECS)
        receiver.stop()
        assert hanging.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        send(receiver, "/ok")
    assert (receiver.stats()["in_flight"], receiver.open_connections) == ({}, 0)
    receiver.start()
    try:
        assert (send(receiver, "/ok")[0], receiver.port, receiver.count()) == (200, port, 3)
    finally:
        receiver.stop()
        receiver.stop()


def test_many_hanging_requests_do_not_slow_others(receiver: Receiver) -> None:
    """Two hundred hanging requests cost no threads, and other requests are served beside them."""
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(raw(receiver, "/hang"))
        receiver.wait_for(200, PATIENCE_SECS)
        assert send(receiver, "/ok")[0] == 200
        assert threading.active_count() == threads


def test_a_client_that_resets_harms_nobody(receiver: Receiver) -> None:
    """A reset in the middle of an answer ends that connection and no other."""
    with raw(receiver, "/bigbody?kb=100000") as sock:
        assert sock.recv(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: receiver.open_connections == 0)
    assert send(receiver, "/ok")[0] == 200


@pytest.mark.serial
def test_rate_is_enough_for_load_tests() -> None:
    """At least 2,000 requests a second pass through one receiver (best of three)."""
    with Receiver() as receiver, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw(receiver)) for _ in range(10)]
        socks[0].sendall(post("/ok"))
        answer_bytes = len(read_until(socks[0], b"ok\n"))
        batch = post("/ok", b"x" * 500) * 20
        rates = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(5):
                for sock in socks:
                    sock.sendall(batch)
                for sock in socks:
                    left = 20 * answer_bytes
                    while left:
                        left -= len(sock.recv(left))
            rates.append(1000 / (time.perf_counter() - start))
        assert receiver.count() == 3001
    assert max(rates) >= 2000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_foreground_process_logs_and_exits_zero(number: signal.Signals) -> None:
    """`python -m relay.testkit` says where it listens, logs a line a request, and a signal ends it with 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.testkit", "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RELAY_TESTKIT_SECRET": SECRET},
    )
    with process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().rpartition(":")[2])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECS)
            connection.request("POST", "/verify", b"{}", {**signed(b"{}"), "Relay-Delivery-Id": "d\x1b1"})
            assert connection.getresponse().read() == b'{"verified": true, "scheme": "relay"}\n'
            assert process.stdout.readline() == "POST /verify -> 200  d\\x1b1  verified\n"
            for headers, said in (({}, "not signed"), ({"Relay-Signature": "v1=0"}, "NOT verified")):
                connection.request("POST", "/ok", b"{}", headers)
                connection.getresponse().read()
                assert process.stdout.readline() == f"POST /ok -> 200  -  {said}\n"
            connection.close()
            process.send_signal(number)
            assert process.wait(PATIENCE_SECS) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("bind", ["", "9099", "localhost", "127.0.0.1:", "127.0.0.1:99999"])
def test_bind_address_is_checked(bind: str) -> None:
    """Something that is not host:port is refused before anything is bound."""
    with pytest.raises(InvalidInput):
        main(bind, None)
