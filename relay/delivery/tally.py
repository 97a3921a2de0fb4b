"""Adds up what deliveries came to, by endpoint and minute, and writes it every few seconds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from relay.core.model import AttemptClass
from relay.store import endpoint_minutes
from relay.store.endpoint_minutes import MinuteCounts

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

#: Seconds between two writes: how late an endpoint's counts may be.
WRITE_SECS = 5.0

_SUCCESS, _RETRYABLE, _PERMANENT, _DEFERRED = range(4)
_PLACE = {
    AttemptClass.SUCCESS: _SUCCESS,
    AttemptClass.RETRYABLE_FAILURE: _RETRYABLE,
    AttemptClass.PERMANENT_FAILURE: _PERMANENT,
    AttemptClass.DEFERRED: _DEFERRED,
}


class Tally:
    """The counts of one process that are not written yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By endpoint and minute: the four counts, and when the last success and failure came.
        self._counts: dict[tuple[UUID, int], tuple[list[int], list[float | None]]] = {}
        self._next_write = time.monotonic() + WRITE_SECS

    def add(self, endpoint_id: UUID, cls: AttemptClass, *, at: float, count: int = 1) -> None:
        """Count `count` of a class; `at` is Unix seconds."""
        place = _PLACE[cls]
        with self._lock:
            counts, last = self._counts.setdefault((endpoint_id, int(at // 60)), ([0, 0, 0, 0], [None, None]))
            counts[place] += count
            if place != _DEFERRED:
                last[place != _SUCCESS] = at

    def is_due(self) -> bool:
        """Say whether there is something to write and it is time to."""
        return bool(self._counts) and time.monotonic() >= self._next_write

    def write(self, connection: sa.Connection) -> None:
        """Write what was counted. On an error it is lost: these counts are for looking at."""
        self._next_write = time.monotonic() + WRITE_SECS
        with self._lock:
            counted, self._counts = self._counts, {}
        if counted:
            endpoint_minutes.add(
                connection,
                [
                    MinuteCounts(endpoint_id, minute, *counts, *last)
                    for (endpoint_id, minute), (counts, last) in sorted(counted.items())
                ],
            )
