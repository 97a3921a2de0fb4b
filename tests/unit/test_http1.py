"""Requests as they are read from bytes, in whatever pieces these come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.fingerprint import check_key
from relay.web.http1 import HEADERS, MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES, Reader, render

TWO = (
    b"POST /v1/%C3%A9vents?a=1&b=%20 HTTP/1.1\r\nHost: relay\r\nContent-Type:  text/plain \r\nX-Two: a\r\nx-two: b\r\n"
    b"X_Two: c\r\nContent-Length: 5\r\n\r\nhello"
    b"POST http://relay/b HTTP/1.1\r\nHost: relay\r\nTransfer-Encoding: chunked\r\nExpect: 100-Continue\r\n\r\n"
    b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: t\r\n\r\n"
)


def _read(*pieces: bytes) -> Reader:
    reader = Reader({"SERVER_PROTOCOL": "HTTP/1.1"})
    for piece in pieces:
        reader.feed(piece)
    return reader


@given(cuts=st.lists(st.integers(0, len(TWO)), max_size=6))
def test_requests_come_out_the_same_however_they_are_cut(cuts: list[int]) -> None:
    """Head, body and order do not depend on the pieces; a name with _ passes for no other; trailers are nobody's."""
    edges = [0, *sorted(cuts), len(TWO)]
    reader = _read(*[TWO[start:end] for start, end in pairwise(edges)])
    assert reader.fault is None
    assert reader.current is None
    first, second = reader.ready
    assert first.body() == b"hello"
    assert first.environ["REQUEST_METHOD"] == "POST"
    assert first.environ["PATH_INFO"].encode("latin-1").decode() == "/v1/évents"
    assert first.environ["QUERY_STRING"] == "a=1&b=%20"
    assert first.environ["CONTENT_TYPE"] == "text/plain"
    assert first.environ["HTTP_X_TWO"] == "a, b"
    assert first.environ[HEADERS][2:5] == [("X-Two", "a"), ("x-two", "b"), ("X_Two", "c")]
    assert not first.expects
    assert second.body() == b"abcde"
    assert second.environ["PATH_INFO"] == "/b"
    assert second.expects
    assert second.keep_alive
    assert "HTTP_X_TRAILER" not in second.environ


def test_two_keys_are_not_taken_for_one() -> None:
    """B-10: lines of a header that is no list come as what its rule refuses, not as a value that nobody sent."""
    reader = _read(b"POST / HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nIdempotency-Key: l\r\n\r\n")
    with pytest.raises(InvalidInput):
        check_key(reader.ready[0].environ["HTTP_IDEMPOTENCY_KEY"])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (b"GET nowhere HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"GET /" + b"a" * MAX_TARGET_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * MAX_HEADERS + b"\r\n", 431),
    ],
)
def test_what_is_no_request(data: bytes, status: int) -> None:
    """What cannot be told apart for sure, or is too much, is refused, and what came before it is not."""
    before = b"GET /before HTTP/1.1\r\nHost: a\r\n\r\n"
    for pieces in ((before, data), (before + data,), (before, data[:1], data[1:])):
        reader = _read(*pieces)
        assert [one.environ["PATH_INFO"] for one in reader.ready] == ["/before"]
        assert reader.current is None
        assert reader.fault is not None
        assert reader.fault.status == status


@pytest.mark.parametrize(
    "last",
    [
        b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /last HTTP/1.0\r\n\r\n",
        b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_nothing_is_read_after_the_last(last: bytes) -> None:
    """A request that ends the connection, or would turn it into something else, is answered; what follows is not."""
    for pieces in ((last + b"GET /more HTTP/1.1\r\nHost: a\r\n\r\n",), (last, b"\x00\x01")):
        reader = _read(*pieces)
        assert [one.environ["PATH_INFO"] for one in reader.ready] == ["/last"]
        assert not reader.ready[0].keep_alive
        assert reader.fault is None


def test_an_answer() -> None:
    """Status, Date and headers, each on its line, then the body."""
    assert render("200 OK", [("A", "b"), ("C", "dé")], b"body", date="now", close=True) == (
        b"HTTP/1.1 200 OK\r\nDate: now\r\nA: b\r\nC: d\xe9\r\nConnection: close\r\n\r\nbody"
    )


@pytest.mark.parametrize("filler", [b"X" * 1000, b"X: y\r\n" * 100])
def test_trailers_are_bounded(filler: bytes) -> None:
    """What follows the last chunk is refused at the bound of a head, with a line's end or without."""
    reader = _read(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
    fed = 0
    while reader.fault is None:
        assert fed <= MAX_HEAD_BYTES + len(filler)
        reader.feed(filler)
        fed += len(filler)
    assert reader.fault.status == 431
