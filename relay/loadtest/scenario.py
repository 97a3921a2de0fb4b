"""What every scenario is given, and how its figures become a report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    database_url: str | None = None
    broker_url: str | None = None
    #: Takes a sentence of progress; never on stdout, which belongs to the report.
    say: Callable[[str], None] = lambda _: None

    def stack(self) -> Stack:
        """A stack on the servers chosen."""
        return Stack(database_url=self.database_url, broker_url=self.broker_url, say=self.say)


def costs(before: Reading, after: Reading, deliveries: int) -> tuple[dict[str, float], float | None, float | None]:
    """CPU microseconds by role, statements and round trips, each by delivery, between two readings."""
    of = max(1, deliveries)
    cpu = {
        role: round((after.cpu_secs[role] - before.cpu_secs[role]) / of * 1e6, 1)
        for role in after.cpu_secs
        if role in before.cpu_secs
    }
    return cpu, _rate(before.statements, after.statements, of), _rate(before.round_trips, after.round_trips, of)


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
        settings={**settings, **stack.settings()},
        versions=stack.versions(),
        cores=os.cpu_count() or 1,
    )


def _rate(before: int | None, after: int | None, deliveries: int) -> float | None:
    return None if before is None or after is None else round((after - before) / deliveries, 4)
