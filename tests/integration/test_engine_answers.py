"""What the engine makes of what receivers send back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from relay.core.observation import Fault, Observation
from tests.hostile import OK, Peer, Receiver, Sender, answer_once, keep_answering, request, taken, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Milliseconds: the total of transfers that are expected to run into it.
SHORT = 400


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    with Sender() as sender:
        yield sender


def observe(sender: Sender, script: Callable[[Peer], None], timeout_ms: int = 10_000) -> Observation:
    with Receiver(script) as receiver:
        observation = sender.send(receiver.url(), timeout_ms=timeout_ms).observation
    assert observation is not None
    return observation


def test_success_is_observed_in_full(sender: Sender) -> None:
    """A 200 is reported with its header, snippet, address, bytes and durations (B-43)."""
    reply = b"HTTP/1.1 200 OK\r\nX-One: a\r\nSet-Cookie:b=c \r\nx-one:  \xe9\r\nContent-Length: 2\r\n\r\nok"

    with Receiver(keep_answering(reply)) as receiver:
        completed = sender.send(receiver.url("/path?q=1"), body=b"abc\0def", headers=["X-Mine: 1"], key="k")

    seen = completed.observation
    assert seen is not None
    assert completed.request.key == "k"
    assert not completed.not_sent
    assert (seen.fault, seen.text, seen.status, seen.body_incomplete, seen.sends) == (None, None, 200, False, 1)
    assert seen.headers == [("x-one", "a"), ("set-cookie", "b=c"), ("x-one", "\xe9"), ("content-length", "2")]
    assert seen.snippet == b"ok"
    assert seen.remote_address == "127.0.0.1"
    assert seen.bytes_received == len(reply)
    received = receiver.requests[0]
    assert received.body == b"abc\0def"
    assert seen.bytes_sent == len(received.head) + 4 + len(received.body)
    assert 0 < seen.connect_us < 1_000_000
    assert 0 < seen.first_byte_us <= seen.total_us < 5_000_000
    assert seen.tls_us == 0


def test_wire_request_is_exactly_what_was_asked_for(sender: Sender) -> None:
    """Nothing of the HTTP client's goes out but Host and Content-Length (B-112)."""
    with Receiver(keep_answering()) as receiver:
        sender.send(receiver.url("/a/../b%2E?x"), body=b"", headers=["X-A: 1", "x-a: 2", "X-Empty;"])

    lines = receiver.requests[0].head.split(b"\r\n")
    assert lines == [
        b"POST /a/../b%2E?x HTTP/1.1",
        f"Host: 127.0.0.1:{receiver.port}".encode(),
        b"X-A: 1",
        b"x-a: 2",
        b"X-Empty:",
        b"Content-Length: 0",
    ]


def test_large_body_arrives_whole_and_is_counted(sender: Sender) -> None:
    """Two megabytes go out without an Expect, and are counted."""
    body = bytes(range(256)) * 8192

    with Receiver(keep_answering()) as receiver:
        seen = sender.send(receiver.url(), body=body).observation

    assert seen is not None
    assert receiver.requests[0].body == body
    assert seen.bytes_sent == len(body) + len(receiver.requests[0].head) + 4


@pytest.mark.parametrize("status", [200, 204, 299, 301, 304, 400, 410, 421, 425, 429, 500, 503, 599, 600, 999])
def test_every_final_status_is_an_answer(sender: Sender, status: int) -> None:
    """Any status from 200 to 999 with a complete header block is reported as such."""
    seen = observe(sender, answer_once(b"HTTP/1.1 %d X\r\nLocation: http://[::1\r\n\r\n" % status))

    assert (seen.status, seen.fault) == (status, None)


COMPLETE: dict[str, tuple[bytes, int, bool]] = {
    "204 with a body": (b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\nhello", 204, False),
    "304 with a body": (b"HTTP/1.1 304 X\r\nContent-Length: 5\r\n\r\nhello", 304, False),
    "bytes after the body": (OK + b"HTTP/1.1 500 X\r\n\r\n", 200, False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nok", 200, False),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, False),
    "bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", 200, False),
    "Content-Length too long": (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nok", 200, True),
    "huge Content-Length": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\nok", 200, True),
    "broken chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 200, True),
    "no last chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", 200, True),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nT: 1\r\n\r\n", 200, False),
    "trailers over the bound": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + b"T: %b\r\n" % (b"x" * 900) * 40,
        200,
        True,
    ),
    "interim answers": (
        b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nLink: <x>\r\nRetry-After: 9\r\n\r\nHTTP/1.1 199 X\r\n\r\n" + OK,
        200,
        False,
    ),
    "undecoded gzip": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok", 200, False),
    "header bytes that are not text": (
        b"HTTP/1.1 302 X\r\nLocation: \xff\xfe\r\nContent-Type: \xff\r\n\r\n",
        302,
        False,
    ),
    "Content-Length twice in one": (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok", 200, False),
    "nine hundred": (b"HTTP/1.1 900 X\r\nContent-Length: 0\r\n\r\n", 900, False),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_complete_header_block_is_the_answer(sender: Sender, name: str) -> None:
    """Once the blank line of a final block was seen, the status counts, whatever becomes of the body."""
    reply, status, incomplete = COMPLETE[name]

    seen = observe(sender, answer_once(reply))

    assert (seen.fault, seen.status, seen.body_incomplete) == (None, status, incomplete)
    assert "link" not in dict(seen.headers)


def test_interim_header_is_not_the_answers(sender: Sender) -> None:
    """Header lines of a 103 are not reported with the final answer."""
    seen = observe(sender, answer_once(COMPLETE["interim answers"][0]))

    assert seen.headers == [("content-length", "2")]


BROKEN: dict[str, tuple[bytes, Fault]] = {
    "SSH banner": (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", Fault.PROTOCOL),
    "HTML without a status line": (b"<html>hello</html>", Fault.PROTOCOL),
    "status of two digits": (b"HTTP/1.1 20 OK\r\n\r\n", Fault.PROTOCOL),
    "status of four digits": (b"HTTP/1.1 2000 OK\r\n\r\n", Fault.PROTOCOL),
    "status below 100": (b"HTTP/1.1 099 X\r\n\r\n", Fault.PROTOCOL),
    "status zero": (b"HTTP/1.1 000 X\r\n\r\n", Fault.PROTOCOL),
    "no space after the status": (b"HTTP/1.1 200OK\r\n\r\n", Fault.PROTOCOL),
    "lower case": (b"http/1.1 200 OK\r\n\r\n", Fault.PROTOCOL),
    "HTTP/1.2": (b"HTTP/1.2 200 OK\r\n\r\n", Fault.PROTOCOL),
    "HTTP/2": (b"HTTP/2 200\r\n\r\n", Fault.PROTOCOL),
    "HTTP/2.0": (b"HTTP/2.0 200 OK\r\n\r\n", Fault.PROTOCOL),
    "escape codes": (b"\x1b[2J\x1b[31mgotcha\xff\xfe\r\n" * 400, Fault.PROTOCOL),
    "header over the bound": (b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"y" * 1000) * 33 + b"\r\n", Fault.PROTOCOL),
    "one line over the bound": (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", Fault.PROTOCOL),
    "interim blocks over the bound": (b"HTTP/1.1 100 Continue\r\n\r\n" * 1400 + OK, Fault.PROTOCOL),
    "NUL in a header": (b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n", Fault.PROTOCOL),
    "header without a colon": (b"HTTP/1.1 200 OK\r\nwhat is this\r\n\r\n", Fault.PROTOCOL),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", Fault.PROTOCOL),
    "negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", Fault.PROTOCOL),
    "empty length": (b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nhello", Fault.PROTOCOL),
    "unknown transfer coding": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: snappy\r\n\r\nok", Fault.PROTOCOL),
    "nothing": (b"", Fault.CONNECTION),
    "half a status line": (b"HTTP/1.1 2", Fault.CONNECTION),
    "status line alone": (b"HTTP/1.1 200 OK\r\n", Fault.CONNECTION),
    "no blank line": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n", Fault.CONNECTION),
    "an interim answer alone": (b"HTTP/1.1 103 Early\r\n\r\n", Fault.CONNECTION),
    "101": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", Fault.UPGRADE),
}


#: Status lines of which libcurl hands over nothing, not even their length.
UNTOLD = {"status of two digits", "HTTP/1.2", "half a status line"}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_answer_is_a_fault(sender: Sender, name: str) -> None:
    """A broken reply that ends with FIN has a fault, no status, its bytes counted, and a text fit for a log."""
    reply, fault = BROKEN[name]

    seen = observe(sender, answer_once(reply))

    assert (seen.fault, seen.status, seen.headers, seen.sends, seen.snippet) == (fault, None, [], 1, b"")
    assert 0 < seen.bytes_received <= len(reply) or not reply or name in UNTOLD
    assert seen.text
    assert seen.text.isprintable()
    assert len(seen.text) <= 300
    assert "http://" not in seen.text


def test_garbage_on_a_kept_connection_is_no_answer(sender: Sender) -> None:
    """After a good reply, too, what has no status line is a fault, and not sent again."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(OK)
        peer.read()
        peer.send(b"what is this\r\n" * 3)

    with Receiver(script) as receiver:
        first, second = (sender.send(receiver.url()).observation for _ in range(2))
        assert receiver.accepted == 1
    assert first is not None
    assert second is not None
    assert (first.status, second.status, second.fault, second.sends) == (200, None, Fault.PROTOCOL, 1)


SILENT: dict[str, tuple[bytes, int | None]] = {
    "nothing": (b"", None),
    "half a status line": (b"HTTP/1.1 2", None),
    "status line alone": (b"HTTP/1.1 200 OK\r\n", None),
    "an interim answer alone": (b"HTTP/1.1 100 Continue\r\n\r\n", None),
    "no blank line": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n", None),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", 200),
}


@pytest.mark.parametrize("name", SILENT)
def test_silence_ends_at_the_total(sender: Sender, name: str) -> None:
    """A reply that stops short is a time-out at the total, or an answer if its block was complete."""
    reply, status = SILENT[name]

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(reply)
        peer.hold()

    seen = observe(sender, script, timeout_ms=SHORT)

    assert (seen.status, seen.fault) == (status, None if status else Fault.TIMEOUT)
    assert seen.body_incomplete == (status is not None)
    assert SHORT * 1000 - 5_000 <= seen.total_us <= SHORT * 1000 + 200_000


@pytest.mark.parametrize("name", SILENT)
def test_reset_is_a_connection_fault(sender: Sender, name: str) -> None:
    """A reply that stops with RST is a connection fault, or an answer if its block was complete."""
    reply, status = SILENT[name]

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(reply)
        # The reset must not overtake the bytes.
        taken(peer)
        peer.reset()

    seen = observe(sender, script)

    assert (seen.status, seen.fault) == (status, None if status else Fault.CONNECTION)


@pytest.mark.parametrize("status", [200, 413, 500])
@pytest.mark.parametrize("end", ["close", "reset", "hold"])
def test_early_answer_counts(sender: Sender, status: int, end: str) -> None:
    """An answer that comes before the body was read is the answer, whatever the receiver does next."""

    def script(peer: Peer) -> None:
        peer.socket.recv(100)
        peer.send(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
        # Leaving with the upload unread resets the connection: give the answer a head start.
        taken(peer)
        if end == "reset":
            peer.reset()
        elif end == "hold":
            peer.hold()

    with Receiver(script) as receiver:
        seen = sender.send(receiver.url(), body=b"x" * 3_000_000, timeout_ms=2_000).observation

    assert seen is not None
    assert (seen.status, seen.fault) == (status, None)


def test_nobody_listens(sender: Sender) -> None:
    """A refused connect is a connection fault, nothing sent."""
    with Receiver(keep_answering()) as receiver:
        pass

    seen = sender.send(receiver.url()).observation

    assert seen is not None
    assert (seen.fault, seen.sends, seen.remote_address) == (Fault.CONNECTION, 0, "127.0.0.1")


def test_body_is_read_to_the_cap_and_no_further() -> None:
    """Past the cap the connection is dropped undrained; the receiver gets little more rid of (B-84)."""
    written = [0]

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n")
        while written[0] < 8_000_000:
            written[0] += peer.socket.send(b"x" * 4096)

    with Sender() as sender, Receiver(script, send_buffer=8192) as receiver:
        seen = sender.send(receiver.url()).observation
        wait_until(lambda: receiver.closed == 1)

    assert seen is not None
    assert (seen.status, seen.fault, seen.body_incomplete, len(seen.snippet)) == (200, None, True, 1024)
    assert seen.bytes_received < 65_536 + 16_384 + 200
    assert written[0] < 65_536 + 200_000


@pytest.mark.parametrize(("size", "incomplete"), [(1000, False), (1001, True)])
def test_body_of_just_the_cap_is_whole(size: int, incomplete: bool) -> None:
    """The cap itself is allowed; one byte more is not."""
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (size, b"x" * size)

    with Sender(max_response_bytes=1000, snippet_bytes=10) as sender, Receiver(answer_once(reply)) as receiver:
        seen = sender.send(receiver.url()).observation

    assert seen is not None
    assert (seen.body_incomplete, seen.snippet) == (incomplete, b"x" * 10)


def test_snippet_is_gathered_from_pieces() -> None:
    """The snippet holds the first bytes, also where they come one by one."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n")
        peer.trickle(b"hello, world", every=0.003)

    with Sender(snippet_bytes=8) as sender, Receiver(script) as receiver:
        seen = sender.send(receiver.url()).observation

    assert seen is not None
    assert (seen.snippet, seen.body_incomplete) == (b"hello, w", False)


@pytest.mark.parametrize(
    "headers",
    [
        ["X: a\r\nY: b"],
        ["X: a\nY: b"],
        ["X: a\rY: b"],
        ["X: a\0b"],
        ["X: \u20ac"],
        ["X: a", "Y: b\r\n", "Z: c"],
        ["X: a\n", "Y: b"],
    ],
)
def test_header_that_cannot_be_sent_is_unbuildable(sender: Sender, headers: list[str]) -> None:
    """A header that would smuggle a line, or cannot be encoded, is never sent."""
    with Receiver(keep_answering()) as receiver:
        seen = sender.send(receiver.url(), headers=headers).observation

        assert seen is not None
        assert (seen.fault, seen.sends) == (Fault.UNBUILDABLE, 0)
        assert receiver.accepted == 0


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://a b/", Fault.UNBUILDABLE),
        ("http://user:secret@127.0.0.1/", Fault.UNBUILDABLE),
        ("http://127.0.0.1:99999/", Fault.UNBUILDABLE),
        ("http://127.0.0.1/\0", Fault.UNBUILDABLE),
        ("http://\u20ac/", Fault.UNBUILDABLE),
        ("gopher://127.0.0.1/", Fault.REFUSED),
        ("file:///etc/passwd", Fault.REFUSED),
        ("nonsense://127.0.0.1/", Fault.REFUSED),
    ],
)
def test_url_that_cannot_be_dialled(sender: Sender, url: str, fault: Fault) -> None:
    """What is no http URL is never sent, and its text keeps the URL to itself."""
    seen = sender.send(url).observation

    assert seen is not None
    assert (seen.fault, seen.sends) == (fault, 0)
    assert "secret" not in (seen.text or "")


def test_one_bad_request_does_not_touch_its_batch(sender: Sender) -> None:
    """In a batch with requests that cannot be built, the others go out."""
    with Receiver(keep_answering()) as receiver:
        batch = [request(receiver.url() if n % 2 else "http://\u20ac/", key=n) for n in range(20)]
        results = sender.send_all(batch)

    assert [r.observation.status for r in results if r.observation] == [200 if n % 2 else None for n in range(20)]
