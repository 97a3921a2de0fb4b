"""What becomes of a delivery after an attempt: again, given up, or done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.core.backoff import wait_seconds
from relay.core.model import AttemptClass, DeadReason

if TYPE_CHECKING:
    from relay.core.backoff import RetryPolicy
    from relay.core.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """It arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Pending again, due in `wait_s` seconds."""

    wait_s: float
    #: Seconds for which the endpoint's other deliveries wait too; None: they need not.
    hold_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """Given up."""

    reason: DeadReason
    #: As in Retry: what the receiver asked for holds for its other deliveries.
    hold_s: float | None = None


Decision = Delivered | Retry | Dead

_DELIVERED = Delivered()


def decide(policy: RetryPolicy, *, spent: int, outcome: Outcome, random: float) -> Decision:
    """What to do after an attempt that came to `outcome`; `spent` attempts of this generation count it in.

    The wait is the policy's own, or the receiver's where that is longer: Retry-After never makes a retry earlier, and
    its cap never shortens the policy. `random` is in [0, 1). Expiry is not looked at: the claim ends late deliveries.

    Raises ValueError for a deferred outcome: nothing was attempted, so nothing is decided.
    """
    if outcome.cls is AttemptClass.SUCCESS:
        return _DELIVERED
    if outcome.cls is AttemptClass.DEFERRED:
        raise ValueError("a deferral is not an attempt")
    hold_s = outcome.retry_after_s if outcome.holds_endpoint else None
    if outcome.cls is AttemptClass.PERMANENT_FAILURE:
        return Dead(reason=outcome.dead_reason or DeadReason.PERMANENT_FAILURE, hold_s=hold_s)
    if spent >= policy.max_attempts:
        return Dead(reason=DeadReason.ATTEMPTS_EXHAUSTED, hold_s=hold_s)
    return Retry(wait_s=max(wait_seconds(policy, spent, random), outcome.retry_after_s or 0.0), hold_s=hold_s)
