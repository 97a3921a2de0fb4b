"""Adds up what deliveries came to, by endpoint and minute, and writes it every few seconds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from uuid import UUID

from relay.core.model import AttemptClass
from relay.store import endpoint_minutes
from relay.store.endpoint_minutes import MinuteCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        #: By endpoint (the number within its id) and minute: the four counts, and when the last success and failure came.
        self._counts: dict[tuple[int, int], tuple[list[int], list[float | None]]] = {}
        self._next_write = time.monotonic() + WRITE_SECS

    def add(self, cls: AttemptClass, counts: Mapping[int, int], *, at: float) -> None:
        """Count results of a class by endpoint, each given as the number within its id; `at` is Unix seconds."""
        place, minute = _PLACE[cls], int(at // 60)
        with self._lock:
            for endpoint, count in counts.items():
                known = self._counts.get((endpoint, minute))
                if known is None:
                    known = self._counts[endpoint, minute] = ([0, 0, 0, 0], [None, None])
                known[0][place] += count
                if place != _DEFERRED:
                    known[1][place != _SUCCESS] = at

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
                    MinuteCounts(UUID(int=endpoint), minute, *counts, *last)
                    for (endpoint, minute), (counts, last) in sorted(counted.items())
                ],
            )
