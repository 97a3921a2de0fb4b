"""The circuit breaker as plain values: it asks whether the endpoint answers, counts across workers, and comes back once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core import breaker
from relay.core.auto_disable import fails_for_good
from relay.core.breaker import Breaker, BreakerPolicy, Report, Summary
from relay.core.model import BreakerEffect, BreakerState

POLICY = BreakerPolicy(threshold=5, cooldown_s=30.0, max_cooldown_s=300.0)
OPEN = Breaker(state=BreakerState.OPEN, failures=5, trips=1, generation=3, open_s=12.0)
HALF_OPEN = Breaker(state=BreakerState.HALF_OPEN, failures=6, trips=2, generation=7, probe_s=9.0)


def report(generation: int, failures: int, *, answered: bool = False) -> Report:
    return Report(generation=generation, answered=answered, failures=failures)


def test_it_opens_at_exactly_the_threshold_however_the_failures_are_batched() -> None:
    """Four failures leave it closed; the fifth, from whichever worker, opens it for the cooldown, in a new generation.

    The count that opened it stands while it is open: that is what its owner reads."""
    seen = Breaker()
    for failures in (1, 2, 1):
        seen = breaker.after_report(seen, report(0, failures), POLICY)
        assert seen.state is BreakerState.CLOSED
    opened = breaker.after_report(seen, report(0, 1), POLICY)

    assert seen.failures == 4
    assert opened == Breaker(state=BreakerState.OPEN, failures=5, trips=1, generation=1, open_s=30.0)


def test_any_answer_resets_the_count() -> None:
    """A batch with an answer counts only what failed after it."""
    summary = Summary()
    for effect in (BreakerEffect.FAILED,) * 3 + (BreakerEffect.ANSWERED, BreakerEffect.NONE, BreakerEffect.FAILED):
        summary.add(effect)
    seen = breaker.after_report(Breaker(failures=4), summary.report(0), POLICY)

    assert seen == Breaker(failures=1)


@pytest.mark.parametrize("state", [Breaker(failures=4, generation=2), OPEN, HALF_OPEN])
def test_reports_of_another_generation_change_nothing(state: Breaker) -> None:
    """What passed the gate before the last change of state neither opens nor closes."""
    for generation in (state.generation - 1, state.generation + 1):
        assert breaker.after_report(state, report(generation, 9), POLICY) is state
        assert breaker.after_report(state, report(generation, 0, answered=True), POLICY) is state


def test_a_probe_decides() -> None:
    """An answer closes it with nothing counted; a failure counts on and opens it for twice as long."""
    back = breaker.after_report(HALF_OPEN, report(7, 0, answered=True), POLICY)
    again = breaker.after_report(HALF_OPEN, report(7, 1), POLICY)

    assert back == Breaker(generation=8)
    assert again == Breaker(state=BreakerState.OPEN, failures=7, trips=3, generation=8, open_s=120.0)


def test_the_cooldown_doubles_up_to_its_cap() -> None:
    """30 s, 60, 120, 240, then 300 however often it trips, a million times as well."""
    assert [POLICY.cooldown_after(trips) for trips in (1, 2, 3, 4, 5, 1_000_000)] == [30, 60, 120, 240, 300, 300]


def test_a_probe_that_says_nothing_is_handed_back() -> None:
    """Its cooldown is over and the trips stand: the next delivery probes at once."""
    seen = breaker.handed_back(HALF_OPEN)

    assert (seen.state, seen.failures, seen.trips, seen.generation) == (BreakerState.OPEN, 6, 2, 8)
    assert breaker.wait_s(seen, POLICY) is None
    assert breaker.may_probe(seen, POLICY)


def test_what_a_delivery_may_do() -> None:
    """Closed lets it go; open and half-open make it wait for their ends; after those, it may try to be the probe."""
    assert (breaker.wait_s(Breaker(), POLICY), breaker.may_probe(Breaker(), POLICY)) == (None, False)
    assert breaker.wait_s(OPEN, POLICY) == 12.0
    assert breaker.wait_s(HALF_OPEN, POLICY) == 9.0
    for over in (replace(OPEN, open_s=-0.1), replace(HALF_OPEN, probe_s=-3.0)):
        assert (breaker.wait_s(over, POLICY), breaker.may_probe(over, POLICY)) == (None, True)


def test_switched_off_it_neither_counts_nor_holds() -> None:
    """With RELAY_BREAKER=false an open one lets everything through, and failures do not open any."""
    off = replace(POLICY, enabled=False)

    assert (breaker.wait_s(OPEN, off), breaker.may_probe(OPEN, off)) == (None, False)
    assert breaker.after_report(Breaker(), report(0, 100), off) == Breaker()


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(-1, 1)), max_size=30))
def test_generations_only_rise_and_a_closed_breaker_is_under_its_threshold(steps: list[tuple[int, bool, int]]) -> None:
    """Whatever is reported in whatever order: no change goes unmarked, and five failures are never sat out closed."""
    seen = Breaker()
    for failures, answered, off in steps:
        after = breaker.after_report(seen, report(seen.generation + off, failures, answered=answered), POLICY)
        assert after.generation == seen.generation + (after.state is not seen.state)
        assert after.state is not BreakerState.CLOSED or after.failures < POLICY.threshold
        seen = after


def test_an_endpoint_fails_for_good_after_long_enough_and_often_enough() -> None:
    """Both count: nine failures over a month say as little as a thousand in an hour."""
    assert not fails_for_good(9, 30 * 86400, 5 * 86400)
    assert not fails_for_good(1000, 3600, 5 * 86400)
    assert fails_for_good(10, 5 * 86400, 5 * 86400)
