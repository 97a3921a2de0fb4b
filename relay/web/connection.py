"""What the server knows of one connection."""

from __future__ import annotations

import threading
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from relay.web.http1 import Reader
from relay.web.lanes import Ticket

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping


class Phase(Enum):
    """What is waited for from the client."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    #: The last answer is out: only that the client closes.
    LINGERING = auto()


class Connection:
    """The state of one connection. The reading thread owns it, but for an answering thread while it is `busy`."""

    __slots__ = (
        "ahead",
        "busy",
        "closing",
        "dropped",
        "ended",
        "limit",
        "lock",
        "out",
        "phase",
        "reader",
        "since",
        "sock",
        "ticket",
        "watched",
    )

    def __init__(self, sock: socket.socket, base: Mapping[str, Any]) -> None:
        """`base` is what the environments of its requests begin with."""
        self.sock = sock
        self.reader = Reader(base)
        #: Held to change `busy` together with what decides over it.
        self.lock = threading.Lock()
        #: Whether a request waits for its answer, or the answer to be written.
        self.busy = False
        #: The right to answer it.
        self.ticket = Ticket()
        self.phase = Phase.IDLE
        #: When the phase, or being busy, began, or the last piece of an answer was written (monotonic).
        self.since = time.monotonic()
        #: What is waited for, as selectors have it; 0 for nothing.
        self.watched = 0
        #: The most bytes that the coming body may have, once the application has asked for it.
        self.limit: int | None = None
        #: Reads since the connection became busy.
        self.ahead = 0
        #: Whether the client sends no more.
        self.ended = False
        #: What is still to be written, and whether the connection ends after it.
        self.out = b""
        self.closing = False
        #: Bytes dropped while lingering.
        self.dropped = 0

    def enter(self, phase: Phase, *, anew: bool = False) -> None:
        """Note the phase; its time begins where it is another one, or `anew`."""
        if anew or phase is not self.phase:
            self.phase = phase
            self.since = time.monotonic()
