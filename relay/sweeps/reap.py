"""Rescue the deliveries of workers that died: leases that ran out go back to pending, the attempt spent.

The claim counted the attempt, so it is not counted again; a delivery that keeps killing its
worker runs out of attempts instead of looping.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relay import metrics
from relay.core.backoff import parse_retry
from relay.core.decision import Dead, Retry, decide
from relay.core.model import DeadReason, Status
from relay.core.outcome import WORKER_LOST
from relay.store import jobs, leases, operational, results
from relay.store.engine import transaction
from relay.store.jobs import JOB_TYPE
from relay.store.results import AttemptRow

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.store.leases import ExpiredLease
    from relay.store.operational import Notice

log = logging.getLogger(__name__)

#: After a gap of so many intervals the database was away, or beat: recorders that hold results come first.
GAP_INTERVALS = 3
#: Seconds after which a worker that gets no hints runs it in beat's place: beat's ticks come every 5 s, or not at all.
OVERDUE_SECS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reap:
    """The reaper."""

    hot: sa.Engine
    name: str = "reap"
    interval_secs: float = 5.0
    batch: int = 500

    def run_once(self, *, since_last: float) -> Mapping[str, int]:
        """Rescue what there is, batch by batch. After an outage, wait one interval instead."""
        if self.interval_secs * GAP_INTERVALS < since_last < float("inf"):
            return {"rescued": 0, "stood_down": 1}
        rescued = dead = 0
        while True:
            with self.hot.connect() as connection, transaction(connection):
                expired = leases.lock_expired(connection, limit=self.batch)
                if expired:
                    budgets = jobs.budgets(
                        connection, [one.delivery_id for one in expired if one.event_type == JOB_TYPE]
                    )
                    rows = [_lost(lease, budgets.get(lease.delivery_id)) for lease in expired]
                    rescued += results.record(connection, rows)
                    deaths = [pair for pair in zip(expired, rows, strict=True) if pair[1].next_status == Status.DEAD]
                    operational.tell(connection, [_death(lease, row) for lease, row in deaths])
                    dead += len(deaths)
            if len(expired) < self.batch:
                break
        if rescued:
            metrics.RESCUED.inc(rescued)
            metrics.attempt(WORKER_LOST.cls, rescued)
            metrics.dead(DeadReason.ATTEMPTS_EXHAUSTED, dead)
            log.warning("deliveries of lost workers were rescued", extra={"count": rescued})
        return {"rescued": rescued}


def _lost(lease: ExpiredLease, max_attempts: int | None) -> AttemptRow:
    """Decide what becomes of a delivery; `max_attempts` is a job's own number, else None."""
    policy = parse_retry(lease.retry)
    decision = decide(
        policy if max_attempts is None else replace(policy, max_attempts=max_attempts),
        spent=lease.attempt_count - lease.budget_from,
        outcome=WORKER_LOST,
        random=random.random(),
    )
    return AttemptRow(
        delivery_id=lease.delivery_id,
        lease_token=lease.lease_token,
        next_status=Status.DEAD if isinstance(decision, Dead) else Status.PENDING,
        reason=decision.reason.value if isinstance(decision, Dead) else None,
        wait_secs=decision.wait_s if isinstance(decision, Retry) else None,
        at=lease.now,
        number=lease.attempt_count,
        generation=lease.generation,
        attempt_class=WORKER_LOST.cls,
        code=WORKER_LOST.code,
        error=WORKER_LOST.text,
        http_status=None,
        body_incomplete=False,
        sends=0,
        dns_us=0,
        connect_us=0,
        tls_us=0,
        first_byte_us=0,
        total_us=0,
        bytes_sent=0,
        bytes_received=0,
        remote_address=None,
        worker="",
        reply_headers=None,
        snippet=None,
    )


def _death(lease: ExpiredLease, row: AttemptRow) -> Notice | None:
    return operational.death(
        workspace_id=lease.workspace_id,
        endpoint_id=lease.endpoint_id,
        delivery_id=lease.delivery_id,
        event_id=str(lease.event_id),
        event_type=lease.event_type,
        reason=row.reason,
        attempt_count=lease.attempt_count,
        code=row.code,
    )
