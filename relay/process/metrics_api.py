"""The API's own figures, added up over its processes in memory that they share.

Each serving process has a row of plain numbers in one array, made before any of them starts, and is the only one to
write to it. A scrape reads all rows, whichever process answers it. A process that replaces another takes its row over
and counts on: counters survive it, and nothing grows.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Final

from relay import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import sqlalchemy as sa
    from prometheus_client.core import Metric

_STATUSES: Final = metrics.HTTP_REQUESTS.values
_POOLS: Final = metrics.DB_IN_USE.values
# Where each number stands in a row.
_BUCKETS: Final = 0
_SUM: Final = _BUCKETS + len(metrics.INGEST_BOUNDS) + 1
_STATUS: Final = _SUM + 1
_ACCEPTED: Final = _STATUS + len(_STATUSES)
_SERVES: Final = _ACCEPTED + 1
_IN_USE: Final = _SERVES + 1
_LIMIT: Final = _IN_USE + len(_POOLS)
_WIDTH: Final = _LIMIT + len(_POOLS)
#: Seconds between two looks at the pools while requests come.
_POOLS_SECS: Final = 0.25


def shared(processes: int) -> Any:
    """Make the memory for so many processes; hand it to each as it starts."""
    return RawArray("d", _WIDTH * processes)


class ApiFigures:
    """One process's row, and all rows for a scrape. Safe from any thread."""

    def __init__(self, memory: Any = None, row: int = 0) -> None:
        """Without `memory` the process is the only one."""
        self._memory: Any = shared(1) if memory is None else memory
        self._base = row * _WIDTH
        self._lock = threading.Lock()
        self._engines: Mapping[str, sa.Engine] = {}
        self._next_pools = 0.0
        self._memory[self._base + _SERVES] = 1.0

    def watch_pools(self, engines: Mapping[str, sa.Engine]) -> None:
        """Show how many connections of these pools are in use, by metrics.DB_IN_USE's names."""
        self._engines = engines
        for place, name in enumerate(_POOLS):
            limit = 0 if name not in engines else engines[name].pool.size()  # type: ignore[attr-defined]  # a QueuePool
            self._memory[self._base + _LIMIT + place] = limit
        self.note_pools()

    def note_pools(self) -> None:
        """Look how many connections are in use now."""
        for place, name in enumerate(_POOLS):
            if name in self._engines:
                in_use = self._engines[name].pool.checkedout()  # type: ignore[attr-defined]  # a QueuePool
                self._memory[self._base + _IN_USE + place] = in_use

    def answered(self, status: int, *, ingest_secs: float | None = None) -> None:
        """Count an answer; with `ingest_secs` one to an ingest call, which took so long."""
        memory, base = self._memory, self._base
        with self._lock:
            place = base + _STATUS + min(max(status // 100 - 2, 0), len(_STATUSES) - 1)
            memory[place] += 1.0
            if ingest_secs is not None:
                memory[base + _BUCKETS + bisect_left(metrics.INGEST_BOUNDS, ingest_secs)] += 1.0
                memory[base + _SUM] += ingest_secs
                if status < 300:
                    memory[base + _ACCEPTED] += 1.0
        now = time.monotonic()
        if now >= self._next_pools:
            self._next_pools = now + _POOLS_SECS
            self.note_pools()

    def describe(self) -> Iterator[Metric]:
        """For the registry."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        self.note_pools()
        numbers = self._memory[:]
        total = [sum(numbers[place::_WIDTH]) for place in range(_WIDTH)]
        yield metrics.histogram(metrics.INGEST_DURATION, metrics.INGEST_BOUNDS, total[_BUCKETS:_SUM], total[_SUM])
        yield metrics.HTTP_REQUESTS.counters(dict(zip(_STATUSES, total[_STATUS:_ACCEPTED], strict=True)))
        yield metrics.EVENTS_ACCEPTED.counters({"": total[_ACCEPTED]})
        yield metrics.API_PROCESSES.gauge(total[_SERVES])
        yield metrics.DB_IN_USE.gauges(dict(zip(_POOLS, total[_IN_USE:_LIMIT], strict=True)))
        yield metrics.DB_LIMIT.gauges(dict(zip(_POOLS, total[_LIMIT:], strict=True)))
