"""Retry policies: what is accepted, and how long the waits are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.backoff import (
    DEFAULT_POLICY,
    JOB_POLICY,
    LONGEST_WAIT_MS,
    RetryPolicy,
    Strategy,
    parse_retry,
    to_json,
    wait_seconds,
)
from relay.core.errors import InvalidInput

RANDOMS = st.floats(0, 1, exclude_max=True)


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    """Any policy that `parse_retry` lets through."""
    base = draw(st.integers(1, LONGEST_WAIT_MS))
    value: dict[str, Any] = {
        "strategy": draw(st.sampled_from([s.value for s in Strategy])),
        "base_ms": base,
        "max_ms": draw(st.integers(base, LONGEST_WAIT_MS)),
        "factor": draw(st.floats(1, 100)),
        "jitter": draw(st.floats(0, 1)),
        "statuses": draw(st.lists(st.integers(411, 499))),
    }
    if value["strategy"] == "schedule":
        value["schedule_ms"] = draw(st.lists(st.integers(0, LONGEST_WAIT_MS), min_size=1, max_size=49))
    return parse_retry(value)


def test_an_empty_object_is_the_default_policy() -> None:
    """B-30: exponential, 12 attempts, from 5 s by 3 up to 6 h, jitter 0.2."""
    assert parse_retry({}) == DEFAULT_POLICY
    assert to_json(DEFAULT_POLICY) == {
        "strategy": "exponential",
        "max_attempts": 12,
        "base_ms": 5_000,
        "max_ms": 21_600_000,
        "factor": 3.0,
        "jitter": 0.2,
        "statuses": [],
    }


def test_the_default_waits_are_those_that_the_manual_states() -> None:
    """The default's waits grow from 5 s by three and stay at 6 h."""
    waits = [wait_seconds(DEFAULT_POLICY, failures, 0.0) for failures in range(1, 12)]

    assert waits == [5, 15, 45, 135, 405, 1_215, 3_645, 10_935, 21_600, 21_600, 21_600]


def test_a_jobs_waits_are_short() -> None:
    """A job that says nothing waits 1, 2, 4 and 8 s between its five attempts."""
    assert JOB_POLICY.max_attempts == 5
    assert [wait_seconds(JOB_POLICY, failures, 0.0) for failures in range(1, 5)] == [1, 2, 4, 8]


def test_a_fixed_policy_waits_the_same_each_time() -> None:
    """The fixed strategy does not grow."""
    policy = parse_retry({"strategy": "fixed", "base_ms": 700, "jitter": 0})

    assert [wait_seconds(policy, failures, 0.9) for failures in (1, 2, 30)] == [0.7, 0.7, 0.7]


def test_a_schedule_is_followed_to_its_end() -> None:
    """A schedule of n waits means n + 1 attempts, each wait in its place."""
    policy = parse_retry({"strategy": "schedule", "schedule_ms": [0, 1_000, 60_000], "jitter": 0})

    assert policy.max_attempts == 4
    assert [wait_seconds(policy, failures, 0.5) for failures in (1, 2, 3)] == [0, 1, 60]


def test_a_schedule_can_be_cut_short() -> None:
    """`max_attempts` lowers what a schedule allows."""
    assert parse_retry({"strategy": "schedule", "schedule_ms": [1, 2, 3], "max_attempts": 2}).max_attempts == 2


def test_max_ms_follows_a_greater_base() -> None:
    """A base above the usual cap raises the cap, unless that is given."""
    assert parse_retry({"base_ms": 30_000_000}).max_ms == 30_000_000


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "retry"),
        ("exponential", "retry"),
        (None, "retry"),
        ({"strategy": "linear"}, "retry.strategy"),
        ({"strategy": 3}, "retry.strategy"),
        ({"strategy": ["fixed"]}, "retry.strategy"),
        ({"max_attempts": 0}, "retry.max_attempts"),
        ({"max_attempts": 51}, "retry.max_attempts"),
        ({"max_attempts": 3.5}, "retry.max_attempts"),
        ({"max_attempts": True}, "retry.max_attempts"),
        ({"max_attempts": "3"}, "retry.max_attempts"),
        ({"base_ms": 0}, "retry.base_ms"),
        ({"base_ms": -5}, "retry.base_ms"),
        ({"base_ms": LONGEST_WAIT_MS + 1}, "retry.base_ms"),
        ({"base_ms": 10**400}, "retry.base_ms"),
        ({"max_ms": LONGEST_WAIT_MS + 1}, "retry.max_ms"),
        ({"base_ms": 1_000, "max_ms": 999}, "retry.max_ms"),
        ({"factor": 0.99}, "retry.factor"),
        ({"factor": 101}, "retry.factor"),
        ({"factor": float("nan")}, "retry.factor"),
        ({"factor": True}, "retry.factor"),
        ({"jitter": -0.1}, "retry.jitter"),
        ({"jitter": 1.1}, "retry.jitter"),
        ({"jitter": float("inf")}, "retry.jitter"),
        ({"jitter": 10**400}, "retry.jitter"),
        ({"statuses": [399]}, "retry.statuses"),
        ({"statuses": [302]}, "retry.statuses"),
        ({"statuses": [500]}, "retry.statuses"),
        ({"statuses": [410]}, "retry.statuses"),
        ({"statuses": ["404"]}, "retry.statuses"),
        ({"statuses": 404}, "retry.statuses"),
        ({"strategy": "schedule"}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": []}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": [1] * 50}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": [-1]}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": [1.5]}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": "1,2"}, "retry.schedule_ms"),
        ({"schedule_ms": [1]}, "retry.schedule_ms"),
        ({"strategy": "schedule", "schedule_ms": [1, 2], "max_attempts": 4}, "retry.max_attempts"),
        ({"max_attemps": 3}, "retry.max_attemps"),
        ({"x" * 500: 3}, "retry." + "x" * 64),
    ],
)
def test_a_faulty_policy_is_refused_by_field(value: object, field: str) -> None:
    """Every bound of a policy is checked, and the field that breaks it is named."""
    with pytest.raises(InvalidInput) as raised:
        parse_retry(value)

    assert raised.value.field == field


@given(policies())
def test_a_policy_survives_being_stored(policy: RetryPolicy) -> None:
    """What `to_json` writes, `parse_retry` reads back the same."""
    assert parse_retry(to_json(policy)) == policy


@given(policies(), st.integers(1, 10**9), RANDOMS)
def test_no_wait_is_early_or_beyond_its_share_of_jitter(policy: RetryPolicy, failures: int, random: float) -> None:
    """Jitter only lengthens a wait, by at most its share, however many failures there were."""
    plain = wait_seconds(policy, failures, 0.0)
    jittered = wait_seconds(policy, failures, random)
    longest = {
        Strategy.EXPONENTIAL: policy.max_ms,
        Strategy.FIXED: policy.base_ms,
        Strategy.SCHEDULE: max(policy.schedule_ms, default=0),
    }[policy.strategy]

    assert plain <= jittered <= plain * (1 + policy.jitter) * (1 + 1e-12)
    assert jittered <= longest / 1_000 * (1 + policy.jitter) * (1 + 1e-12)
    if policy.strategy is not Strategy.SCHEDULE:
        assert jittered >= policy.base_ms / 1_000


@given(policies(), st.integers(1, 2_000), RANDOMS)
def test_exponential_waits_never_shrink(policy: RetryPolicy, failures: int, random: float) -> None:
    """One more failure never means a shorter wait, but in a schedule."""
    if policy.strategy is not Strategy.SCHEDULE:
        assert wait_seconds(policy, failures, random) <= wait_seconds(policy, failures + 1, random)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """To JSON 3.0 is 3."""
    policy = parse_retry(
        {"strategy": "schedule", "max_attempts": 2.0, "schedule_ms": [1000.0, 5.0], "statuses": [404.0], "base_ms": 7.0}
    )

    assert policy == parse_retry(
        {"strategy": "schedule", "max_attempts": 2, "schedule_ms": [1000, 5], "statuses": [404], "base_ms": 7}
    )
    assert all(isinstance(wait, int) for wait in policy.schedule_ms)
