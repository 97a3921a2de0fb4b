"""Requests as bytes on the wire: found in a buffer, framed, and kept exactly as they came."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from relay.core.errors import InvalidInput

MAX_HEAD_BYTES = 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_CHUNK_LINE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The request line and header block, and what the receiver needs to know of them.

    `raw` is exact, without the blank line. Where a header comes twice the first value counts.
    """

    raw: bytes
    method: str
    target: str
    path: str
    query: str
    keep_alive: bool
    length: int
    chunked: bool
    expects_continue: bool
    has_cookie: bool
    delivery_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request on connection number `connection`, its `nth` there (from 1).

    While `complete` is false the body has not fully arrived and `body` holds what has.
    """

    head: Head
    connection: int
    nth: int
    body: bytes
    complete: bool

    @property
    def route(self) -> str:
        """The first segment of the path: `/ok/17` is served as `/ok`, so that tests can tell endpoints apart."""
        cut = self.head.path.find("/", 1)
        return self.head.path if cut < 0 else self.head.path[:cut]

    def text(self, name: str, default: str) -> str:
        """The query parameter `name`, percent-decoded; the last one wins."""
        return self.optional_text(name) or default

    def optional_text(self, name: str) -> str | None:
        """As `text`, None where it is absent or empty."""
        query = self.head.query
        return dict(parse_qsl(query, encoding="latin-1")).get(name) if name in query else None

    def number(self, name: str, default: float, *, least: float = 0, most: float = 1e9) -> float:
        """The query parameter `name` as a number; raises InvalidInput if it is not one or out of bounds."""
        given = self.optional_text(name)
        if given is None:
            return default
        try:
            value = float(given)
        except ValueError:
            raise InvalidInput(f"{name} is not a number", field=name) from None
        if not least <= value <= most:
            raise InvalidInput(f"{name} is not between {least:g} and {most:g}", field=name)
        return value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """The query parameter `name` as one of `choices`; raises InvalidInput if it is none of them."""
        value = self.text(name, default)
        if value not in choices:
            raise InvalidInput(f"{name} is not one of {', '.join(choices)}", field=name)
        return value


class ChunkedBody:
    """A body in the chunked coding (RFC 9112, section 7.1), decoded as it arrives; trailers are dropped."""

    def __init__(self) -> None:
        self.decoded = bytearray()
        self.done = False
        self._left = 0  # bytes of the current chunk, with its CRLF, still to come
        self._in_trailers = False

    def feed(self, buffer: bytearray) -> None:
        """Take from `buffer` all that belongs to this body; raises InvalidInput on a broken chunk."""
        while not self.done:
            if self._left:
                part = buffer[: self._left]
                del buffer[: len(part)]
                data_left = self._left - 2
                self.decoded += part[: max(data_left, 0)]
                self._left -= len(part)
                if self._left:
                    return
                if len(self.decoded) > MAX_BODY_BYTES:
                    raise InvalidInput("the body is too large", code="too_large")
                continue
            cut = buffer.find(b"\r\n")
            if cut < 0 and len(buffer) <= _MAX_CHUNK_LINE_BYTES:
                return
            if cut < 0:
                raise InvalidInput("a chunk's first line does not end")
            line = bytes(buffer[:cut])
            del buffer[: cut + 2]
            if self._in_trailers:
                self.done = not line
            else:
                self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> None:
        try:
            size = int(line.partition(b";")[0].strip(), 16)
        except ValueError:
            raise InvalidInput("a chunk's size is not a number") from None
        if not 0 <= size <= MAX_BODY_BYTES:
            raise InvalidInput("the body is too large", code="too_large")
        self._left = size + 2 if size else 0
        self._in_trailers = not size


def take_head(buffer: bytearray) -> Head | None:
    """Cut a request's head from the front of `buffer`; None while it has not fully arrived.

    Raises InvalidInput where the head is too large or unreadable; `buffer` is then of no further use.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0 and len(buffer) <= MAX_HEAD_BYTES:
        return None
    if end < 0:
        raise InvalidInput("the request's head is too large", code="too_large")
    raw = bytes(buffer[:end])
    del buffer[: end + 4]
    return _parse(raw)


def header_pairs(raw: bytes) -> list[tuple[str, str]]:
    """The header lines of a head in their order, names as they came, values without the blanks around them."""
    pairs = []
    for line in raw.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        pairs.append((name, value.strip(" \t")))
    return pairs


def _parse(raw: bytes) -> Head:
    end = raw.find(b"\r\n")
    words = (raw if end < 0 else raw[:end]).decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise InvalidInput("the request line is not one of HTTP/1.1")
    method, target, version = words
    path, _, query = _origin_form(target).partition("?")
    lowered = raw.lower()
    connection = (_field(raw, lowered, b"connection") or b"").lower()
    delivery_id = _field(raw, lowered, b"relay-delivery-id") or _field(raw, lowered, b"webhook-id")
    length = _field(raw, lowered, b"content-length")
    return Head(
        raw=raw,
        method=method,
        target=target,
        path=path,
        query=query,
        keep_alive=b"close" not in connection and (version != "HTTP/1.0" or b"keep-alive" in connection),
        length=0 if length is None else _content_length(length),
        chunked=b"chunked" in (_field(raw, lowered, b"transfer-encoding") or b"").lower(),
        expects_continue=(_field(raw, lowered, b"expect") or b"").lower() == b"100-continue",
        has_cookie=b"\r\ncookie:" in lowered,
        delivery_id=None if delivery_id is None else delivery_id.decode("latin-1"),
    )


def _field(raw: bytes, lowered: bytes, name: bytes) -> bytes | None:
    """The first value of a header. A search, since a dict of all of them costs more than the rest of a request."""
    start = lowered.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = raw.find(b"\r\n", start)
    return raw[start:].strip(b" \t") if end < 0 else raw[start:end].strip(b" \t")


def _origin_form(target: str) -> str:
    """`/path?query`, also where the target has the absolute form that is sent to a proxy."""
    if not target.lower().startswith("http://"):
        return target
    slash = target.find("/", len("http://"))
    return "/" if slash < 0 else target[slash:]


def _content_length(value: bytes) -> int:
    if not value.isdigit():
        raise InvalidInput("Content-Length is not a number", field="Content-Length")
    if len(value) > len(str(MAX_BODY_BYTES)) or int(value) > MAX_BODY_BYTES:
        raise InvalidInput("the body is too large", field="Content-Length", code="too_large")
    return int(value)
