"""What one attempt comes to: the row that records it, the delivery's next state, and its line in the log."""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.core.backoff import RetryPolicy
from relay.core.decision import Dead, Retry, decide
from relay.core.model import AttemptClass, Status
from relay.core.observation import Fault
from relay.store.results import AttemptRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from relay.core.outcome import Outcome
    from relay.delivery.gate import Finished, Leased

log = logging.getLogger(__name__)
#: One line a delivery attempt: the log that an operator greps by delivery id.
attempts_log = logging.getLogger("relay.attempts")

#: Characters kept of a reply's header block.
REPLY_HEADERS = 4096

#: Microseconds: the log's columns hold no more (36 minutes), a time-out may.
LONGEST_US = 2**31 - 1

#: Of tests: what fails is not tried again.
ONCE = RetryPolicy(max_attempts=1)

#: A result: its delivery and the lease that it was made under.
Key = tuple["UUID", "UUID"]


@dataclass(slots=True)
class Record:
    """A judged attempt, ready to be written."""

    row: AttemptRow
    leased: Leased
    verdict: Outcome
    #: Seconds for which the receiver wants its endpoint held.
    hold_s: float | None

    @property
    def key(self) -> Key:
        """What tells it from every other: no lease is given twice."""
        return (self.row.delivery_id, self.row.lease_token)


def record_of(one: Finished, verdict: Outcome, worker: str) -> Record:
    """Decide what becomes of the delivery."""
    leased, seen = one.leased, one.observation
    row = leased.row
    status, reason, wait, hold_s = Status.DELIVERED, None, None, None
    if verdict.cls is not AttemptClass.SUCCESS:
        policy = ONCE if leased.test else leased.destination.retry
        decision = decide(policy, spent=row.spent, outcome=verdict, random=random.random())
        if isinstance(decision, Dead):
            status, reason, hold_s = Status.DEAD, decision.reason.value, decision.hold_s
        elif isinstance(decision, Retry):
            status, wait, hold_s = Status.PENDING, decision.wait_s, decision.hold_s
    return Record(
        # By place, in the order of its fields: by name it would cost four times as much, for every attempt.
        AttemptRow._make(
            (
                row.id,
                leased.token,
                status,
                reason,
                wait,
                row.claimed_at,
                row.attempt_count,
                row.generation,
                verdict.cls,
                verdict.code,
                verdict.text,
                seen.status,
                verdict.body_incomplete,
                seen.sends,
                seen.dns_us,
                seen.connect_us,
                seen.tls_us,
                seen.first_byte_us if seen.first_byte_us < LONGEST_US else LONGEST_US,
                seen.total_us if seen.total_us < LONGEST_US else LONGEST_US,
                seen.bytes_sent,
                seen.bytes_received,
                # A refused address is nobody's business: the log must not map the inside of a network.
                None if seen.fault is Fault.REFUSED else seen.remote_address,
                worker,
                _header_text(tuple(seen.headers)) if seen.headers else None,
                _display(seen.snippet) if seen.snippet else None,
            )
        ),
        leased,
        verdict,
        hold_s,
    )


@functools.lru_cache(maxsize=64)  # most replies of one second have the same
def _header_text(headers: tuple[tuple[str, str], ...]) -> str:
    # Postgres's text holds no NUL.
    return "\n".join([": ".join(header) for header in headers]).replace("\0", "�")[:REPLY_HEADERS]


def _display(snippet: bytes) -> str:
    """Decode a reply's first bytes for showing, whatever they are."""
    return snippet.decode("utf-8", "replace").replace("\0", "�")


def log_attempts(records: Sequence[Record], stale: set[Key], persist_us: int) -> None:
    if not stale and not attempts_log.isEnabledFor(logging.WARNING):
        return
    successes = attempts_log.isEnabledFor(logging.INFO)
    for record in records:
        row, verdict, leased = record.row, record.verdict, record.leased
        if verdict.cls is AttemptClass.SUCCESS and not successes and not stale:
            continue
        if stale and record.key in stale:
            log.warning(
                "a stale result was dropped: the lease had gone to another",
                extra={"delivery_id": str(row.delivery_id), "attempt": row.number, "outcome": verdict.cls.label},
            )
            continue
        level = logging.INFO if verdict.cls is AttemptClass.SUCCESS else logging.WARNING
        if not attempts_log.isEnabledFor(level):
            continue
        attempts_log.log(
            level,
            "delivery.attempted",
            extra={
                "delivery_id": str(row.delivery_id),
                "endpoint_id": str(leased.row.endpoint_id),
                "event_type": leased.row.event_type,
                "attempt": row.number,
                "outcome": verdict.cls.label,
                "code": verdict.code,
                "status": row.http_status,
                "reason": row.reason,
                "retry_in_s": None if row.wait_secs is None else round(row.wait_secs, 3),
                "claim_ms": leased.claim_us / 1000,
                "gate_ms": leased.gate_us / 1000,
                "send_ms": row.total_us / 1000,
                "persist_ms": persist_us / 1000,
            },
        )
