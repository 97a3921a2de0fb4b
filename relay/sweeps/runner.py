"""What sweeps share: one at a time in the fleet, and no oftener than half their interval.

So two beats, ticks that piled up and workers standing in for beat do no harm.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from relay.store.locks import advisory_lock, finish_sweep, start_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

log = logging.getLogger(__name__)


class Sweep(Protocol):
    """A sweep: its name, how often it runs, and one run of it."""

    @property
    def name(self) -> str:
        """What its lock and its row are called."""

    @property
    def interval_secs(self) -> float:
        """Seconds between two runs."""

    def run_once(self, *, since_last: float) -> Mapping[str, int]:
        """Do the work; return counts for the log. `since_last` is the seconds since it last started (infinite: never)."""


class Shared:
    """Marks a sweep whose work is shared out by leases of its own: workers run it side by side, without a lock."""

    __slots__ = ()


def run_sweep(engine: sa.Engine, sweep: Sweep, *, overdue_secs: float | None = None) -> Mapping[str, int] | None:
    """Run `sweep` once, under its lock; return its counts, or None where another runs it or it just ran.

    With `overdue_secs` it counts as run just now where it began less than so long ago: for those who stand in for beat,
    and shall do nothing while beat ticks. A sweep that is `Shared` runs in any case.
    """
    if isinstance(sweep, Shared):
        return _told(sweep, sweep.run_once(since_last=sweep.interval_secs))
    with advisory_lock(engine, f"sweep:{sweep.name}") as connection:
        if connection is None:
            return None
        interval = sweep.interval_secs if overdue_secs is None else 2 * overdue_secs
        since_last = start_sweep(connection, sweep.name, interval_secs=interval)
        if since_last is None:
            return None
        counts = sweep.run_once(since_last=since_last)
        finish_sweep(connection, sweep.name, counts)
    return _told(sweep, counts)


def _told(sweep: Sweep, counts: Mapping[str, int]) -> Mapping[str, int]:
    """Put the counts into the log, where there is something to tell."""
    if any(counts.values()):
        log.info("sweep", extra={"sweep": sweep.name, **counts})
    return counts
