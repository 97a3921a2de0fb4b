"""Rescue the deliveries of workers that died: leases that ran out go back to pending, the attempt spent.

The claim counted the attempt, so it is not counted again; a delivery that keeps killing its
worker runs out of attempts instead of looping.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay import metrics
from relay.core.backoff import parse_retry
from relay.core.decision import Dead, Retry, decide
from relay.core.model import Status
from relay.core.outcome import WORKER_LOST
from relay.store import leases, results
from relay.store.engine import transaction
from relay.store.results import AttemptRow

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.store.leases import ExpiredLease

log = logging.getLogger(__name__)

#: After a gap of so many intervals the database was away, or beat: recorders that hold results come first.
GAP_INTERVALS = 3


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
        rescued = 0
        while True:
            with self.hot.connect() as connection, transaction(connection):
                expired = leases.lock_expired(connection, limit=self.batch)
                if expired:
                    rescued += results.record(connection, [_lost(lease) for lease in expired])
            if len(expired) < self.batch:
                break
        if rescued:
            metrics.RESCUED.inc(rescued)
            metrics.attempt(WORKER_LOST.cls, rescued)
            log.warning("deliveries of lost workers were rescued", extra={"count": rescued})
        return {"rescued": rescued}


def _lost(lease: ExpiredLease) -> AttemptRow:
    decision = decide(
        parse_retry(lease.retry),
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
