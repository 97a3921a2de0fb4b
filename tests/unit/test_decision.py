"""What becomes of a delivery after an attempt."""

from __future__ import annotations

import pytest

from relay.core.backoff import RetryPolicy
from relay.core.decision import Dead, Decision, Delivered, Retry, decide
from relay.core.model import AttemptClass, BreakerEffect, DeadReason
from relay.core.observation import Fault, Observation
from relay.core.outcome import PAYLOAD_TOO_LARGE, WORKER_LOST, Outcome, judge

POLICY = RetryPolicy(max_attempts=3, jitter=0.2)  # 5 s, 15 s


def verdict(status: int, retry_after: str | None = None) -> Outcome:
    headers = [] if retry_after is None else [("retry-after", retry_after)]
    observation = Observation(status=status, headers=headers)
    return judge(observation, retry_statuses=frozenset(), now=0.0, retry_after_max_s=3_600.0)


@pytest.mark.parametrize(
    ("outcome", "spent", "random", "expected"),
    [
        (verdict(200), 1, 0.0, Delivered()),
        (verdict(200), 3, 0.0, Delivered()),
        (verdict(500), 1, 0.0, Retry(wait_s=5.0)),
        (verdict(500), 2, 0.5, Retry(wait_s=15.0 * 1.1)),
        (verdict(500), 3, 0.0, Dead(reason=DeadReason.ATTEMPTS_EXHAUSTED)),
        (verdict(500), 4, 0.0, Dead(reason=DeadReason.ATTEMPTS_EXHAUSTED)),
        (verdict(404), 1, 0.0, Dead(reason=DeadReason.PERMANENT_FAILURE)),
        (verdict(404), 3, 0.0, Dead(reason=DeadReason.PERMANENT_FAILURE)),
        (verdict(410), 1, 0.0, Dead(reason=DeadReason.GONE)),
        (PAYLOAD_TOO_LARGE, 1, 0.0, Dead(reason=DeadReason.PAYLOAD_TOO_LARGE)),
        (WORKER_LOST, 1, 0.0, Retry(wait_s=5.0)),
        (WORKER_LOST, 3, 0.0, Dead(reason=DeadReason.ATTEMPTS_EXHAUSTED)),
        (verdict(429, "30"), 1, 0.0, Retry(wait_s=30.0, hold_s=30.0)),
        (verdict(503, "30"), 1, 0.0, Retry(wait_s=30.0, hold_s=30.0)),
        (verdict(413, "30"), 1, 0.0, Retry(wait_s=30.0)),
        # Later, never earlier.
        (verdict(429, "2"), 1, 0.0, Retry(wait_s=5.0, hold_s=2.0)),
        (verdict(429, "0"), 1, 0.0, Retry(wait_s=5.0)),
        (verdict(429, "-5"), 1, 0.0, Retry(wait_s=5.0)),
        (verdict(500, "30"), 1, 0.0, Retry(wait_s=5.0)),
        (verdict(429, "9999999999"), 1, 0.0, Retry(wait_s=3_600.0, hold_s=3_600.0)),
        # The last attempt's word holds for the others.
        (verdict(429, "30"), 3, 0.0, Dead(reason=DeadReason.ATTEMPTS_EXHAUSTED, hold_s=30.0)),
    ],
)
def test_an_outcome_is_decided(outcome: Outcome, spent: int, random: float, expected: Decision) -> None:
    """The policy, the budget and the receiver's Retry-After together say what happens next."""
    assert decide(POLICY, spent=spent, outcome=outcome, random=random) == expected


def test_the_cap_on_retry_after_does_not_shorten_the_own_backoff() -> None:
    """A policy that waits six hours waits six hours, though a receiver may ask for one hour only."""
    policy = RetryPolicy(base_ms=21_600_000)

    assert decide(policy, spent=1, outcome=verdict(429, "7200"), random=0.0) == Retry(wait_s=21_600.0, hold_s=3_600.0)


def test_a_refusal_dies_under_its_own_reason() -> None:
    """B-41: `refused` is kept apart from permanent failures."""
    outcome = judge(Observation(fault=Fault.REFUSED), retry_statuses=frozenset(), now=0.0, retry_after_max_s=1.0)

    assert decide(POLICY, spent=1, outcome=outcome, random=0.0) == Dead(reason=DeadReason.REFUSED)


def test_a_deferral_is_not_decided() -> None:
    """A deferral spent nothing, so asking for a decision on it is a mistake."""
    outcome = Outcome(cls=AttemptClass.DEFERRED, code="internal", breaker=BreakerEffect.NONE)

    with pytest.raises(ValueError, match="deferral"):
        decide(POLICY, spent=1, outcome=outcome, random=0.0)
