"""Every metric's name and label values, in one place, at zero from the start.

No label's values grow with customers: no endpoint, no URL, no delivery, no type of event.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from relay.core.model import AttemptClass, DeadReason, DeferReason

REGISTRY = CollectorRegistry(auto_describe=True)

ATTEMPTS = Counter("relay_delivery_attempts_total", "Attempts by what they came to.", ["outcome"], registry=REGISTRY)
DEFERRED = Counter(
    "relay_deliveries_deferred_total", "Deliveries held back by a gate, each time.", ["reason"], registry=REGISTRY
)
DEAD = Counter("relay_deliveries_dead_total", "Deliveries given up, by reason.", ["reason"], registry=REGISTRY)
STALE_RESULTS = Counter(
    "relay_stale_results_total", "Results dropped because the lease had gone to another worker.", registry=REGISTRY
)
RESCUED = Counter(
    "relay_deliveries_rescued_total", "Deliveries taken back from workers that did not return.", registry=REGISTRY
)
ANNOUNCED = Counter("relay_deliveries_announced_total", "Hints added to the stream.", registry=REGISTRY)
IN_FLIGHT = Gauge("relay_sends_in_flight", "Requests under way in this process.", registry=REGISTRY)
UNRECORDED = Gauge("relay_results_waiting", "Results of this process that are not written yet.", registry=REGISTRY)

_ATTEMPTS = {cls: ATTEMPTS.labels(cls.label) for cls in AttemptClass}
_DEFERRED = {reason: DEFERRED.labels(reason.value) for reason in DeferReason}
_DEAD = {reason: DEAD.labels(reason.value) for reason in DeadReason}


def attempt(cls: AttemptClass, count: int = 1) -> None:
    """Count an attempt that stands in the log, or several."""
    _ATTEMPTS[cls].inc(count)


def dead(reason: DeadReason, count: int = 1) -> None:
    """Count deliveries that were given up."""
    _DEAD[reason].inc(count)


def deferred(reason: DeferReason, *, logged: bool) -> None:
    """Count one deferral; with a line in the log, which the first of a run has, also an attempt of class `deferred`."""
    _DEFERRED[reason].inc()
    if logged:
        _ATTEMPTS[AttemptClass.DEFERRED].inc()


def value_of(counter: Counter) -> float:
    """Return what an unlabelled counter stands at."""
    return float(next(iter(counter.collect())).samples[0].value)
