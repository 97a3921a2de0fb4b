"""HTTP/1.1 (RFC 9112) as bytes in and bytes out: no sockets, no threads, no clock.

llhttp parses, by way of httptools: which bytes are a request, and where it ends, is not judged here but for what the
RFC leaves to a server (a Host, one coding, sizes). A request comes out as a WSGI environment (PEP 3333).
"""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes

import httptools

from relay.web.problems import Problem, usual

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Bytes of a request's target, and of its whole head; and how many headers it may have.
MAX_TARGET_BYTES: Final = 8_192
MAX_HEAD_BYTES: Final = 65_536
MAX_HEADERS: Final = 200
#: Sent where the client waits for it before it sends its body (RFC 9110 section 10.1.1).
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
#: The environment's member that holds the headers as they came: (name, value), in their order and spelling.
HEADERS: Final = "relay.headers"

#: Header names that are kept as they are in an environment.
_MOST_NAMES: Final = 2_000


class Incoming:
    """A request whose head is there, and of its body what came so far."""

    __slots__ = ("chunked", "declared", "environ", "expects", "keep_alive", "pieces", "size", "whole")

    def __init__(self, environ: dict[str, Any], *, declared: int, chunked: bool, keep_alive: bool) -> None:
        self.environ = environ
        #: Bytes that the body shall have; 0 where it comes in chunks.
        self.declared = declared
        self.chunked = chunked
        self.keep_alive = keep_alive
        #: Whether the client waits to be told to go on.
        self.expects = environ.get("HTTP_EXPECT", "").lower() == "100-continue"
        self.pieces: list[bytes] = []
        self.size = 0
        self.whole = False

    def body(self) -> bytes:
        """Return the body as far as it came."""
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""


class Reader:
    """Reads the requests of one connection. The `on_` methods are httptools'."""

    def __init__(self, base: Mapping[str, Any]) -> None:
        """`base` is what each request's environment begins with."""
        self._base = base
        self._parser = httptools.HttpRequestParser(self)
        #: Whole requests that were not taken yet, the oldest first.
        self.ready: deque[Incoming] = deque()
        #: The request whose body is still coming.
        self.current: Incoming | None = None
        #: What is wrong with what came after those in `ready`: nothing more is read.
        self.fault: Problem | None = None
        #: Whether a head has begun and not ended.
        self.in_head = False
        self._ended = False
        #: Bytes that came since the body's last: chunk sizes, extensions, trailers.
        self._framing_bytes = 0
        #: Bytes of pieces in which a head had not ended, and of the head's headers themselves.
        self._head_bytes = 0
        self._lines_bytes = 0
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._environ: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Take what was received. What it amounts to is in `ready`, `current` and `fault` afterwards."""
        if self._ended:
            return
        body, size = self.current, 0 if self.current is None else self.current.size
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The offer is declined by not taking it up (RFC 9110 section 7.8); llhttp reads no further.
            self._ended = True
            if self.ready and self.fault is None:
                self.ready[-1].keep_alive = False
        except httptools.HttpParserError:
            # What follows a request that ends the connection is of no interest.
            self._fail(usual(400))
        if body is not None and body is self.current and body.size == size:
            # The parser keeps what has no end yet: without a bound a trailer could grow for as long as a body may take.
            self._framing_bytes += len(data)
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._fail(usual(431))
        else:
            self._framing_bytes = 0
        if self.in_head and self.fault is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(usual(431))
        if self.fault is not None:
            self._ended = True
            self.current = None
            if self.ready and not self.ready[-1].keep_alive:
                self.fault = None

    def on_message_begin(self) -> None:
        self.in_head = True
        self._head_bytes = self._lines_bytes = 0
        self._target = b""
        self._headers = []
        self._environ = dict(self._base)

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        if len(self._target) > MAX_TARGET_BYTES:
            self._fail(usual(414))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            # A trailer. Nothing here has a use for one (RFC 9110 section 6.5.1).
            return
        known = _NAMES.get(name) or _name_of(name)
        text = value.decode("latin-1").strip(" \t")
        self._headers.append((known[0], text))
        self._lines_bytes += len(name) + len(value)
        if len(self._headers) > MAX_HEADERS or self._lines_bytes > MAX_HEAD_BYTES:
            self._fail(usual(431))
            return
        key = known[1]
        if key is not None:
            environ = self._environ
            # Lines of one name are one list (RFC 9110 section 5.3). Of those that are none the views refuse the sum, by
            # its space if by nothing else.
            environ[key] = f"{environ[key]}, {text}" if key in environ else text

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self.fault is not None:
            return
        environ = self._environ
        coding = environ.get("HTTP_TRANSFER_ENCODING")
        environ["REQUEST_METHOD"] = self._parser.get_method().decode("ascii")
        path, _, query = _origin_form(self._target).partition(b"?")
        host = environ.get("HTTP_HOST")
        old = self._parser.get_http_version() == "1.0"
        if not path or (coding is not None and coding.lower() != "chunked") or (host is None and not old):
            self._fail(usual(400))
            return
        if host is not None and "," in host:
            self._fail(usual(400))
            return
        environ["PATH_INFO"] = (unquote_to_bytes(path) if b"%" in path else path).decode("latin-1")
        environ["QUERY_STRING"] = query.decode("latin-1")
        environ[HEADERS] = self._headers
        if old:
            environ["SERVER_PROTOCOL"] = "HTTP/1.0"
        self.current = Incoming(
            environ,
            declared=int(environ.get("CONTENT_LENGTH") or 0),
            chunked=coding is not None,
            keep_alive=not old and self._parser.should_keep_alive(),
        )

    def on_body(self, piece: bytes) -> None:
        if self.current is not None:
            self.current.pieces.append(piece)
            self.current.size += len(piece)

    def on_message_complete(self) -> None:
        if self.current is not None:
            self.current.whole = True
            self.ready.append(self.current)
            self.current = None

    def _fail(self, problem: Problem) -> None:
        if self.fault is None:
            self.fault = problem


def render(status: str, headers: Iterable[tuple[str, str]], body: bytes, *, date: str, close: bool) -> bytes:
    """Make an answer's bytes. `headers` name the body's length; a `status` is a code and its phrase."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    if close:
        lines.append("Connection: close\r\n")
    return f"HTTP/1.1 {status}\r\nDate: {date}\r\n{''.join(lines)}\r\n".encode("latin-1") + body


def status_line(code: int) -> str:
    """Return a status as `render` takes it."""
    return f"{code} {HTTPStatus(code).phrase}"


#: From a header's name as it came to its spelling as text, and its name in an environment.
_NAMES: dict[bytes, tuple[str, str | None]] = {}


def _name_of(name: bytes) -> tuple[str, str | None]:
    text = name.decode("latin-1")
    key: str | None = text.upper().replace("-", "_")
    if "_" in text:
        # In an environment it would pass for the header with a hyphen, which a proxy may have vouched for.
        key = None
    elif key not in {"CONTENT_TYPE", "CONTENT_LENGTH"}:
        key = f"HTTP_{key}"
    if len(_NAMES) >= _MOST_NAMES:
        _NAMES.clear()
    _NAMES[name] = (text, key)
    return text, key


def _origin_form(target: bytes) -> bytes:
    """Return path and query of a request's target (RFC 9112 section 3.2); empty where it has none."""
    if target[:1] == b"/" or target == b"*":
        return target
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in {b"http", b"https"}:
        return b""
    _, slash, path = rest.partition(b"/")
    return slash + path if slash else b"/"
