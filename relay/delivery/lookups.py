"""Requests that wait for a name, and for how long they may."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.delivery.request import SendRequest


class Waiting:
    """One request that waits. Its wait is part of its attempt, and of the time that it has to connect."""

    __slots__ = ("ends_at", "is_over", "request", "since")

    def __init__(self, request: SendRequest, since: float) -> None:
        self.request = request
        #: `time.monotonic()` of its start, and of its end at the latest.
        self.since = since
        self.ends_at = since + min(request.connect_timeout_ms, request.timeout_ms) / 1000
        self.is_over = False

    def __lt__(self, other: Waiting) -> bool:
        return self.ends_at < other.ends_at


class Lookups:
    """The requests that wait, by name and by their ends."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Waiting]] = {}
        #: By `ends_at`; those that are over already are passed over.
        self._by_end: list[Waiting] = []

    @property
    def next_end(self) -> float:
        """When the next one has to be looked at; infinity where none waits."""
        return self._by_end[0].ends_at if self._by_end else math.inf

    def add(self, request: SendRequest, name: str, since: float) -> None:
        """Have a request wait for a name; it began at `since`."""
        waiting = Waiting(request, since)
        self._by_name.setdefault(name, []).append(waiting)
        heapq.heappush(self._by_end, waiting)

    def arrived(self, name: str) -> list[Waiting]:
        """Take out those that wait for a name."""
        return self._take(self._by_name.pop(name, []))

    def late(self, now: float) -> list[Waiting]:
        """Take out those whose time is over. Their name is still looked up, for the next ones."""
        over: list[Waiting] = []
        while self._by_end and self._by_end[0].ends_at <= now:
            over.append(heapq.heappop(self._by_end))
        return self._take(over)

    def take_all(self) -> list[Waiting]:
        """Take out all that wait."""
        everything, self._by_end = self._by_end, []
        self._by_name.clear()
        return self._take(everything)

    @staticmethod
    def _take(some: list[Waiting]) -> list[Waiting]:
        taken = [waiting for waiting in some if not waiting.is_over]
        for waiting in taken:
            waiting.is_over = True
        return taken
