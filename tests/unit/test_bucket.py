"""The token bucket as plain values: never more than burst + rate * t, and one slot after the other for the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.bucket import Bucket, Demand, take


def test_burst_then_slots_in_a_row() -> None:
    """Ten rows on a full bucket of three at 2/s: three go, the rest come back at 0.5, 1.0, … 3.5 s."""
    after, grant = take(Bucket(tokens=3, refilled_at=0.0), Demand(rate=2.0, burst=3, fresh=10), 100.0)

    assert (grant.fresh, grant.slot_s, after.slots_until) == (3, 0.5, 103.5)


def test_rows_that_waited_go_before_new_ones() -> None:
    """With two tokens, two that come back take them; the new one gets the next slot."""
    after, grant = take(Bucket(tokens=2, refilled_at=0.0), Demand(rate=1.0, burst=2, waited=2, fresh=1), 0.0)

    assert (grant.waited, grant.fresh, after.slots_until) == (2, 0, 1.0)


def test_new_rows_queue_while_slots_are_outstanding() -> None:
    """A token that is there belongs to whoever was told to come back for it."""
    bucket = Bucket(tokens=1, refilled_at=0.0, slots_until=5.0)
    _, grant = take(bucket, Demand(rate=1.0, burst=5, fresh=1), 0.0)
    _, later = take(bucket, Demand(rate=1.0, burst=5, fresh=1), 5.0)

    assert (grant.fresh, grant.slot_s) == (0, 6.0)
    assert later.fresh == 1


def test_a_fleet_that_was_away_does_not_release_its_backlog() -> None:
    """Six thousand rows whose slots all passed meanwhile get the burst; the others are given slots once more."""
    _, grant = take(
        Bucket(tokens=0, refilled_at=0.0, slots_until=600.0), Demand(rate=10.0, burst=20, waited=6000), 9999.0
    )

    assert grant.waited == 20
    assert grant.slot_s == pytest.approx(0.1)


def test_held_rows_get_slots_from_the_holds_end_and_each_trip_counts_anew() -> None:
    """Behind an open breaker the first comes back at the cooldown's end, whatever was outstanding before the trip."""
    bucket = Bucket(tokens=0, refilled_at=0.0, slots_until=5000.0, generation=3)
    after, grant = take(bucket, Demand(rate=4.0, burst=1, held=3, held_s=30.0, generation=4), 0.0)
    _, further = take(after, Demand(rate=4.0, burst=1, held=1, held_s=30.0, generation=4), 0.0)

    assert (grant.held_s, after.slots_until, after.generation) == (30.0, 30.5, 4)
    assert further.held_s == 30.75


@given(
    rate=st.floats(0.01, 500),
    burst=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=40),
)
def test_no_span_sees_more_than_burst_and_rate(rate: float, burst: int, steps: list[tuple[float, int, int]]) -> None:
    """Over every span between two takes, what was granted keeps to burst + rate * t (B-50)."""
    bucket, now, granted = Bucket(tokens=burst, refilled_at=0.0), 0.0, []
    for pause, waited, fresh in steps:
        now += pause
        bucket, grant = take(bucket, Demand(rate=rate, burst=burst, waited=waited, fresh=fresh), now)
        granted.append((now, grant.waited + grant.fresh))
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            sent = sum(count for _, count in granted[first : last + 1])
            assert sent <= burst + rate * (granted[last][0] - granted[first][0]) + 0.001


@given(rate=st.floats(0.1, 1000), backlog=st.integers(1, 300))
def test_a_backlog_costs_a_deferral_a_row(rate: float, backlog: int) -> None:
    """Rows that come back at their slots find their tokens: each is deferred once, not once a poll (B-52)."""
    bucket = Bucket(tokens=0, refilled_at=0.0)
    bucket, grant = take(bucket, Demand(rate=rate, burst=5, fresh=backlog), 0.0)
    for place in range(backlog):
        bucket, got = take(bucket, Demand(rate=rate, burst=5, waited=1), grant.slot_s + place / rate)
        assert got.waited == 1
