"""Every metric's name and label values, in one place, at zero from the start.

No label's values grow with customers: no endpoint, no URL, no delivery, no type of event.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from relay.core.model import AttemptClass, BreakerState, DeadReason, DeferReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

REGISTRY: Final = CollectorRegistry(auto_describe=True)

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
IN_FLIGHT_LIMIT = Gauge(
    "relay_sends_in_flight_limit", "Requests that this process may have under way.", registry=REGISTRY
)
UNRECORDED = Gauge("relay_results_waiting", "Results of this process that are not written yet.", registry=REGISTRY)
LEADING = Gauge("relay_publisher_leading", "Whether this process is the publisher that works.", registry=REGISTRY)

_ATTEMPTS = {cls: ATTEMPTS.labels(cls.label) for cls in AttemptClass}
_DEFERRED = {reason: DEFERRED.labels(reason.value) for reason in DeferReason}
_DEAD = {reason: DEAD.labels(reason.value) for reason in DeadReason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A metric that a collector makes at each scrape."""

    name: str
    help: str
    #: The one label, and its values where they are known beforehand.
    label: str | None = None
    values: tuple[str, ...] = ()

    def gauge(self, value: float) -> GaugeMetricFamily:
        """Return it with one value."""
        return GaugeMetricFamily(self.name, self.help, value=value)

    def gauges(self, values: Mapping[str, float]) -> GaugeMetricFamily:
        """Return it with a value for each value of its label; one that is known and not given is NaN."""
        assert self.label is not None
        family = GaugeMetricFamily(self.name, self.help, labels=[self.label])
        for value in dict.fromkeys((*self.values, *values)):
            family.add_metric([value], values.get(value, float("nan")))
        return family

    def counters(self, counts: Mapping[str, float]) -> CounterMetricFamily:
        """Return it as a counter, by its label, or by "" where it has none."""
        if self.label is None:
            return CounterMetricFamily(self.name, self.help, value=counts[""])
        family = CounterMetricFamily(self.name, self.help, labels=[self.label])
        for value in self.values:
            family.add_metric([value], counts.get(value, 0.0))
        return family


#: The queue as a whole, by the publisher that works (relay/process/metrics_queue.py); no other process has them.
QUEUE_DEPTH = Described(name="relay_queue_depth", help="Deliveries that are due and that no worker has taken.")
QUEUE_LATENESS = Described(
    name="relay_queue_lateness_seconds", help="How long the oldest due delivery has waited for a worker; 0 for none."
)
QUEUE_OLDEST = Described(
    name="relay_queue_oldest_pending_age_seconds",
    help="Since the oldest pending delivery was committed, deliberate waits included; NaN on an empty queue.",
)
DELIVERIES = Described(
    name="relay_deliveries",
    help="Deliveries under way by what they wait for.",
    label="state",
    values=("due", "waiting", "paused", "in_flight"),
)
BREAKERS = Described(
    name="relay_breakers",
    help="Endpoints by the state of their breaker.",
    label="state",
    values=tuple(state.name.lower() for state in BreakerState),
)
ENDPOINTS = Described(
    name="relay_endpoints", help="Endpoints by whether they are sent to.", label="state", values=("enabled", "disabled")
)
STREAM_UNREAD = Described(name="relay_stream_unread", help="Hints that no worker has read yet.")
DEFAULT_ROWS = Described(
    name="relay_attempt_default_partition_rows", help="Attempts that found no day of their own: 0 when all is well."
)
BEAT_AGE = Described(
    name="relay_heartbeat_age_seconds",
    help="Since any process of the role beat; NaN for none on record.",
    label="role",
    values=("api", "publisher", "worker", "beat"),
)
STALLED = Described(name="relay_workers_stalled", help="Live workers of which a part stands still or is gone.")
SWEEP_AGE = Described(name="relay_sweep_age_seconds", help="Since each sweep last began.", label="sweep")

#: Connections of a process, by its pools: `hot` is the hot path's, `grouped` commits events together.
DB_IN_USE = Described(
    name="relay_db_connections_in_use",
    help="Connections to the database that are in use.",
    label="pool",
    values=("main", "hot", "grouped"),
)
DB_LIMIT = Described(
    name="relay_db_connections_limit",
    help="Connections to the database that there can be.",
    label="pool",
    values=DB_IN_USE.values,
)

#: The API's own, of all its processes together (relay/process/metrics_api.py).
HTTP_REQUESTS = Described(
    name="relay_http_requests_total",
    help="Answers of the API by the class of their status; no health, no metrics.",
    label="status",
    values=("2xx", "3xx", "4xx", "5xx"),
)
EVENTS_ACCEPTED = Described(name="relay_ingest_accepted_total", help="Ingest calls answered with 202, or 200 or 207.")
API_PROCESSES = Described(name="relay_api_processes", help="Processes that serve the API here.")
INGEST_DURATION = Described(
    name="relay_ingest_duration_seconds", help="What an ingest call took, from its whole request to its answer."
)
INGEST_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Buckets:
    """A histogram that one thread counts in, at a fraction of a microsecond each, and any thread reads."""

    def __init__(self, described: Described, bounds: Sequence[float]) -> None:
        """`bounds` are seconds, rising; one more bucket takes the rest."""
        self._described = described
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, secs: Sequence[float]) -> None:
        """Count these."""
        counts, bounds = self._counts, self._bounds
        for one in secs:
            counts[bisect_left(bounds, one)] += 1
        self._sum += sum(secs)

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        yield histogram(self._described, self._bounds, list(self._counts), self._sum)

    def describe(self) -> Iterator[Metric]:
        """For the registry, which looks whether the name is taken."""
        return self.collect()


def histogram(
    described: Described, bounds: Sequence[float], counts: Sequence[float], total: float
) -> HistogramMetricFamily:
    """Make a histogram of counts by bucket, the last of them unbounded."""
    running, buckets = 0.0, []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        running += count
        buckets.append((bound, running))
    return HistogramMetricFamily(described.name, described.help, buckets=buckets, sum_value=total)


#: Of every attempt on record: seconds from the request's start to the end of its answer, or to its failure.
DURATION = Buckets(
    Described(name="relay_delivery_duration_seconds", help="What a request to a receiver took."),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
#: Of first attempts that were answered: seconds from the commit to the answer, to some 10 ms. The commit's time is the
#: database's clock, the answer's the worker's.
LATENCY = Buckets(
    Described(
        name="relay_delivery_latency_seconds", help="From a delivery's commit to the answer to its first attempt."
    ),
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
REGISTRY.register(DURATION)
REGISTRY.register(LATENCY)


class Pools:
    """The pools of this process, read at each scrape. A process sets them once."""

    def __init__(self) -> None:
        self.in_use: Mapping[str, float] = {}
        self.limits: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        yield DB_IN_USE.gauges(dict.fromkeys(DB_IN_USE.values, 0.0) | dict(self.in_use))
        yield DB_LIMIT.gauges(dict.fromkeys(DB_LIMIT.values, 0.0) | dict(self.limits))


POOLS: Final = Pools()
REGISTRY.register(POOLS)


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


def names() -> set[str]:
    """Return every name that a process of Relay's can show, as a query spells it."""
    made: Iterable[Described] = (one for one in globals().values() if isinstance(one, Described))
    shown = {one.name for one in made} | {f"{INGEST_DURATION.name}_{part}" for part in ("bucket", "sum", "count")}
    for family in REGISTRY.collect():
        shown |= {family.name} if family.type == "gauge" else set()
        shown |= {f"{family.name}_total"} if family.type == "counter" else set()
        shown |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count") if family.type == "histogram"}
    return shown - {INGEST_DURATION.name}
