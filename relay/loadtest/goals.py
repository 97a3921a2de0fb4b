"""What Relay should reach on a machine of two cores, and whether the scenarios' reports say that it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: A scenario's JSON object.
Found = Mapping[str, Any]

#: Percent of the machine's CPU: where others take more, figures are more of them than of Relay.
BUSY_PERCENT: Final = 10.0

_FIGURES: Final = ("settings", "figures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of `relay loadtest`, and how it is cut short where a rough idea is enough."""

    argv: Sequence[str]
    quick: Sequence[str] = ()


#: By name, in the order in which they run.
RUNS: Final[Mapping[str, Run]] = {
    "drain": Run(argv=["drain"]),
    "drain-1": Run(argv=["drain", "--workers", "1"]),
    "limit": Run(argv=["limit"]),
    "baseline": Run(argv=["baseline"]),
    "sustained-5000": Run(argv=["sustained", "--rate", "5000"], quick=["--seconds", "10"]),
    "sustained-7000": Run(argv=["sustained", "--rate", "7000"], quick=["--seconds", "10"]),
    "events": Run(argv=["events", "--rate", "3000"], quick=["--seconds", "10"]),
    "ingest": Run(argv=["ingest"], quick=["--seconds", "5"]),
    "quiet": Run(argv=["quiet"], quick=["--seconds", "10"]),
    "noisy": Run(argv=["noisy"], quick=["--seconds", "15"]),
    "aged": Run(argv=["aged"], quick=["--rows", "500000"]),
    "soak": Run(argv=["soak"], quick=["--seconds", "60"]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure of one run, and the bound that it must keep."""

    number: str
    run: str
    what: str
    #: Where the figure stands in the report.
    path: Sequence[str]
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    #: What the report's figure is multiplied with to be shown, such as 100 for a share in percent.
    times: float = 1.0

    @property
    def required(self) -> str:
        """The bound, for people."""
        if self.at_least is not None:
            return f"≥ {_shown(self.at_least)}{self.unit}"
        return f"≤ {_shown(self.at_most or 0.0)}{self.unit}"

    def seen(self, report: Found) -> float | None:
        """Return the figure, None where the report has none."""
        value: Any = report
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value is None else float(value) * self.times

    def reached(self, value: float) -> bool:
        """Whether a figure keeps the bound."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def _sustained(rate: int, p99_ms: float) -> list[Goal]:
    run, name = f"sustained-{rate}", f"sustained at {rate:,}/s"
    return [
        # Less a fiftieth: the last answers come a little after the last arrival.
        Goal(
            number="P-2",
            run=run,
            what=f"{name}: delivered",
            path=["rate_per_second"],
            unit="/s",
            at_least=rate * 0.98,
        ),
        Goal(
            number="P-2", run=run, what=f"{name}: p99, commit to receiver", path=["p99_ms"], unit=" ms", at_most=p99_ms
        ),
        Goal(number="P-2", run=run, what=f"{name}: refused", path=[*_FIGURES, "refused"], at_most=0),
    ]


def _pages(name: str, what: str) -> Goal:
    path = [*_FIGURES, "pages", name, "ratio"]
    # A quarter more is within what two calls of the same page differ by.
    return Goal(
        number="P-7", run="aged", what=f"aged: page 400 of {what}, of page 1", path=path, unit=" ×", at_most=1.25
    )


def _noisy(spell: str, what: str) -> list[Goal]:
    path = [*_FIGURES, spell]
    return [
        Goal(
            number="P-6",
            run="noisy",
            what=f"noisy, {what}: the others' p99, of theirs alone",
            path=[*path, "p99_ratio"],
            unit=" ×",
            at_most=2,
        ),
        Goal(
            number="P-6",
            run="noisy",
            what=f"noisy, {what}: updates a waiting row and minute",
            path=[*path, "noise_updates_per_row_and_minute"],
            at_most=3,
        ),
    ]


GOALS: Final[Sequence[Goal]] = (
    Goal(number="P-1", run="drain", what="drain, two workers", path=["rate_per_second"], unit="/s", at_least=15_000),
    Goal(number="P-1", run="drain-1", what="drain, one worker", path=["rate_per_second"], unit="/s", at_least=12_000),
    Goal(
        number="P-1",
        run="limit",
        what="drain, of the slowest part alone",
        path=[*_FIGURES, "drain_share_of_slowest"],
        unit=" %",
        at_least=60,
        times=100,
    ),
    *_sustained(5_000, 50),
    *_sustained(7_000, 106),
    Goal(
        number="P-3",
        run="events",
        what="events at 3,000/s: delivered",
        path=["rate_per_second"],
        unit="/s",
        at_least=2_940,
    ),
    Goal(
        number="P-3",
        run="events",
        what="events at 3,000/s: p99, commit to receiver",
        path=["p99_ms"],
        unit=" ms",
        at_most=250,
    ),
    Goal(
        number="P-3",
        run="events",
        what="events at 3,000/s: p99 of the POST",
        path=[*_FIGURES, "ingest_p99_ms"],
        unit=" ms",
        at_most=250,
    ),
    Goal(number="P-4", run="ingest", what="ingest, one by one", path=["rate_per_second"], unit="/s", at_least=6_000),
    Goal(
        number="P-4",
        run="ingest",
        what="ingest, in batches of 100",
        path=[*_FIGURES, "batch_events_per_second"],
        unit="/s",
        at_least=25_000,
    ),
    Goal(number="P-5", run="quiet", what="quiet: p50, POST to receiver", path=["p50_ms"], unit=" ms", at_most=15),
    Goal(number="P-5", run="quiet", what="quiet: p99, POST to receiver", path=["p99_ms"], unit=" ms", at_most=40),
    Goal(
        number="P-5",
        run="quiet",
        what="idle stack, of a core",
        path=[*_FIGURES, "idle_cpu_percent_of_a_core"],
        unit=" %",
        at_most=5,
    ),
    *_noisy("hanging", "one hangs"),
    *_noisy("limited", "one gets 10/s"),
    Goal(
        number="P-7",
        run="aged",
        what="aged: the drain, of a fresh one",
        path=[*_FIGURES, "rate_ratio"],
        unit=" %",
        at_least=90,
        times=100,
    ),
    _pages("deliveries", "all deliveries"),
    _pages("endpoint", "an endpoint's"),
    _pages("endpoint_delivered", "an endpoint's delivered"),
    _pages("dead", "the dead"),
    Goal(number="P-8", run="drain", what="statements a delivery", path=["sql_per_delivery"], at_most=0.05),
    Goal(number="P-8", run="drain", what="Redis round trips a delivery", path=["redis_per_delivery"], at_most=0.05),
    Goal(
        number="P-8",
        run="drain",
        what="drain: a worker's peak memory",
        path=["worker_rss_mb"],
        unit=" MiB",
        at_most=150,
    ),
    Goal(
        number="P-8", run="soak", what="soak: a worker's peak memory", path=["worker_rss_mb"], unit=" MiB", at_most=150
    ),
    # Flat: less than a twentieth more than once it had settled.
    Goal(
        number="P-8",
        run="soak",
        what="soak: growth of a worker's memory",
        path=[*_FIGURES, "rss_growth_percent"],
        unit=" %",
        at_most=5,
    ),
    Goal(
        number="P-9", run="baseline", what="drain, of the plain way", path=[*_FIGURES, "ratio"], unit=" ×", at_least=10
    ),
)


def table(reports: Mapping[str, Found | None], runs: Iterable[str] = RUNS) -> str:
    """Return a Markdown table of the goals of `runs`, and below it what holds for all reports.

    `reports` are the runs' by their names; None where a run came to no report, absent where there was no such run.
    """
    wanted = set(runs)
    lines = ["| | scenario | required | seen | reached |", "|---|---|---|---|---|"]
    for goal in [one for one in GOALS if one.run in wanted]:
        report = reports.get(goal.run)
        value = None if report is None else goal.seen(report)
        if value is None:
            seen, reached = ("failed", "no") if goal.run in reports else ("not run", "–")
        else:
            seen, reached = f"{_shown(value)}{goal.unit}", "yes" if goal.reached(value) else "no"
            if report is not None and not report["ok"]:
                reached = "no: see below"
        lines.append(f"| {goal.number} | {goal.what} | {goal.required} | {seen} | {reached} |")
    return "\n".join([*lines, "", *_below(reports)])


def all_there(reports: Mapping[str, Found | None]) -> bool:
    """Whether every run came to a report, lost nothing, and sent nothing twice without a cause."""
    return all(report is not None and report["ok"] for report in reports.values())


def _below(reports: Mapping[str, Found | None]) -> list[str]:
    lines = []
    for name, report in reports.items():
        if report is None:
            lines.append(f"- {name} came to no report.")
        elif not report["ok"]:
            lines.append(f"- {name} is at fault: {report['lost']} lost, {report['duplicates']} came again.")
    found = [report for report in reports.values() if report is not None]
    if all_there(reports) and found:
        runs = "1 run" if len(found) == 1 else f"{len(found)} runs"
        lines.append(f"- Nothing was lost, and nothing came twice without a cause: {runs}.")
    loops = [ms for report in found for ms in report["settings"].get("python_loop_ms", [])]
    if loops:
        lines.append(
            f"- A million additions in Python took {min(loops)} to {max(loops)} ms of CPU; {found[0]['cores']} cores."
        )
        others = [report["settings"].get("others_cpu_percent") for report in found]
        known = [percent for percent in others if percent is not None]
        if known:
            lines.append(f"- Other processes took {min(known)} to {max(known)} % of the machine's CPU beside them.")
        if known and max(known) > BUSY_PERCENT:
            lines.append("- That is a busy machine: rates are lower bounds, and ratios of two runs say little.")
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in found[0]["versions"].items()) + ".")
    return lines


def _shown(value: float) -> str:
    if value == int(value) or abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
