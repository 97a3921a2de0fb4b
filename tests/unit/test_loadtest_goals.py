"""The load test's table says of each goal what was seen, and never more than the reports do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from relay.loadtest import bench, goals, sweep
from relay.loadtest.main import loadtest
from relay.loadtest.memory import summary
from relay.loadtest.report import Report

if TYPE_CHECKING:
    from pathlib import Path


def report_of(figures: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """A scenario's JSON object, in order unless `values` say otherwise."""
    return {
        "ok": True,
        "lost": 0,
        "duplicates": 0,
        "cores": 2,
        "versions": {"relay": "1.0"},
        "settings": {"figures": figures or {}, "python_loop_ms": [40.0, 55.5], "others_cpu_percent": 7.5},
        **values,
    }


def cells(text: str, what: str) -> list[str]:
    """The cells of the table's line of one goal: number, required, seen, reached."""
    (line,) = [line for line in text.splitlines() if f"| {what} |" in line]
    found = [cell.strip() for cell in line.strip("|").split("|")]
    return [found[0], *found[2:]]


def test_figures_are_held_against_their_bounds() -> None:
    """A figure at its bound reaches it, one beyond does not; shares are shown in percent."""
    text = goals.table(
        {
            "drain": report_of(rate_per_second=15_000.0, sql_per_delivery=0.0501, worker_rss_mb=115.6),
            "aged": report_of({"rate_ratio": 0.899, "pages": {"dead": {"ratio": 1.02}}}),
        }
    )

    assert cells(text, "drain, two workers") == ["P-1", "≥ 15,000/s", "15,000/s", "yes"]
    assert cells(text, "statements a delivery") == ["P-8", "≤ 0.05", "0.0501", "no"]
    assert cells(text, "drain: a worker's peak memory") == ["P-8", "≤ 150 MiB", "115.6 MiB", "yes"]
    assert cells(text, "aged: the drain, of a fresh one") == ["P-7", "≥ 90 %", "89.9 %", "no"]
    assert cells(text, "aged: page 400 of the dead, of page 1") == ["P-7", "≤ 1.25 ×", "1.02 ×", "yes"]
    assert "Nothing was lost, and nothing came twice without a cause: 2 runs." in text
    assert "40.0 to 55.5 ms" in text
    assert "7.5 to 7.5 % of the machine's CPU" in text


def test_a_busy_machine_is_named() -> None:
    """Where others took much of the CPU in any run, the table says what its figures are worth; else it does not."""
    busy = report_of(rate_per_second=1.0)
    busy["settings"]["others_cpu_percent"] = 10.1

    assert "busy machine" in goals.table({"drain": busy, "quiet": report_of()})
    assert "busy machine" not in goals.table({"quiet": report_of()})


def test_what_was_not_seen_is_not_reached() -> None:
    """A run that was not asked for, one that failed and a figure that a report lacks are told apart from one that is there."""
    reports = {"drain": None, "quiet": report_of(p50_ms=None)}
    text = goals.table(reports)

    assert cells(text, "drain, one worker")[2:] == ["not run", "–"]
    assert cells(text, "drain, two workers")[2:] == ["failed", "no"]
    assert cells(text, "quiet: p50, POST to receiver")[2:] == ["failed", "no"]
    assert "- drain came to no report." in text
    assert "Nothing was lost" not in text
    assert not goals.all_there(reports)


def test_a_loss_outweighs_every_figure() -> None:
    """A fast drain that lost a delivery has reached nothing, and the table says what was lost."""
    reports = {"drain": report_of(ok=False, lost=1, rate_per_second=99_000.0)}
    text = goals.table(reports)

    assert cells(text, "drain, two workers")[3] == "no: see below"
    assert "- drain is at fault: 1 lost, 0 came again." in text
    assert not goals.all_there(reports)


def test_every_requirement_has_a_goal_and_every_run_is_a_call() -> None:
    """P-1 to P-9 are all in the table; runs, cut short too, are calls that the command takes."""
    assert {goal.number for goal in goals.GOALS} == {f"P-{number}" for number in range(1, 10)}
    assert {goal.run for goal in goals.GOALS} == goals.RUNS.keys()
    for run in goals.RUNS.values():
        loadtest.make_context("loadtest", [*run.argv, *run.quick])
    with pytest.raises(click.BadParameter):
        loadtest.make_context("loadtest", ["nonesuch"])


def test_kept_reports_are_shown_again(tmp_path: Path) -> None:
    """Of each run the last report counts; showing them exits with 1 where one is at fault, and wants there to be some."""
    kept = tmp_path / "bench.jsonl"
    assert CliRunner().invoke(bench.bench, ["--show", "--keep", str(kept)]).exit_code == 2

    bench.add(kept, "quiet", report_of(p50_ms=99.0))
    bench.add(kept, "drain", report_of(rate_per_second=1.0))
    bench.add(kept, "quiet", report_of(p50_ms=9.0))

    assert list(bench.read(kept)) == ["drain", "quiet"]
    shown = CliRunner().invoke(bench.bench, ["--show", "--keep", str(kept)])
    assert shown.exit_code == 0
    assert cells(shown.output, "quiet: p50, POST to receiver")[2:] == ["9 ms", "yes"]

    bench.add(kept, "quiet", None)

    assert CliRunner().invoke(bench.bench, ["--show", "--keep", str(kept)]).exit_code == 1
    alone = CliRunner().invoke(bench.bench, ["--show", "--only", "drain", "--keep", str(kept)])
    assert (alone.exit_code, "quiet" in alone.output) == (0, False)


def test_growth_counts_from_when_memory_had_settled() -> None:
    """What a process takes in the first fifth of the time is no growth; what comes after is."""
    found = summary([(0.0, 80.0), (10.0, 95.0), (20.0, 100.0), (60.0, 101.0), (100.0, 103.0)])

    assert (found["rss_start_mb"], found["rss_settled_mb"], found["rss_end_mb"]) == (80.0, 100.0, 103.0)
    assert found["rss_growth_percent"] == 3.0
    assert summary([]) == {}
    assert summary([(0.0, 50.0)])["rss_growth_percent"] == 0.0


def test_a_sweep_has_a_line_for_each_value() -> None:
    """Each tried value stands beside what its drain came to."""
    report = Report(
        scenario="drain",
        ok=True,
        cores=2,
        rate_per_second=4_321.4,
        cpu_us_per_delivery={"worker": 120.0, "postgres": 70.4},
        sql_per_delivery=0.02,
        worker_rss_mb=111.0,
        settings={"python_loop_ms": [40.2, 41.0], "others_cpu_percent": 12.5},
    )

    lines = sweep.table([sweep.TRIALS[0], sweep.TRIALS[1]], [report, report]).splitlines()

    assert lines[3] == "| RELAY_CLAIM_BATCH | 50 | 4,321 | 120 | 190 | 0.02 | 111 | 40 to 41 | 12.5 |"
    assert len(lines) == 4
