"""Carry out replays of many deliveries, a batch at a time, as many jobs at once as there are workers.

A job is a row with a lease: see `relay.store.replay_steps`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relay.store import replay_steps
from relay.sweeps.runner import Shared

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.store.replay_steps import Held

log = logging.getLogger(__name__)

#: Seconds that a worker's lease on a job lasts from each batch on. A batch takes a fraction of one; the statement's and
#: the lock's time-outs (15 s, 5 s) end before it.
LEASE_SECS = 30.0
#: Seconds of one run, after which its thread is free for other work, and of one job in it, as others may wait.
RUN_SECS = 5.0
JOB_SECS = 1.0
#: Seconds between two batches, at most: as long as the batch itself took, so that half of the time is others'.
MOST_PAUSE_SECS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Shared):
    """Works on the replays that nobody else works on."""

    engine: sa.Engine
    #: How often one delivery may be replayed.
    max_replays: int
    name: str = "replay"
    #: Of beat's ticks, for when workers cannot look themselves.
    interval_secs: float = 15.0
    batch: int = 500
    _running: threading.Lock = field(default_factory=threading.Lock)

    def is_wanted(self) -> bool:
        """Say whether there is a job that nobody works on."""
        with self.engine.connect() as connection:
            return replay_steps.any_free(connection)

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Work for a while at the jobs that are free; nothing where this process does so already."""
        if not self._running.acquire(blocking=False):
            return {"replayed": 0}
        try:
            return {"replayed": self._run(time.monotonic() + RUN_SECS)}
        finally:
            self._running.release()

    def _run(self, deadline: float) -> int:
        replayed = 0
        while time.monotonic() < deadline:
            with self.engine.begin() as connection:
                held = replay_steps.take(connection, lease_secs=LEASE_SECS)
            if held is None:
                break
            replayed += self._work(held, min(deadline, time.monotonic() + JOB_SECS))
        return replayed

    def _work(self, held: Held, deadline: float) -> int:
        """Work at one job until it is done, stopped, or `deadline` is over; return how many rows went back."""
        replayed = 0
        current: Held | None = held
        while current is not None:
            started = time.monotonic()
            with self.engine.begin() as connection:
                step = replay_steps.step(
                    connection, current, batch=self.batch, max_replays=self.max_replays, lease_secs=LEASE_SECS
                )
            replayed += step.replayed
            current = step.held
            now = time.monotonic()
            if current is not None and now >= deadline:
                with self.engine.begin() as connection:
                    replay_steps.release(connection, current)
                break
            if current is not None:
                time.sleep(min(now - started, MOST_PAUSE_SECS))
        return replayed
