"""Time-outs, the end of the engine, and that every request comes back exactly once."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from relay.core.errors import Unavailable
from relay.core.observation import Fault
from relay.delivery.engine import Completed, Engine
from relay.delivery.reply import Reply
from tests.hostile import OK, Hoard, Peer, Receiver, Sender, keep_answering, request, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

REPLY = b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 200 + b"\r\nContent-Length: 500\r\n\r\n" + b"z" * 500


def hang(peer: Peer) -> None:
    peer.read()
    peer.hold()


@pytest.mark.parametrize("part", ["header", "body", "interim"])
def test_trickle_ends_at_the_total(part: str) -> None:
    """Bytes that come one by one, each within the idle time-out, do not move the end (B-84)."""

    def script(peer: Peer) -> None:
        peer.read()
        head, _, body = REPLY.partition(b"\r\n\r\n")
        if part == "interim":
            peer.trickle(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, every=0.02)
        elif part == "body":
            peer.send(head + b"\r\n\r\n")
            peer.trickle(body, every=0.02)
        else:
            peer.trickle(head, every=0.02)

    with Sender() as sender, Receiver(script) as receiver:
        seen = sender.send(receiver.url(), timeout_ms=700, idle_timeout_ms=150).observation

    assert seen is not None
    assert 690_000 <= seen.total_us <= 900_000
    assert (seen.status, seen.fault) == ((200, None) if part == "body" else (None, Fault.TIMEOUT))
    assert seen.body_incomplete == (part == "body")


@pytest.mark.parametrize("begun", [b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: y", REPLY[:-1]])
def test_silence_within_a_reply_ends_at_the_idle_time(begun: bytes) -> None:
    """Once the reply has begun, silence is cut at the idle time-out (B-84)."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(begun)
        peer.hold()

    with Sender() as sender, Receiver(script) as receiver:
        seen = sender.send(receiver.url(), timeout_ms=5_000, idle_timeout_ms=250).observation

    assert seen is not None
    assert 240_000 <= seen.total_us <= 450_000
    assert (seen.status, seen.fault) == ((200, None) if begun == REPLY[:-1] else (None, Fault.TIMEOUT))


def test_waiting_for_the_first_byte_is_not_idle() -> None:
    """A receiver may think longer than the idle time-out, up to the total (B-33, B-84)."""

    def script(peer: Peer) -> None:
        while True:
            peer.read()
            threading.Event().wait(0.6)
            peer.send(OK)

    with Sender() as sender, Receiver(script) as receiver:
        for _ in range(2):
            seen = sender.send(receiver.url(), timeout_ms=5_000, idle_timeout_ms=100).observation
            assert seen is not None
            assert (seen.status, seen.sends) == (200, 1)


def test_connect_time_out_is_its_own() -> None:
    """A connect that hangs ends at the connect time-out, with nothing sent."""
    with Receiver(keep_answering()) as receiver:
        # Nobody accepts, and the backlog is full: the kernel lets further connects hang.
        receiver.ending.set()
        receiver._acceptor.join()
        receiver._listener.listen(0)
        with Sender() as sender:
            batch = [request(receiver.url(), connect_timeout_ms=300, timeout_ms=700) for _ in range(6)]
            results = [completed.observation for completed in sender.send_all(batch)]

    hung = [seen for seen in results if seen is not None and seen.sends == 0]
    assert len(hung) >= 2
    for seen in hung:
        assert (seen.fault, seen.text) == (Fault.TIMEOUT, "timed out connecting")
        assert 290_000 <= seen.total_us <= 500_000


def test_start_after_the_lease_is_not_made() -> None:
    """A request whose time to start has passed is returned as not sent (B-22)."""
    with Sender() as sender, Receiver(keep_answering()) as receiver:
        completed = sender.send(receiver.url(), start_by=time.monotonic() - 0.001)

        assert (completed.not_sent, completed.observation, receiver.accepted) == (True, None, 0)


def test_hanging_transfers_do_not_slow_the_others() -> None:
    """Beside two thousand hanging transfers others are answered promptly, and all of them end (B-72)."""
    with Receiver(keep_answering()) as quick, Hoard() as hoard, Sender() as sender:
        sender.engine.submit([request(hoard.url, timeout_ms=15_000, key="slow") for _ in range(2_000)])
        wait_until(lambda: len(hoard.held) == 2_000)
        took = []
        for expected in range(1, 101):
            began = time.monotonic()
            sender.engine.submit([request(quick.url(), key="quick")])
            _wait_for(sender.done, expected)
            took.append(time.monotonic() - began)
        # None of the slow ones has ended meanwhile: these were the quick ones' times.
        assert {c.request.key for c in sender.done[:100]} == {"quick"}
        wait_until(lambda: len(sender.done) == 2_100, patience=60)

        assert sorted(took)[50] < 0.5
        slow = [c for c in sender.done if c.request.key == "slow"]
        assert len({id(c.request) for c in slow}) == 2_000
        assert {c.observation.fault for c in slow if c.observation} == {Fault.TIMEOUT}
        totals = [c.observation.total_us for c in slow if c.observation]
        # The upper bound is the machine's to keep: with it busy, their ends are seen late.
        assert 14_990_000 <= min(totals) <= max(totals) <= 32_000_000


def test_descriptors_come_back_to_rest() -> None:
    """After hundreds of failed and finished transfers and the engine's end, no descriptor is left over."""
    with Receiver(keep_answering()) as dead:
        pass
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count is all that is wanted

    with Receiver(keep_answering()) as good, Sender() as sender:
        sender.send_all([request(good.url() if n % 2 else dead.url()) for n in range(400)])
    wait_until(lambda: good.closed == good.accepted)
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208  as above


def test_memory_comes_back_to_rest() -> None:
    """Thousands of transfers, good and failed, leave nothing behind once the first have warmed the engine up."""
    with Receiver(keep_answering(REPLY)) as dead:
        pass

    def one_round() -> int:
        for _ in range(20):
            sender.send_all([request(good.url() if n % 4 else dead.url(), body=b"x" * 5000) for n in range(100)])
            sender.done.clear()
            good.requests.clear()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with Receiver(keep_answering(REPLY)) as good, Sender() as sender:
        one_round()
        before = one_round()
        after = max(one_round() for _ in range(2))

        assert after - before < 3_000_000
        assert sender.engine.in_flight == 0
        assert sender.engine._active == set()


def test_stop_waits_for_what_is_in_flight() -> None:
    """What was sent may finish within the deadline, and is reported."""
    gate = threading.Event()

    def script(peer: Peer) -> None:
        peer.read()
        gate.wait(10)
        peer.send(OK)

    with Sender() as sender, Receiver(script) as receiver:
        sender.engine.submit([request(receiver.url())])
        wait_until(lambda: receiver.requests)
        threading.Timer(0.2, gate.set).start()
        unsent = sender.engine.stop(time.monotonic() + 10)

        assert unsent == []
        assert [c.observation.status for c in sender.done if c.observation] == [200]


def test_stop_breaks_off_at_its_deadline() -> None:
    """What is in flight past the deadline is cancelled at once: the receiver sees the end, the caller is told."""
    with Sender() as sender, Receiver(hang) as receiver:
        sender.engine.submit([request(receiver.url()) for _ in range(3)])
        wait_until(lambda: len(receiver.requests) == 3)
        began = time.monotonic()
        unsent = sender.engine.stop(began + 0.3)

        assert 0.29 <= time.monotonic() - began <= 2
        assert unsent == []
        assert [(c.abandoned, c.not_sent) for c in sender.done] == [(True, False)] * 3
        assert {c.observation.fault for c in sender.done if c.observation} == {Fault.INTERNAL}
        wait_until(lambda: receiver.closed == 3)
        assert sender.engine.in_flight == 0


def test_everything_comes_back_exactly_once_over_a_stop() -> None:
    """However stop() falls among submits, each request is returned by one way and one only."""
    for delay in (0.0, 0.002, 0.01, 0.03):
        taken, refused = [], 0
        with Sender() as sender, Receiver(keep_answering()) as receiver:
            batches = [[request(receiver.url(), key=(b, n)) for n in range(50)] for b in range(40)]
            unsent: list[object] = []
            stopper = threading.Timer(delay, lambda s=sender, u=unsent: u.extend(s.engine.stop(time.monotonic() + 5)))
            stopper.start()
            for batch in batches:
                try:
                    sender.engine.submit(batch)
                    taken += [sent.key for sent in batch]
                except Unavailable:
                    refused += 1
            stopper.join()

            came_back = [c.request.key for c in sender.done] + [sent.key for sent in unsent]  # type: ignore[attr-defined]  # SendRequests
            assert sorted(came_back) == sorted(taken)
            assert sender.engine.in_flight == 0


def test_engine_that_never_started_gives_everything_back() -> None:
    """stop() before start() returns what was submitted."""
    engine = Engine(policy=lambda _: None, max_response_bytes=1, snippet_bytes=1, on_done=lambda _: None)
    batch = [request("http://127.0.0.1:1/")]
    engine.submit(batch)

    assert engine.in_flight == 1
    assert engine.stop(time.monotonic()) == batch
    assert engine.in_flight == 0
    with pytest.raises(Unavailable):
        engine.submit(batch)


def test_listener_that_raises_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """An error in on_done is logged, and the engine goes on."""
    seen: list[Completed] = []

    def on_done(batch: list[Completed]) -> None:
        seen.extend(batch)
        raise RuntimeError("listener")

    _survives(on_done, seen)

    assert "listener" in caplog.text


def test_bug_in_one_transfer_ends_that_transfer_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a result cannot be read, that request is an internal fault and the next is sent as ever."""
    parse = Reply.headers
    broken = iter([True])
    monkeypatch.setattr(Reply, "headers", lambda self: 1 / 0 if next(broken, False) else parse(self))

    with Sender() as sender, Receiver(keep_answering()) as receiver:
        first, second = sender.send(receiver.url()).observation, sender.send(receiver.url()).observation

        assert first is not None
        assert second is not None
        assert (first.fault, second.status) == (Fault.INTERNAL, 200)
    assert "a transfer could not be judged" in caplog.text


def test_bug_in_a_turn_does_not_lose_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns that raise are logged; what they left undone is done in the next."""
    fail = iter([True] * 3)
    reap = Engine._reap

    def sometimes(self: Engine) -> None:
        if next(fail, False):
            raise RuntimeError("turn")
        reap(self)

    monkeypatch.setattr(Engine, "_reap", sometimes)

    with Sender() as sender, Receiver(keep_answering()) as receiver:
        results = sender.send_all([request(receiver.url()) for _ in range(20)])

    assert {c.observation.status for c in results if c.observation} == {200}
    assert "a turn of the send engine failed" in caplog.text


def _survives(on_done: Callable[[list[Completed]], None], seen: list[Completed]) -> None:
    engine = Engine(policy=lambda _: None, max_response_bytes=1000, snippet_bytes=10, on_done=on_done)
    engine.start()
    with Receiver(keep_answering()) as receiver:
        for expected in (1, 2, 3):
            engine.submit([request(receiver.url())])
            _wait_for(seen, expected)
        engine.stop(time.monotonic())


def _wait_for(done: list[Completed], count: int) -> None:
    wait_until(lambda: len(done) >= count)
