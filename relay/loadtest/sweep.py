"""Tries values of what a worker's speed depends on, one at a time, with a drain each: where the defaults come from.

`python -m relay.loadtest.sweep` prints a Markdown table. Rounds go over all values before any is tried again, so that a slow
minute of the machine falls on several; of each value the fastest round counts.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import click

from relay.core.errors import Unavailable
from relay.loadtest import drain
from relay.loadtest.scenario import Options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.loadtest.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One value of one thing, all else as by default."""

    what: str
    value: str
    environ: Mapping[str, str] = field(default_factory=dict)
    preamble: str = ""
    workers: int = 2


def _setting(name: str, *values: int) -> list[Trial]:
    return [Trial(what=name, value=str(value), environ={name: str(value)}) for value in values]


def _recorder(name: str, what: str, *values: float) -> list[Trial]:
    return [
        Trial(what=what, value=str(value), preamble=f"from relay.delivery import recorder\nrecorder.{name} = {value}")
        for value in values
    ]


#: The first is the defaults themselves.
TRIALS: Final[Sequence[Trial]] = (
    Trial(what="defaults", value=""),
    *_setting("RELAY_CLAIM_BATCH", 50, 100, 400),
    *_setting("RELAY_MAX_IN_FLIGHT", 128, 256, 1024),
    *_recorder("BATCH", "recorder's batch, rows", 100, 250, 1000),
    *_recorder("GATHER_SECS", "recorder's wait, seconds", 0.002, 0.02),
    *[Trial(what="workers", value=str(number), workers=number) for number in (1, 3, 4)],
)


@click.command()
@click.option("--count", type=click.IntRange(1), default=20_000, show_default=True, help="Deliveries of each drain.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="How often each value is tried.")
@click.option("--only", multiple=True, help="Just what is named so, such as RELAY_CLAIM_BATCH; may be repeated.")
def sweep(*, count: int, rounds: int, only: Sequence[str]) -> None:
    """Try each value, and print a table of what its fastest round came to. Exits with 1 where anything was lost."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    trials = [trial for trial in TRIALS if not only or trial.what in {"defaults", *only}]
    best: dict[int, Report] = {}
    for turn in range(rounds):
        for place, trial in enumerate(trials):
            click.echo(f"round {turn + 1} of {rounds}: {trial.what} {trial.value}", err=True)
            try:
                report = drain.run(_options(trial, count))
            except Unavailable as error:
                # What the other values came to is not thrown away for it.
                click.echo(f"left out: {error}", err=True)
                continue
            if not report.ok:
                click.echo(f"{report.lost} lost, {report.duplicates} came again", err=True)
                sys.exit(1)
            best[place] = max(best.get(place, report), report, key=lambda one: one.rate_per_second or 0.0)
            click.echo(line(trial, report), err=True)
    click.echo(table([trials[place] for place in sorted(best)], [best[place] for place in sorted(best)]))


def table(trials: Sequence[Trial], reports: Sequence[Report]) -> str:
    """Return a Markdown table with a line for each trial and its report."""
    lines = [
        "| what | value | deliveries/s | worker's CPU, µs | all CPU, µs | statements | memory, MiB | loop, ms | others, % CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(line(trial, report) for trial, report in zip(trials, reports, strict=True))])


def line(trial: Trial, report: Report) -> str:
    """Return a trial's line of the table."""
    cpu = report.cpu_us_per_delivery
    columns = [
        trial.what,
        trial.value,
        f"{report.rate_per_second or 0:,.0f}",
        f"{cpu.get('worker', 0):.0f}",
        f"{sum(cpu.values()):.0f}",
        f"{report.sql_per_delivery}",
        f"{report.worker_rss_mb or 0:.0f}",
        " to ".join(f"{ms:.0f}" for ms in _loops(report)),
        str(report.settings.get("others_cpu_percent", "")),
    ]
    return f"| {' | '.join(columns)} |"


def _options(trial: Trial, count: int) -> Options:
    return Options(
        workers=trial.workers,
        count=count,
        environ=trial.environ,
        preamble=trial.preamble,
        say=lambda text: click.echo(text, err=True),
    )


def _loops(report: Report) -> list[float]:
    loops = report.settings.get("python_loop_ms")
    return loops if isinstance(loops, list) else []


if __name__ == "__main__":
    sweep()
