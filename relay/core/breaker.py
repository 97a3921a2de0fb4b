"""An endpoint's circuit breaker: closed, open, half-open; counted across workers, moved by one report at a time.

The question is whether the endpoint answered, not whether it succeeded: a 404 closes what a time-out opened. All times
are seconds from now, by the database's clock. Whoever reads the state, moves it and writes it back holds the row's
lock meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from relay.core.model import BreakerEffect, BreakerState

#: Seconds beyond its request's time-out after which a probe counts as lost and another may go.
PROBE_SLACK_S: Final = 2.0
#: Doublings of the cooldown that are worth counting; the cap has been reached long before.
MOST_DOUBLINGS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When breakers open, and for how long."""

    enabled: bool = True
    #: Failures in a row that open one.
    threshold: int = 5
    #: Seconds of the first cooldown; each trip in a row doubles it, up to the longest.
    cooldown_s: float = 30.0
    max_cooldown_s: float = 300.0

    def cooldown_after(self, trips: int) -> float:
        """Return the cooldown in seconds after so many trips in a row, the latest among them (1 or more)."""
        return min(self.max_cooldown_s, self.cooldown_s * 2.0 ** min(trips - 1, MOST_DOUBLINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The state as it stands on the endpoint's row."""

    state: BreakerState = BreakerState.CLOSED
    #: Failures in a row since the last answer: those that opened it, and one for each probe that failed since.
    failures: int = 0
    #: Trips in a row: how often it opened since it was last closed.
    trips: int = 0
    #: Raised by every change of state and every probe: tells reports of now from those of before.
    generation: int = 0
    #: Seconds until the cooldown ends; negative when it is over, None unless open.
    open_s: float | None = None
    #: Seconds until the probe under way counts as lost; None unless half-open.
    probe_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a batch of results says of one endpoint, all from attempts that noted `generation` at the gate."""

    generation: int
    #: Whether any of them was answered.
    answered: bool
    #: How many were not, after the last that was.
    failures: int


class Summary:
    """Sums results of one endpoint and generation up, in the order they came."""

    __slots__ = ("answered", "failures")

    def __init__(self) -> None:
        self.answered = False
        self.failures = 0

    def add(self, effect: BreakerEffect) -> None:
        """Take one more result."""
        if effect is BreakerEffect.ANSWERED:
            self.answered = True
            self.failures = 0
        elif effect is BreakerEffect.FAILED:
            self.failures += 1

    def report(self, generation: int) -> Report:
        """Return what was summed up."""
        return Report(generation=generation, answered=self.answered, failures=self.failures)


def after_report(breaker: Breaker, report: Report, policy: BreakerPolicy) -> Breaker:
    """Return the state after a report: `breaker` itself where nothing changes.

    Reports of another generation change nothing: they tell of the time before a trip, a reset or another's probe.
    While half-open only the probe has noted the current generation, so any answer is the probe's and closes.
    """
    if report.generation != breaker.generation or not policy.enabled:
        return breaker
    if breaker.state is BreakerState.HALF_OPEN:
        if report.failures:
            return _opened(breaker, policy, breaker.failures + report.failures)
        return closed(breaker) if report.answered else breaker
    if breaker.state is BreakerState.OPEN:
        return breaker
    failures = report.failures if report.answered else breaker.failures + report.failures
    if failures >= policy.threshold:
        return _opened(breaker, policy, failures)
    return breaker if failures == breaker.failures else replace(breaker, failures=failures)


def closed(breaker: Breaker) -> Breaker:
    """Return it closed, with nothing counted: after an answer to a probe, and when an operator says so."""
    return Breaker(generation=breaker.generation + 1)


def handed_back(breaker: Breaker) -> Breaker:
    """Return it open with its cooldown over, so that the next delivery probes: the probe was not sent, or said nothing."""
    return replace(breaker, state=BreakerState.OPEN, generation=breaker.generation + 1, open_s=0.0, probe_s=None)


def wait_s(breaker: Breaker, policy: BreakerPolicy) -> float | None:
    """Return the seconds that a delivery waits for the breaker; None where it may go, or (see `may_probe`) try to probe."""
    if not policy.enabled or breaker.state is BreakerState.CLOSED:
        return None
    left = breaker.open_s if breaker.state is BreakerState.OPEN else breaker.probe_s
    return left if left is not None and left > 0 else None


def may_probe(breaker: Breaker, policy: BreakerPolicy) -> bool:
    """Say whether a delivery that need not wait goes as the probe, if it is the one that gets it."""
    return policy.enabled and breaker.state is not BreakerState.CLOSED


def _opened(breaker: Breaker, policy: BreakerPolicy, failures: int) -> Breaker:
    trips = breaker.trips + 1
    return Breaker(
        state=BreakerState.OPEN,
        failures=failures,
        trips=trips,
        generation=breaker.generation + 1,
        open_s=policy.cooldown_after(trips),
    )
