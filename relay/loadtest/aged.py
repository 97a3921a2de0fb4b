"""The aged system: the same drain with millions of finished deliveries in the tables, and lists that are long.

Fresh and aged drains take turns with nothing but the ageing between, in one stack; of each the faster of two counts, as
whatever else the machine does can only slow one down.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from relay.loadtest import drain, history, pages
from relay.loadtest.calibration import python_loop_ms
from relay.loadtest.seed import make_workspace

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options
    from relay.loadtest.stack import Stack

#: Finished deliveries; there are twice as many attempts.
ROWS: Final = 5_000_000
#: Endpoints that they were for.
ENDPOINTS: Final = 50
#: Drains before, and drains after.
DRAINS: Final = 2


def run(options: Options) -> Report:
    """Drain, make `options.rows` finished deliveries, and drain again; then read the lists, deep.

    The report is the faster aged drain's, `ok` only if every drain was.
    """
    rows = options.rows or ROWS
    with options.stack() as stack:
        fresh = _drains(stack, options, "fresh")
        workspace = make_workspace(
            stack.connection, stack.vault, ["http://127.0.0.1:9/never"] * ENDPOINTS, name="history"
        )
        options.say(f"making {rows:,} finished deliveries")
        made = history.make(
            stack.database_url,
            stack.connection,
            workspace,
            rows,
            here=options.database_url is None,
            say=options.say,
        )
        aged = _drains(stack, options, "aged")
        lists = pages.measure(stack, workspace, options.say)
        before, after = _fastest(fresh), _fastest(aged)
        return replace(
            after,
            scenario="aged",
            ok=all(report.ok for report in [*fresh, *aged]),
            settings={
                **after.settings,
                "figures": {
                    "made": asdict(made),
                    "fresh": _figures(fresh),
                    "aged": _figures(aged),
                    "rate_ratio": _ratio(after.rate_per_second, before.rate_per_second),
                    # The same from CPU instead of the clock: other work on the machine shows less in it.
                    "cpu_ratio": _ratio(_cpu(before), _cpu(after)),
                    "pages": lists,
                    "python_loop_ms_at_end": python_loop_ms(),
                },
            },
        )


def _drains(stack: Stack, options: Options, name: str) -> list[Report]:
    reports = []
    for number in range(DRAINS):
        reports.append(drain.run_in(stack, options, name=f"{name} {number + 1}"))
        stack.stop_roles()
    return reports


def _fastest(reports: list[Report]) -> Report:
    return max(reports, key=lambda report: report.rate_per_second or 0.0)


def _figures(reports: list[Report]) -> list[dict[str, Any]]:
    return [
        {
            "rate_per_second": report.rate_per_second,
            "lost": report.lost,
            "duplicates": report.duplicates,
            "cpu_us_per_delivery": _cpu(report),
            "python_loop_ms": report.settings["python_loop_ms"],
            "others_cpu_percent": report.settings["others_cpu_percent"],
        }
        for report in reports
    ]


def _cpu(report: Report) -> float:
    """CPU microseconds a delivery of all that an operator runs."""
    return round(sum(cost for role, cost in report.cpu_us_per_delivery.items() if role != "sink"), 1)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 3) if part and whole else None
