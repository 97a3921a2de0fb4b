"""The producers' own process: an open loop of POSTs, so that waiting counts against whoever lets them wait.

Arrivals keep their times: what cannot be sent at its time, because every connection is busy, is sent as soon as one is
free, and its latency runs from the time that it should have been sent at. With a rate of 0 the loop is closed: each
connection sends its next request when it has its answer. `relay.loadtest.load` runs this as a file; it shares the cores
with what is measured, hence raw sockets, one epoll, and the standard library alone.
"""

from __future__ import annotations

import collections
import json
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Final

_READ_BYTES: Final = 64 * 1024
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
#: Seconds after the last arrival that answers are waited for.
_LINGER_SECS: Final = 15.0


@dataclass(slots=True)
class Plan:
    """What to send."""

    host: str
    port: int
    #: The whole request, the same each time.
    request: bytes
    connections: int
    seconds: float
    #: Requests a second in all; 0 for as fast as they are answered.
    rate: float


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    #: Seconds from the time that a request was due to its answer.
    latencies: list[float] = field(default_factory=list)
    broken: int = 0
    unsent: int = 0
    seconds: float = 0.0


class _Line:
    """One kept connection."""

    __slots__ = ("due", "got", "socket")

    def __init__(self, plan: Plan) -> None:
        self.socket = socket.create_connection((plan.host, plan.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(0.0)
        self.got = b""
        #: When the request under way was due; None while idle.
        self.due: float | None = None


def run(plan: Plan) -> Outcome:
    """Send by the plan; return what was answered."""
    outcome = Outcome()
    epoll = select.epoll()
    lines: dict[int, _Line] = {}

    def open_line() -> _Line:
        line = _Line(plan)
        lines[line.socket.fileno()] = line
        epoll.register(line.socket.fileno(), select.EPOLLIN)
        return line

    def replace(line: _Line) -> None:
        # Closed at the other end: while it was used, which was counted, or while it lay idle, as servers may do.
        epoll.unregister(line.socket.fileno())
        del lines[line.socket.fileno()]
        line.socket.close()
        if line in idle:
            idle.remove(line)
        idle.append(open_line())

    idle = [open_line() for _ in range(plan.connections)]
    began = time.monotonic()
    ends = began + plan.seconds
    gap = 1.0 / plan.rate if plan.rate else 0.0
    due = began
    while True:
        now = time.monotonic()
        while idle and due <= now and due < ends and (gap or now < ends):
            line = idle.pop()
            line.due = due if gap else now
            due += gap
            try:
                # A request of a few hundred bytes fits into the buffer of a connection whose last answer came.
                line.socket.sendall(plan.request)
            except OSError:
                outcome.broken += 1
                replace(line)
        busy = len(lines) - len(idle)
        over = now >= ends and (not gap or due >= ends)
        if (over and not busy) or now > ends + _LINGER_SECS:
            outcome.unsent += busy + (round((ends - due) / gap) if gap and due < ends else 0)
            break
        wait = _LINGER_SECS if over or not idle else max(0.0, due - now)
        for descriptor, _ in epoll.poll(wait, 256):
            line = lines[descriptor]
            if _read(line, outcome):
                idle.append(line)
            elif line.due is None:
                replace(line)
    outcome.seconds = time.monotonic() - began
    for line in lines.values():
        line.socket.close()
    return outcome


def _read(line: _Line, outcome: Outcome) -> bool:
    """Take what came; return whether the answer is whole. A connection that broke has no `due` any more."""
    try:
        data = line.socket.recv(_READ_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        data = b""
    if not data:
        if line.due is not None:
            outcome.broken += 1
        line.due = None
        return False
    line.got += data
    end = line.got.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = _LENGTH.search(line.got, 0, end)
    if len(line.got) < end + 4 + (int(length[1]) if length else 0):
        return False
    status = _STATUS.match(line.got)
    outcome.statuses[int(status[1]) if status else 0] += 1
    if line.due is not None:
        outcome.latencies.append(time.monotonic() - line.due)
    line.got, line.due = b"", None
    return True


def main() -> None:
    """Read a plan as JSON from standard input, and write what came of it to standard output."""
    given = json.load(sys.stdin)
    given["request"] = given["request"].encode("latin-1")
    outcome = run(Plan(**given))
    json.dump(
        {
            "statuses": {str(status): count for status, count in outcome.statuses.items()},
            "latencies": [round(secs, 5) for secs in outcome.latencies],
            "broken": outcome.broken,
            "unsent": outcome.unsent,
            "seconds": outcome.seconds,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
