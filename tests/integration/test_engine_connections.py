"""Kept connections, the one resend, and what must not pass from one transfer to the next."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from relay.core.observation import Fault
from tests.hostile import OK, PATIENCE, Peer, Receiver, Sender, keep_answering, request, wait_until
from tests.nameserver import NameServer, Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.delivery.engine import Completed


def test_connection_is_kept_and_has_no_connect_time() -> None:
    """A second request to the same place rides on the first one's connection."""
    with Sender() as sender, Receiver(keep_answering()) as receiver:
        sender.send(receiver.url())
        seen = sender.send(receiver.url()).observation

        assert seen is not None
        assert (receiver.accepted, seen.status, seen.sends) == (1, 200, 1)
        assert (seen.dns_us, seen.connect_us, seen.tls_us) == (0, 0, 0)
        assert seen.remote_address == "127.0.0.1"


STALE = ["closes", "resets", "reads and closes", "reads and resets", "half a status line and closes"]


def misbehave_second_time(how: str) -> Any:
    """Answer the first request of a connection; spoil its second. Connections after the first behave."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(OK)
        if peer.number > 0:
            keep_answering()(peer)
        if "reads" in how or "status" in how:
            peer.read()
        if "status" in how:
            peer.send(b"HTTP/1.1 2")
        if "resets" in how:
            peer.reset()

    return script


@pytest.mark.parametrize("how", STALE)
def test_stale_connection_is_resent_once_on_a_fresh_one(how: str) -> None:
    """A kept connection that the receiver closed costs no failure: one resend, counted (B-42)."""
    with Sender() as sender, Receiver(misbehave_second_time(how)) as receiver:
        sender.send(receiver.url())
        if "reads" not in how and "status" not in how:
            wait_until(lambda: receiver.closed == 1)
        seen = sender.send(receiver.url(), body=b"again").observation

        assert seen is not None
        assert (seen.status, seen.fault) == (200, None)
        # libcurl may notice the end before it sends: then nothing went out twice.
        assert seen.sends in ((2,) if "reads" in how or "status" in how else (1, 2))
        # libcurl opens one for its own resend, which is stopped before a byte goes out.
        assert receiver.accepted in (2, 3)
        assert len([r for r in receiver.requests if r.body == b"again"]) <= seen.sends
        assert seen.connect_us > 0


def test_connections_that_die_while_the_loop_stands_still_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Behind the back of an engine that is frozen all that it keeps is closed at once: libcurl drops in one turn what epoll
    still tells of, no turn fails, and the request that was out on one of them goes out once more."""
    kept = 12
    all_there = threading.Barrier(kept)
    asked_again, frozen, thaw = threading.Event(), threading.Event(), threading.Event()
    peers: list[Peer] = []
    done: list[Completed] = []

    def script(peer: Peer) -> None:
        peer.read()
        if peer.number >= kept:
            peer.send(OK)
            return
        all_there.wait(PATIENCE)
        peers.append(peer)
        peer.send(OK)
        peer.read()
        # The one in use is to end before the idle ones.
        peers.remove(peer)
        peers.insert(0, peer)
        asked_again.set()
        thaw.wait(PATIENCE)

    def freezing(peer: Peer) -> None:
        peer.read()
        asked_again.wait(PATIENCE)
        peer.send(OK)

    def on_done(batch: list[Completed]) -> None:
        done.extend(batch)
        if any(one.request.key == "freezes" for one in batch):
            frozen.set()
            thaw.wait(PATIENCE)

    with Receiver(script) as receiver, Receiver(freezing) as other, Sender() as sender:
        sender.engine._on_done = on_done
        sender.engine.submit([request(receiver.url()) for _ in range(kept)])
        wait_until(lambda: len(done) == kept)
        sender.engine.submit([request(receiver.url()), request(other.url(), key="freezes")])
        assert frozen.wait(PATIENCE)
        for peer in peers:
            peer.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: receiver.closed == kept - 1)
        thaw.set()
        wait_until(lambda: len(done) == kept + 2)

    resent = done[-1].observation
    assert resent is not None
    assert (resent.status, resent.sends, receiver.accepted) == (200, 2, kept + 1)
    assert [record.message for record in caplog.records] == []


def test_second_failure_is_not_resent_again() -> None:
    """With many stale connections in the pool the request still goes out twice at most (B-42)."""
    gate = threading.Event()

    def script(peer: Peer) -> None:
        peer.read()
        gate.wait(10)
        peer.send(OK)
        peer.read()

    with Sender() as sender, Receiver(script) as receiver:
        threading.Timer(0.2, gate.set).start()
        sender.send_all([request(receiver.url()) for _ in range(5)])
        assert receiver.accepted == 5

        def fail(peer: Peer) -> None:
            peer.read()

        receiver._script = fail
        seen = sender.send(receiver.url(), body=b"again").observation

        assert seen is not None
        assert (seen.status, seen.fault, seen.sends) == (None, Fault.CONNECTION, 2)
        assert len([r for r in receiver.requests if r.body == b"again"]) == 2


def test_resend_has_only_the_time_that_is_left() -> None:
    """The total time-out spans both sends."""

    def script(peer: Peer) -> None:
        peer.read()
        if peer.number > 0:
            peer.hold()
        peer.send(OK)
        peer.read()
        threading.Event().wait(0.3)

    with Sender() as sender, Receiver(script) as receiver:
        sender.send(receiver.url())
        seen = sender.send(receiver.url(), timeout_ms=600).observation

        assert seen is not None
        assert (seen.fault, seen.sends) == (Fault.TIMEOUT, 2)
        assert 590_000 <= seen.total_us <= 800_000


@pytest.mark.parametrize("reply", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 103 Early\r\n\r\n"])
def test_reply_that_has_begun_is_not_resent(reply: bytes) -> None:
    """Once a whole line of the reply came, the receiver has seen the request: a fault, not a resend."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(OK)
        peer.read()
        peer.send(reply)

    with Sender() as sender, Receiver(script) as receiver:
        sender.send(receiver.url())
        seen = sender.send(receiver.url()).observation

        assert seen is not None
        assert (seen.fault, seen.sends, receiver.accepted) == (Fault.CONNECTION, 1, 1)


def test_failure_on_a_new_connection_is_not_resent() -> None:
    """A receiver that closes a new connection unanswered gets the request once."""

    def script(peer: Peer) -> None:
        peer.read()

    with Sender() as sender, Receiver(script) as receiver:
        seen = sender.send(receiver.url()).observation

        assert seen is not None
        assert (seen.fault, seen.sends, len(receiver.requests)) == (Fault.CONNECTION, 1, 1)


#: Kinds of request that leave something behind on a handle, if anything can.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "headers": {"headers": ["X-Secret: one", "Cookie: mine=1", "Authorization: Bearer t"]},
    "other headers": {"headers": ["X-Other: two"]},
    "large": {"body": b"y" * 300_000},
    "empty": {"body": b""},
    "pinned": {"addresses": ("127.0.0.1",)},
    "named": {"host": "named.test"},
    "nameless": {"host": "nameless.test"},
    "certificate": {"certificate": b"a certificate", "private_key": b"a key"},
    "unbuildable": {"headers": ["X: a\r\nY: b"]},
    "times out": {"timeout_ms": 40},
    "refused": {"addresses": ("127.0.0.9",)},
    "dead": {"addresses": ("127.0.0.8",)},
}


@pytest.mark.parametrize("pair", list(itertools.product(KINDS, KINDS)), ids=" then ".join)
def test_nothing_passes_from_one_transfer_to_the_next(pair: tuple[str, str]) -> None:
    """On one reused handle, each request of every pair of kinds is sent and judged as if it were alone (B-85)."""
    first, second = _run(pair)

    assert (first, second) == (_alone(pair[0]), _alone(pair[1]))


@functools.cache
def _alone(kind: str) -> tuple[Any, ...]:
    return _run([kind])[0]


def _run(kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """Send the kinds one after the other through one handle; say for each what went out and what was seen."""

    def script(peer: Peer) -> None:
        while True:
            received = peer.read()
            if received.headers.get("x-kind") == "times out":
                peer.hold()
                return
            peer.send(b"HTTP/1.1 200 OK\r\nSet-Cookie: theirs=1\r\nContent-Length: 2\r\n\r\nok")

    results = []
    with (
        NameServer({"named.test": Reply(("127.0.0.1",))}) as names,
        Sender(
            policy=lambda address: "test" if address == "127.0.0.9" else None, name_servers=[names.address]
        ) as sender,
        Receiver(script) as receiver,
    ):
        for kind in kinds:
            changes = dict(KINDS[kind])
            changes["headers"] = [*changes.get("headers", []), f"X-Kind: {kind}"]
            host = changes.pop("host", "pinned.test" if "addresses" in changes else "127.0.0.1")
            if kind in ("refused", "dead"):
                host = f"{kind}.test"
            before = len(receiver.requests)
            seen = sender.send(receiver.url(host=host), **changes).observation
            assert seen is not None
            went_out = [
                (received.head.replace(str(receiver.port).encode(), b"PORT"), len(received.body))
                for received in receiver.requests[before:]
            ]
            results.append((went_out, seen.status, seen.fault, seen.headers, seen.snippet, seen.sends))
        assert len(sender.engine._free) <= 1
    return results


def test_cookie_is_not_kept() -> None:
    """A Set-Cookie of one reply does not come back with the next request."""
    reply = b"HTTP/1.1 200 OK\r\nSet-Cookie: theirs=1; Path=/\r\nContent-Length: 0\r\n\r\n"

    with Sender() as sender, Receiver(keep_answering(reply)) as receiver:
        sender.send(receiver.url())
        sender.send(receiver.url())

        assert "cookie" not in receiver.requests[1].headers


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy", "ALL_PROXY"])
def test_environment_chooses_no_proxy(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A proxy in the environment is not asked (B-80)."""
    with Receiver(keep_answering()) as elsewhere:
        monkeypatch.setenv(variable, elsewhere.url(""))
        with Sender() as sender, Receiver(keep_answering()) as receiver:
            assert sender.send(receiver.url()).observation.status == 200  # type: ignore[union-attr]  # never None here

        assert (elsewhere.accepted, len(receiver.requests)) == (0, 1)
