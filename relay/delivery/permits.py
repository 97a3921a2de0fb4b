"""Bulkheads inside one process: how many sends are under way, in all, by endpoint and by workspace.

`Room` is the global cap and blocks: whoever reads hints reserves room first. `Slots` are the
caps by endpoint and workspace and never block: no slot means a deferral. Both count; neither
knows what a send is. Every reservation comes back exactly once, whatever raises.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

#: Seconds a deferral for want of a slot lasts while few of its endpoint wait, and once many do.
SHORT_WAIT_SECS = 0.25
LONG_WAIT_SECS = 60.0
#: Waiting rows for each slot at which the long wait is reached.
MANY_PER_SLOT = 20
#: Those that wait come back by so much sooner than their turn should be: better that a few wait again than that slots
#: stand idle.
HASTE = 1.5
#: Seconds over which it is counted how many sends of an endpoint end, and after which that count is out of date.
COUNT_SECS = 0.25
STALE_SECS = 4.0


class Room:
    """The global cap: `size` sends at once in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._wanted = 1
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """How much is reserved at this moment."""
        return self.size - self._free

    def reserve(self, want: int, *, timeout: float, patience: float = 0.05) -> int:
        """Reserve up to `want`; return how much, 0 when none came free within `timeout` seconds.

        Once some is free, waits up to `patience` seconds for all of it: a small batch costs as much as a large one, and
        what else is in flight keeps the sender busy meanwhile. One thread at a time may wait here.
        """
        with self._changed:
            if self._free < want and not self._wait_for(1, timeout):
                return 0
            self._wait_for(want, patience)
            got = min(want, self._free)
            self._free -= got
            return got

    def try_reserve(self, want: int) -> int:
        """Reserve up to `want` of what is free now; return how much."""
        with self._changed:
            got = max(0, min(want, self._free))
            self._free -= got
            return got

    def release(self, count: int) -> None:
        """Give back `count`. Raises AssertionError where more comes back than was taken: a bug that hides as speed."""
        if count <= 0:
            return
        with self._changed:
            self._free += count
            assert self._free <= self.size, "more room came back than was taken"
            if self._free >= self._wanted:
                self._changed.notify()

    def _wait_for(self, count: int, timeout: float) -> bool:
        """Wait until `count` is free; return whether it is. Woken for that alone, and not for each send that ends."""
        self._wanted = count
        return self._changed.wait_for(lambda: self._free >= count, timeout)


class Slots:
    """The caps by endpoint and by workspace, for one process."""

    def __init__(self, room: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the global cap `room`: where there are several workspaces, none takes more than half of it."""
        self._clock = clock
        self._workspace_cap = max(1, room // 2)
        self._lock = threading.Lock()
        # By the ids' numbers: a UUID's own hash and comparison are Python, and this runs for every send.
        self._by_endpoint: dict[int, int] = {}
        self._by_workspace: dict[int, int] = {}
        self._waiting: dict[int, _Waiting] = {}
        #: Whether this installation has more than one workspace; kept up to date by the process's heartbeat.
        self.several_workspaces = False

    def take(self, endpoint_id: UUID, workspace_id: UUID, *, limit: int, want: int) -> int:
        """Take up to `want` slots of the endpoint, which has `limit` of them; return how many it and its workspace had."""
        with self._lock:
            used = self._by_endpoint.get(endpoint_id.int, 0)
            got = min(want, limit - used)
            of_workspace = self._by_workspace.get(workspace_id.int, 0)
            if self.several_workspaces:
                got = min(got, self._workspace_cap - of_workspace)
            if got <= 0:
                return 0
            self._by_endpoint[endpoint_id.int] = used + got
            self._by_workspace[workspace_id.int] = of_workspace + got
            return got

    def give_back(self, endpoint_id: UUID, workspace_id: UUID, count: int = 1) -> None:
        """Return slots. Raises AssertionError where fewer are taken."""
        if count:
            with self._lock:
                _count_down(self._by_endpoint, endpoint_id.int, count)
                _count_down(self._by_workspace, workspace_id.int, count)

    def give_back_all(self, taken: Sequence[tuple[UUID, UUID]]) -> None:
        """Return slots of sends that ended, (endpoint, workspace) each. Raises AssertionError where one is not taken."""
        with self._lock:
            for endpoint_id, workspace_id in taken:
                _count_down(self._by_endpoint, endpoint_id.int, 1)
                _count_down(self._by_workspace, workspace_id.int, 1)
                if self._waiting and (waiting := self._waiting.get(endpoint_id.int)) is not None:
                    waiting.ended += 1

    def wait_secs(self, endpoint_id: UUID, *, limit: int, random: float) -> float:
        """Return how long a delivery without a slot waits, and count it among the waiting ones until then.

        Short while few wait and a minute once many do, so that a backlog behind an endpoint that hangs costs the database
        a write a row and minute, however long it is; and no longer than until its turn, by how fast the endpoint's sends
        end of late, so that a backlog behind a fast one comes back sooner. `random` in [0, 1) spreads the returns.
        """
        with self._lock:
            now = self._clock()
            waiting = self._waiting.get(endpoint_id.int)
            if waiting is None:
                waiting = self._waiting[endpoint_id.int] = _Waiting(now)
            count = waiting.count(now)
            share = min(1.0, count / (MANY_PER_SLOT * limit))
            # Squared, so that a few that wait come back before the slots stand idle.
            wait = SHORT_WAIT_SECS + share * share * (LONG_WAIT_SECS - SHORT_WAIT_SECS)
            per_sec = waiting.ended_per_sec(now)
            if per_sec is None:
                # Not known yet: as if each slot came free in the time of the shortest wait.
                per_sec = limit / SHORT_WAIT_SECS
            if count < wait * per_sec * HASTE:
                wait = max(SHORT_WAIT_SECS, count / (per_sec * HASTE))
            # Lengthened only: at the long wait a row comes back no sooner than a minute.
            wait *= 1.0 + random / 2
            waiting.add(now, wait)
            return wait

    def in_use(self) -> int:
        """Return how many slots are taken: 0 at rest."""
        with self._lock:
            return sum(self._by_endpoint.values())

    def forget_idle(self) -> None:
        """Drop the waiting counts of endpoints for which nobody waits any more."""
        with self._lock:
            now = self._clock()
            for endpoint_id in [key for key, waiting in self._waiting.items() if waiting.count(now) == 0]:
                del self._waiting[endpoint_id]


class _Waiting:
    """What is known of one endpoint for which deliveries wait.

    How many deferrals have not come back yet, to the second: a count by the second they end in. And how many sends end.
    """

    __slots__ = ("_ends", "_per_sec", "_since", "_total", "ended")

    def __init__(self, now: float) -> None:
        self._ends: dict[int, int] = {}
        self._total = 0
        #: Sends that have ended since `_since`.
        self.ended = 0
        self._since = now
        self._per_sec: float | None = None

    def ended_per_sec(self, now: float) -> float | None:
        """Return how many sends ended in a second of late; None where too little time has passed to say, or too much."""
        took = now - self._since
        if took >= COUNT_SECS:
            # A count over a long time is one over a time in which nobody waited, and says nothing.
            self._per_sec = self.ended / took if took < STALE_SECS else None
            self.ended, self._since = 0, now
        return self._per_sec

    def add(self, now: float, wait: float) -> None:
        end = int(now + wait) + 1
        self._ends[end] = self._ends.get(end, 0) + 1
        self._total += 1

    def count(self, now: float) -> int:
        if self._ends and min(self._ends) <= now:
            for end in [end for end in self._ends if end <= now]:
                self._total -= self._ends.pop(end)
        return self._total


def _count_down(counts: dict[int, int], key: int, count: int) -> None:
    left = counts.get(key, 0) - count
    assert left >= 0, "a slot came back that nobody had taken"
    if left:
        counts[key] = left
    else:
        del counts[key]
