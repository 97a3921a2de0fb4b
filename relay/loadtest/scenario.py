"""What every scenario is given, and how its figures become a report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relay.loadtest.calibration import python_loop_ms
from relay.loadtest.report import Report
from relay.loadtest.stack import Reading, Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.loadtest.accounting import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller chose; None leaves it to the scenario."""

    workers: int = 2
    count: int | None = None
    seconds: float | None = None
    #: Deliveries or events a second.
    rate: float | None = None
    #: Finished deliveries that lie in the tables already.
    rows: int | None = None
    database_url: str | None = None
    broker_url: str | None = None
    #: Settings of the roles, over those of the environment; and what each role runs first (see `Stack`).
    environ: Mapping[str, str] = field(default_factory=dict)
    preamble: str = ""
    #: Takes a sentence of progress; never on stdout, which belongs to the report.
    say: Callable[[str], None] = lambda _: None

    def stack(self) -> Stack:
        """A stack on the servers chosen."""
        return Stack(
            database_url=self.database_url,
            broker_url=self.broker_url,
            environ={**os.environ, **self.environ},
            preamble=self.preamble,
            say=self.say,
        )


def costs(before: Reading, after: Reading, deliveries: int) -> tuple[dict[str, float], float | None, float | None]:
    """CPU microseconds by role, statements and round trips, each by delivery, between two readings."""
    of = max(1, deliveries)
    cpu = {
        role: round((after.cpu_secs[role] - before.cpu_secs[role]) / of * 1e6, 1)
        for role in after.cpu_secs
        if role in before.cpu_secs
    }
    return cpu, _rate(before.statements, after.statements, of), _rate(before.round_trips, after.round_trips, of)


def others_cpu_percent(before: Reading, after: Reading) -> float | None:
    """Percent of the machine's CPU that went to others than the load test between two readings; None if not known.

    Servers that were given, and not started here, count among the others.
    """
    if before.machine_secs is None or after.machine_secs is None:
        return None
    ours = sum(used - before.cpu_secs.get(role, 0.0) for role, used in after.cpu_secs.items())
    others = after.machine_secs - before.machine_secs - ours - (after.own_secs - before.own_secs)
    available = (after.at - before.at) * (os.cpu_count() or 1)
    return round(max(0.0, others) / available * 100, 1) if available > 0 else None


def make_report(
    scenario: str,
    stack: Stack,
    *,
    options: Options,
    tally: Tally,
    before: Reading,
    after: Reading,
    settings: Mapping[str, object],
    rate_per_second: float | None = None,
    p50_ms: float | None = None,
    p99_ms: float | None = None,
    max_ms: float | None = None,
) -> Report:
    """Put a scenario's books and readings into a report."""
    cpu, statements, round_trips = costs(before, after, tally.offered)
    return Report(
        scenario=scenario,
        ok=tally.ok,
        offered=tally.offered,
        delivered=tally.delivered,
        lost=tally.lost,
        duplicates=tally.duplicates,
        rate_per_second=rate_per_second,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        max_ms=max_ms,
        sql_per_delivery=statements,
        redis_per_delivery=round_trips,
        cpu_us_per_delivery=cpu,
        worker_rss_mb=stack.worker_rss_mb(),
        workers=options.workers,
        settings={
            **settings,
            **stack.settings(),
            "others_cpu_percent": others_cpu_percent(before, after),
            # Before the roles started, and now.
            "python_loop_ms": [stack.python_loop_ms, python_loop_ms()],
        },
        versions=stack.versions(),
        cores=os.cpu_count() or 1,
    )


def _rate(before: int | None, after: int | None, deliveries: int) -> float | None:
    return None if before is None or after is None else round((after - before) / deliveries, 4)
