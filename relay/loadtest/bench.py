"""Runs every scenario and prints what was required beside what was seen: `make bench`.

Each run is a `relay loadtest … --json` of its own, as an operator would start it. Its report is kept as a line of a file, so
that a table can be printed again, and an interrupted bench go on (`--only`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from relay.embedded.launch import shim_argv
from relay.loadtest import goals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Where reports are kept by default.
KEPT: Final = Path(".relay/bench.jsonl")


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(goals.RUNS)), help="Just this run; may be repeated.")
@click.option("--quick", is_flag=True, help="Shorter runs and fewer rows: a rough idea in a few minutes.")
@click.option(
    "--keep", type=click.Path(path_type=Path), default=KEPT, show_default=True, help="Reports are added to it."
)
@click.option("--show", is_flag=True, help="Run nothing: print the table of the reports kept, of each run the last.")
def bench(*, only: Sequence[str], quick: bool, keep: Path, show: bool) -> None:
    """Run the load test's scenarios, one after the other, and print the table of what was required and seen.

    Exits with 1 where a run failed, lost a delivery or sent one twice without a cause. A figure that falls short of what
    is required is no fault: machines differ.
    """
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if not show:
        keep.parent.mkdir(parents=True, exist_ok=True)
        for name in only or goals.RUNS:
            click.echo(f"--- {name}", err=True)
            add(keep, name, run(name, quick=quick))
    elif not keep.exists():
        raise click.UsageError(f"there are no reports in {keep} yet: run it without --show first")
    reports = read(keep, only)
    click.echo(goals.table(reports, only or goals.RUNS))
    sys.exit(0 if goals.all_there(reports) else 1)


def run(name: str, *, quick: bool) -> dict[str, Any] | None:
    """Run one scenario, its progress on stderr; return its report, None where it came to none."""
    chosen = goals.RUNS[name]
    done = subprocess.run(  # noqa: S603  # our own interpreter and module
        shim_argv(
            [
                *(sys.executable, "-m", "relay.cli.main", "loadtest", "--json"),
                *(*chosen.argv, *(chosen.quick if quick else ())),
            ],
            death_signal=signal.SIGTERM,
        ),
        stdout=subprocess.PIPE,
        check=False,
    )
    lines = done.stdout.splitlines()
    report: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return report


def add(keep: Path, name: str, report: dict[str, Any] | None) -> None:
    """Add a run's report to the file."""
    with keep.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"run": name, "report": report}) + "\n")


def read(keep: Path, only: Iterable[str] = ()) -> dict[str, dict[str, Any] | None]:
    """Return the last report of each run in the file, or of those in `only`, in the order in which they run.

    Raises FileNotFoundError where there is no such file.
    """
    found = {}
    for line in keep.read_text("utf-8").splitlines():
        kept = json.loads(line)
        found[kept["run"]] = kept["report"]
    wanted = set(only) or goals.RUNS.keys()
    return {name: found[name] for name in goals.RUNS if name in found and name in wanted}


if __name__ == "__main__":
    bench()
