"""The bounds against receivers that abuse them, each beside good ones, and what is left of it all afterwards (B-84)."""

from __future__ import annotations

import contextlib
import gc
import gzip
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from relay.core.observation import Fault
from relay.delivery.reply import NOT_HTTP_TEXT
from tests.hostile import OK, Hoard, Peer, Receiver, Sender, keep_answering, request, wait_until
from tests.nameserver import NameServer, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from relay.core.observation import Observation

#: Of each abusive request, in milliseconds.
TOTAL_MS = 600
#: The cap on bodies in these tests, and what the receiver may get rid of beside it: libcurl's buffer and the kernels'.
CAP = 65_536
SLACK = 160_000
SEND_BUFFER = 8_192


def _endlessly(block: bytes, *, head: bytes = b"") -> Callable[[Peer], None]:
    """Write `block` again and again until the sender goes, never reading its end."""

    def script(peer: Peer) -> None:
        peer.read()
        if head:
            peer.send(head)
        while True:
            peer.send(block)

    return script


def _once(reply: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.read()
        peer.send(reply)
        peer.hold()

    return script


def _drip(head: bytes, drop: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.read()
        peer.send(head)
        peer.trickle(drop * 1_000, every=0.02)

    return script


def _silent(peer: Peer) -> None:
    peer.hold()


def _early(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def _half_closed(peer: Peer) -> None:
    peer.read()
    peer.socket.shutdown(1)
    peer.hold()


def _reset(peer: Peer) -> None:
    peer.read()
    peer.reset()


BOMB = gzip.compress(b"\0" * 20_000_000)
HEAD = b"HTTP/1.1 200 OK\r\n"
#: What the receiver does, and the status or fault that comes of it.
ABUSE: dict[str, tuple[Callable[[Peer], None], int | Fault]] = {
    "endless interim answers": (_endlessly(b"HTTP/1.1 100 Continue\r\n\r\n"), Fault.PROTOCOL),
    "endless early hints": (_endlessly(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"), Fault.PROTOCOL),
    "dripped interim answers": (_drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), Fault.TIMEOUT),
    "dripped header": (_drip(HEAD, b"X: y\r\n"), Fault.TIMEOUT),
    "dripped body": (_drip(HEAD + b"Content-Length: 99999\r\n\r\n", b"z"), 200),
    "endless header": (_endlessly(b"X: y\r\n", head=HEAD), Fault.PROTOCOL),
    "endless header line": (_endlessly(b"y" * 1_000, head=HEAD + b"X: "), Fault.PROTOCOL),
    "endless body": (_endlessly(b"z" * 8_192, head=HEAD + b"\r\n"), 200),
    "endless chunks": (
        _endlessly(b"1000\r\n" + b"z" * 4096 + b"\r\n", head=HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        200,
    ),
    "endless chunk extension": (_endlessly(b";x=y" * 100, head=HEAD + b"Transfer-Encoding: chunked\r\n\r\n1"), 200),
    "endless trailers": (_endlessly(b"T: x\r\n", head=HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"), 200),
    "gzip bomb": (_once(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB), 200),
    "two hundred headers": (_once(HEAD + b"X-%d: y\r\n" % 7 * 200 + b"Content-Length: 0\r\n\r\n"), 200),
    "70 KB in a line": (_once(HEAD + b"X: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n"), Fault.PROTOCOL),
    "redirect with an endless body": (
        _endlessly(b"z" * 8_192, head=b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n"),
        302,
    ),
    "redirect to nonsense": (_once(b"HTTP/1.1 302 X\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n"), 302),
    "redirect in no charset": (
        _once(b"HTTP/1.1 302 X\r\nLocation: \xff\xfe\xc3\x28\r\nContent-Length: 0\r\n\r\n"),
        302,
    ),
    "garbage": (_endlessly(b"\x00\xff\x1b[2J" * 100), Fault.PROTOCOL),
    "another protocol": (_once(b"SSH-2.0-OpenSSH_9.2p1\r\n"), Fault.PROTOCOL),
    "silence": (_silent, Fault.TIMEOUT),
    "early answer": (_early, 413),
    "half-close": (_half_closed, Fault.CONNECTION),
    "reset": (_reset, Fault.CONNECTION),
}


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    with Sender(max_response_bytes=CAP) as sender:
        yield sender


@pytest.mark.parametrize("name", ABUSE)
def test_abuse_ends_in_time_and_within_the_bounds(sender: Sender, name: str) -> None:
    """Whatever it does, a receiver costs its own request's time, little memory, and little of the network."""
    script, expected = ABUSE[name]
    written = _Meter(script)
    with Receiver(written, send_buffer=SEND_BUFFER) as receiver:
        began = time.monotonic()
        seen = sender.send(receiver.url(), timeout_ms=TOTAL_MS, idle_timeout_ms=300).observation
        took = time.monotonic() - began

    assert seen is not None
    assert took < TOTAL_MS / 1000 + 1.0
    assert (seen.status or seen.fault) == expected
    assert seen.sends == 1
    # What libcurl tells nothing of is measured now and then only.
    assert written.bytes < (20_000_000 if name == "endless chunk extension" else CAP + SLACK)
    assert took < 0.5 or name != "endless chunk extension"
    assert len(seen.snippet) <= 1024
    assert all(character.isprintable() for character in seen.text or "")
    if seen.fault is Fault.PROTOCOL and not seen.bytes_received:
        assert seen.text == NOT_HTTP_TEXT


def test_all_abuse_at_once_leaves_nothing_behind() -> None:
    """Every kind at once, several times, beside good receivers: those are served, and memory and descriptors rest."""
    process = psutil.Process()
    before = _open_descriptors()
    with (
        contextlib.ExitStack() as receivers,
        NameServer({"good.test": Reply(("127.0.0.1",)), "hangs.test": Reply(silent=True)}) as names,
    ):
        bad = [receivers.enter_context(Receiver(script, send_buffer=SEND_BUFFER)) for script, _ in ABUSE.values()]
        good = receivers.enter_context(Receiver(keep_answering()))
        hoard = receivers.enter_context(Hoard())
        sizes = []
        with Sender(max_response_bytes=CAP, name_servers=[names.address]) as sender:
            for _ in range(4):
                bounds: dict[str, Any] = {"timeout_ms": TOTAL_MS, "idle_timeout_ms": 300}
                urls = [*(receiver.url() for receiver in bad), hoard.url, "http://hangs.test:9/"] * 4
                fine = [request(good.url(host=host)) for host in ("127.0.0.1", "good.test") for _ in range(20)]
                results = sender.send_all([*(request(url, **bounds) for url in urls), *fine])
                served = [c.observation for c in results[len(urls) :] if c.observation]
                assert [one.status for one in served] == [200] * len(fine)
                assert sender.engine.in_flight == 0
                sender.done.clear()
                gc.collect()
                sizes.append(process.memory_info().rss)
        # The threads and buffers of the receivers are in it, too.
        assert sizes[-1] - sizes[1] < 12_000_000
    gc.collect()
    wait_until(lambda: _open_descriptors() <= before)


@pytest.mark.parametrize("host", ["127.0.0.1", "stale.test"])
def test_stale_connections_are_never_the_receivers_fault(host: str) -> None:
    """Fifty rounds on a connection that the receiver closed meanwhile: fifty successes, each sent once or twice (C-15)."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.read()
        closed.clear()
        peer.send(OK)
        if peer.number % 2:
            # Half of them close at once, the others when the next request is on its way.
            peer.read()
        closed.set()

    with (
        NameServer({"stale.test": Reply(("127.0.0.1",))}) as names,
        Receiver(script) as receiver,
        Sender(name_servers=[names.address]) as sender,
    ):
        seen: list[Observation] = []
        for _ in range(50):
            observation = sender.send(receiver.url(host=host)).observation
            assert observation is not None
            seen.append(observation)

        assert [one.status for one in seen] == [200] * 50
        assert {one.sends for one in seen} <= {1, 2}
        assert {one.fault for one in seen} == {None}


def test_addresses_that_libcurl_lost_are_brought_again() -> None:
    """The first request to a name cannot be built, so that it brought libcurl nothing; those with it are sent as ever."""
    with (
        NameServer({"good.test": Reply(("127.0.0.1",))}) as names,
        Receiver(keep_answering()) as receiver,
        Sender(name_servers=[names.address]) as sender,
    ):
        url = receiver.url(host="good.test")
        known = receiver.url("/other", host="good.test").replace(str(receiver.port), "9")
        sender.send(known, connect_timeout_ms=500)  # now the name is known, but not for this port
        sender.send(url, headers=["X: a\nb"])
        seen = sender.send_all([request(url) for _ in range(10)])

    assert [completed.observation.status for completed in seen if completed.observation] == [200] * 10
    assert {completed.observation.sends for completed in seen if completed.observation} == {1}


def _open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class _Meter:
    """A script that counts what it got rid of, its last piece included only as far as the kernel took it."""

    def __init__(self, script: Callable[[Peer], None]) -> None:
        self._script = script
        self.bytes = 0

    def __call__(self, peer: Peer) -> None:
        send = peer.socket.send
        peer.send = self._send(send)  # type: ignore[method-assign,assignment]  # counted on its way
        self._script(peer)

    def _send(self, send: Callable[[bytes], int]) -> Callable[[bytes], None]:
        def counting(data: bytes) -> None:
            while data:
                sent = send(data)
                self.bytes += sent
                data = data[sent:]

        return counting
