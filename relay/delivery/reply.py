"""Reads one reply as libcurl hands it over, line by line and piece by piece, within its bounds.

libcurl calls an answer what is none: a header block cut short, a status line of four digits. Here
only the blank line of a final header block makes an answer (B-40).
"""

from __future__ import annotations

import functools
import re
import time

from relay.core.observation import Fault

#: Bytes of header in all: interim blocks, the final one and trailers (B-84).
HEADER_BYTES = 32 * 1024
#: Bytes up to which a header line is worth remembering in its parsed form.
KNOWN_LINE_BYTES = 128

NOT_HTTP_TEXT = "the answer is not HTTP/1.1"

#: RFC 9112 section 4, and stricter than libcurl, which takes `http/1.1`, `200OK` and four digits.
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)(?:[ \r\n]|$)")


class Reply:
    """The state of one reply since `reset()`.

    `on_header` and `on_body` are libcurl's callbacks: None takes what was given, 0 breaks the transfer
    off. They never raise. They run for every line of every reply, so they are written to be short.
    """

    __slots__ = (
        "_lines",
        "_max_body_bytes",
        "_snippet_bytes",
        "begun_at",
        "body_bytes",
        "complete",
        "fault",
        "fault_text",
        "header_bytes",
        "snippet",
        "status",
    )

    #: When its first line was read (`time.monotonic()`); 0 before.
    begun_at: float
    complete: bool
    #: Of the block that is being read; None between blocks. An answer's only once `complete`.
    status: int | None
    header_bytes: int
    body_bytes: int
    snippet: bytes
    #: Why it was broken off before it was complete.
    fault: Fault | None
    fault_text: str

    def __init__(self, *, max_body_bytes: int, snippet_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._snippet_bytes = snippet_bytes
        self.reset()

    def reset(self) -> None:
        """Let go of the last reply, and be ready for the next."""
        self.begun_at = 0.0
        self.complete = False
        self.status = None
        self.header_bytes = 0
        self.body_bytes = 0
        self.snippet = b""
        self.fault = None
        self.fault_text = ""
        self._lines: list[bytes] = []

    def headers(self) -> list[tuple[str, str]]:
        """The final block's lines: names lower-cased, values trimmed and decoded as latin-1, which cannot fail."""
        return [_known_header(line) if len(line) <= KNOWN_LINE_BYTES else _header(line) for line in self._lines]

    def on_header(self, line: bytes) -> int | None:
        """Take one line: of an interim block, the final one, or the trailers, which are counted and not kept."""
        self.header_bytes = size = self.header_bytes + len(line)
        if size > HEADER_BYTES:
            return self._break_off(Fault.PROTOCOL, f"the reply's header is over {HEADER_BYTES} bytes")
        status = self.status
        if status is None:
            return self._on_status_line(line)
        if self.complete:
            return None
        if line != b"\r\n" and line != b"\n":  # noqa: PLR1714  two comparisons are quicker than a tuple
            self._lines.append(line)
        elif status >= 200:
            self.complete = True
        else:
            self.status = None
            self._lines.clear()
        return None

    def on_body(self, data: bytes) -> int | None:
        """Take a piece of the body, up to the cap; or of an answer that has no status line, which libcurl calls one."""
        if not self.complete:
            return self._on_no_http(data)
        room = self._snippet_bytes - len(self.snippet)
        if room > 0:
            self.snippet += data[:room]
        self.body_bytes = size = self.body_bytes + len(data)
        return 0 if size > self._max_body_bytes else None

    def _on_status_line(self, line: bytes) -> int | None:
        if not self.begun_at:
            self.begun_at = time.monotonic()
        self.status = status = _known_status(line)
        if status is None:
            return self._break_off(Fault.PROTOCOL, "the status line is not that of HTTP/1.x")
        if status == 101:
            return self._break_off(Fault.UPGRADE, "the receiver switches protocols (101)")
        return None

    def _on_no_http(self, data: bytes) -> int:
        if not self.begun_at:
            self.begun_at = time.monotonic()
        # Counted and not kept: whatever speaks there was not meant to be read by the endpoint's owner.
        self.body_bytes += len(data)
        return self._break_off(Fault.PROTOCOL, NOT_HTTP_TEXT)

    def _break_off(self, fault: Fault, text: str) -> int:
        if not self.complete:
            self.fault, self.fault_text = fault, text
        return 0


def _header(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode("latin-1").partition(":")
    return name.lower(), value.strip(" \t\r\n")


def _status(line: bytes) -> int | None:
    """Return the status that a status line gives, None where it is not one of HTTP/1.x."""
    match = _STATUS_LINE.match(line)
    return None if match is None else int(match[1])


def _known_status(line: bytes) -> int | None:
    return _short_status(line) if len(line) <= KNOWN_LINE_BYTES else _status(line)


#: Most lines of most replies have been seen before.
_known_header = functools.lru_cache(maxsize=512)(_header)
_short_status = functools.lru_cache(maxsize=64)(_status)
