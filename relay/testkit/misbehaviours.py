"""Answers that break HTTP, or its spirit: what hostile and broken receivers have been seen to do.

Most take `?then=` for how the connection ends after the fault: `fin`, `reset`, `half` (FIN, and
reads on) or `hang`.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from relay.testkit.script import Answer, End, Pause, Step, reply, response_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.testkit.request import Request

_MEGABYTE = bytes(1024 * 1024)
_OK = b"HTTP/1.1 200 OK\r\n"
_OK_LENGTH_2 = _OK + b"Content-Length: 2\r\n"

#: Answers for `/garbage?kind=`. The status is what a lenient client makes of it, None where there is none to be made.
GARBAGE: dict[str, bytes] = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http09": b"<html><body>hello</body></html>\n",
    "bad_status": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "word_status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
    "four_digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "zero_status": b"HTTP/1.1 000 Nothing\r\nContent-Length: 0\r\n\r\n",
    "low_status": b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
    "odd_status": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "glued_status": b"HTTP/1.1 200OK\r\nContent-Length: 0\r\n\r\n",
    "lower_case": b"http/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version12": b"HTTP/1.2 200 OK\r\nContent-Length: 0\r\n\r\n",
    "http2": b"HTTP/2 200\r\ncontent-length: 0\r\n\r\n",
    "http20": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "http2_frames": b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\x00\x00\x00\x04\x01\x00\x00\x00\x00",
    "tls_alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "binary": bytes(range(256)) * 4,
    "escapes": b"HTTP/1.1 500 \x1b[2J\x1b[31mred\x07\xff\xfe\r\nContent-Length: 0\r\n\r\n",
    "bad_bytes": _OK + b"Content-Type: text/\xff\xfe\r\nLocation: http://\xe9\x80\r\nContent-Length: 0\r\n\r\n",
    "nul_header": _OK_LENGTH_2 + b"X-Nul: a\x00b\r\n\r\nok",
    "no_colon": _OK_LENGTH_2 + b"this line has none\r\n\r\nok",
    "folded_header": _OK_LENGTH_2 + b"X-Folded: a\r\n b\r\n\r\nok",
    "bare_lf": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "two_lengths": _OK_LENGTH_2 + b"Content-Length: 3\r\n\r\nok",
    "bad_length": _OK + b"Content-Length: abc\r\n\r\nok",
    "negative_length": _OK + b"Content-Length: -5\r\n\r\nok",
    "length_and_chunks": _OK_LENGTH_2 + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "bad_chunks": _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n",
    "no_last_chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    "unknown_coding": _OK + b"Transfer-Encoding: rot13\r\n\r\nbx",
    "body_after_204": b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok",
    "two_answers": (_OK_LENGTH_2 + b"\r\nok") * 2,
    "http10": b"HTTP/1.0 200 OK\r\n\r\nok",
    "empty": b"",
}


def trickle(request: Request) -> Answer:
    """A head, then one byte of body each `ms`, `n` of them or without end; the end of the connection ends the body."""
    pause = Pause(seconds=request.number("ms", 100) / 1000)
    limit = request.number("n", float("inf"), most=float("inf"))

    def steps() -> Iterator[Step]:
        yield response_head(200, [("Content-Type", "text/plain"), ("Connection", "close")])
        sent = 0
        while sent < limit:
            yield pause
            yield b"."
            sent += 1
        yield End.CLOSE

    return Answer(status=200, name="trickle", steps=steps())


def trickle_headers(request: Request) -> Answer:
    """A head that never ends, one byte each `ms` from the status line's first."""
    pause = Pause(seconds=request.number("ms", 100) / 1000)

    def steps() -> Iterator[Step]:
        line = _OK
        while True:
            for byte in line:
                yield bytes((byte,))
                yield pause
            line = b"X-Drip: drop\r\n"

    return Answer(status=None, name="trickle-headers", steps=steps())


def reset(request: Request) -> Answer | None:
    """A reset without an answer: after the whole request was read, or (`when=before`) before its body was."""
    when = request.choice("when", "after", ("after", "before"))
    if not request.complete and when == "after":
        return None
    return Answer(status=None, name="reset", steps=(End.RESET,))


def hang(request: Request) -> Answer:
    """Silence until the client leaves; with `ms`, silence for so long and then the end by `then`."""
    wait = request.number("ms", 0) / 1000
    if not wait:
        return Answer(status=None, name="hang", steps=(End.HANG,))
    return Answer(status=None, name="hang", steps=(Pause(seconds=wait), _ending(request)))


def stale(request: Request) -> Answer:
    """A good answer to the first request on each connection; the second is read and then cut without a byte, or
    (`half=1`) after half a status line."""
    if request.nth == 1:
        return reply(request, 200, b"ok\n")
    first = b"HTTP/1.1 20" if request.choice("half", "0", ("0", "1")) == "1" else b""
    return Answer(status=None, name="stale", steps=(first, _ending(request)))


def half_status(request: Request) -> Answer:
    """Half a status line."""
    return Answer(status=None, name="half-status", steps=(b"HTTP/1.1 20", _ending(request)))


def half_headers(request: Request) -> Answer:
    """A status line and some headers, but no blank line."""
    return Answer(status=None, name="half-headers", steps=(_OK_LENGTH_2, _ending(request)))


def garbage(request: Request) -> Answer:
    """Bytes that are not quite HTTP, see GARBAGE."""
    kind = request.choice("kind", "ssh", tuple(GARBAGE))
    return Answer(status=None, name=f"garbage:{kind}", steps=(GARBAGE[kind], _ending(request)))


def endless_1xx(request: Request) -> Answer:
    """Interim answers without end, one each `ms`."""
    block = response_head(int(request.number("code", 100, least=100, most=199)))
    wait = request.number("ms", 0) / 1000

    def steps() -> Iterator[Step]:
        while True:
            yield block
            if wait:
                yield Pause(seconds=wait)

    return Answer(status=None, name="endless-1xx", steps=steps())


def huge_header(request: Request) -> Answer:
    """A good answer with one header line of `kb` KiB."""
    return reply(request, 200, b"ok\n", headers=[("X-Huge", "h" * int(request.number("kb", 70, most=100_000) * 1024))])


def many_headers(request: Request) -> Answer:
    """A good answer with `n` more header lines."""
    count = int(request.number("n", 200, most=1_000_000))
    return reply(request, 200, b"ok\n", headers=[(f"X-Header-{index}", "value") for index in range(count)])


def gzip_bomb(request: Request) -> Answer:
    """A body of about 1 KB for each of the `mb` MiB of zeros that it unpacks to; a valid gzip file (RFC 1952)."""
    count = int(request.number("mb", 64, least=1, most=10_000))
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(_MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)  # refers to nothing before it: can be repeated
    length = 10 + count * len(block) + 2 + 8

    def steps() -> Iterator[Step]:
        yield response_head(200, [("Content-Encoding", "gzip"), ("Content-Length", str(length))])
        yield b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
        check = 0
        for _ in range(count):
            check = zlib.crc32(_MEGABYTE, check)
            yield block
        size = count * len(_MEGABYTE) % 2**32
        yield b"\x03\x00" + check.to_bytes(4, "little") + size.to_bytes(4, "little")

    return Answer(status=200, name="gzip-bomb", steps=steps())


def early_reply(request: Request) -> Answer:
    """An answer before the body was read, which is then never read. `then=hold` keeps the connection for `ms` so."""
    status = int(request.number("status", 200, least=200, most=999))
    then = request.choice("then", "fin", ("fin", "reset", "hold"))
    answer = response_head(status, [("Content-Length", "6")]) + b"early\n"
    if then == "hold":
        wait = Pause(seconds=request.number("ms", 30_000) / 1000)
        return Answer(status=status, name=f"early:{status}", steps=(answer, wait, End.CLOSE))
    return Answer(status=status, name=f"early:{status}", steps=(answer, End(then)))


def short_body(request: Request) -> Answer:
    """A Content-Length of 1000, ten bytes, and the end."""
    answer = response_head(200, [("Content-Length", "1000")]) + b"too short\n"
    return Answer(status=200, name="short-body", steps=(answer, _ending(request)))


def upgrade(request: Request) -> Answer:
    """101 to a protocol nobody asked for."""
    answer = response_head(101, [("Connection", "Upgrade"), ("Upgrade", "websocket")])
    return Answer(status=101, name="upgrade", steps=(answer, _ending(request, "hang")))


def _ending(request: Request, default: str = "fin") -> End:
    return End(request.choice("then", default, ("fin", "reset", "half", "hang")))
