"""Move an endpoint's waiting rows, in batches: forward when it is back, to their end when it is gone.

Brought forward, they come back one after the other at the endpoint's rate, and new rows queue behind them: recovery is
no stampede.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay import metrics
from relay.core.model import DeadReason, Status
from relay.store import buckets, wakes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.store.wakes import Wake as Request

log = logging.getLogger(__name__)

#: Requests taken up in one run.
REQUESTS = 100
#: Rows of one endpoint that are brought forward; the times of those behind them stay as they are.
MOST_ROWS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Carries out what `relay.store.wakes` was asked for."""

    hot: sa.Engine
    name: str = "wake"
    #: Much shorter than beat's: a worker that closed a breaker, or sees that it is wanted, runs it at once.
    interval_secs: float = 0.2
    batch: int = 500

    def is_wanted(self) -> bool:
        """Say whether anything is asked for."""
        with self.hot.connect() as connection:
            return wakes.any_asked(connection)

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Carry out what is asked for; a request that finds rows locked stays for the next run."""
        counts = {"brought_forward": 0, "ended": 0}
        with self.hot.connect() as connection:
            for request in wakes.asked(connection, limit=REQUESTS):
                if request.ends_as is not None:
                    counts["ended"] += self._end(connection, request)
                    if wakes.is_pending(connection, request):
                        continue
                elif request.active:
                    counts["brought_forward"] += self._bring_forward(connection, request)
                wakes.done(connection, request)
        return counts

    def _bring_forward(self, connection: sa.Connection, request: Request) -> int:
        ids = wakes.waiting_ids(connection, request, limit=MOST_ROWS)
        if not ids:
            return 0
        gap = 1.0 / request.rate_per_second
        # First of all, so that rows that come meanwhile queue behind.
        last = request.from_s + (len(ids) - 1) * gap
        buckets.queue_until(connection, request.endpoint_id, secs=last, generation=request.breaker_generation)
        moved = 0
        for start in range(0, len(ids), self.batch):
            batch = ids[start : start + self.batch]
            waits = [request.from_s + place * gap for place in range(start, start + len(batch))]
            moved += wakes.move(connection, batch, waits)
        return moved

    def _end(self, connection: sa.Connection, request: Request) -> int:
        ended = 0
        while count := wakes.end(connection, request, limit=self.batch):
            ended += count
        if request.ends_as is Status.DEAD:
            metrics.dead(DeadReason.ENDPOINT_DELETED, ended)
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleepers:
    """Looks after paused rows that nothing else comes upon.

    Those that an enable did not reach, as their pause was written after it; and those of disabled endpoints whose time
    is over.
    """

    engine: sa.Engine
    hot: sa.Engine
    name: str = "sleepers"
    interval_secs: float = 60.0
    batch: int = 500

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Ask to bring forward the paused rows of enabled endpoints; make expired ones due, for a claim to end them."""
        with self.engine.begin() as connection:
            found = wakes.sleepers(connection, limit=REQUESTS)
            for endpoint_id in found:
                wakes.ask_to_bring_forward(connection, endpoint_id)
        expired = 0
        with self.hot.connect() as connection:
            while count := wakes.ripen_expired(connection, limit=self.batch):
                expired += count
        return {"asked": len(found), "expired": expired}
