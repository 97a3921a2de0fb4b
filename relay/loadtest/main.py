"""`relay loadtest`: runs a scenario, prints its report, and fails when anything was lost."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

import click

from relay.core.errors import InvalidInput
from relay.loadtest.scenario import Options

if TYPE_CHECKING:
    from types import FrameType

#: Each is a module here with `run(options) -> Report`; loaded when asked for, as each needs other parts of Relay.
SCENARIOS: Final = ("drain", "sustained", "events", "ingest", "quiet", "noisy", "aged", "soak", "limit", "baseline")


def run(
    scenario: str,
    *,
    workers: int = 2,
    count: int | None = None,
    seconds: float | None = None,
    rate: float | None = None,
    rows: int | None = None,
    as_json: bool = False,
    database_url: str | None = None,
    broker_url: str | None = None,
) -> int:
    """Run a scenario and print its report on stdout, progress on stderr; return the exit code.

    0 only if nothing was lost and nothing came twice without a cause. None leaves a number to the scenario, and a
    server to be started here. Raises InvalidInput for a scenario that there is not, Unavailable where a part does not
    start or does not answer.
    """
    if scenario not in SCENARIOS:
        raise InvalidInput(f"there is no scenario {scenario!r}: take one of {', '.join(SCENARIOS)}", field="scenario")
    options = Options(
        workers=workers,
        count=count,
        seconds=seconds,
        rate=rate,
        rows=rows,
        database_url=database_url,
        broker_url=broker_url,
        say=lambda text: click.echo(text, err=True),
    )
    report = importlib.import_module(f"relay.loadtest.{scenario}").run(options)
    click.echo(report.json() if as_json else report.table())
    return int(report.exit_code)


@click.command()
@click.argument("scenario", type=click.Choice(SCENARIOS))
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes.")
@click.option("--count", type=click.IntRange(1), default=None, help="Deliveries or events. Default: the scenario's.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=None, help="How long to send.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=None, help="A second: sustained, events, noisy, soak."
)
@click.option("--rows", type=click.IntRange(10), default=None, help="Finished deliveries in the tables: aged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else.")
@click.option("--database-url", default=None, help="A server to make a database on. Default: one is started.")
@click.option("--broker-url", default=None, help="A Redis to use under a prefix of its own. Default: one is started.")
def loadtest(
    scenario: str,
    *,
    workers: int,
    count: int | None,
    seconds: float | None,
    rate: float | None,
    rows: int | None,
    as_json: bool,
    database_url: str | None,
    broker_url: str | None,
) -> None:
    """Measure: start a Relay, give it work, count every delivery at the receiver and in the database.

    drain: deliveries that become due at once. sustained: a steady rate of events, each for ten endpoints. events: the
    same with one endpoint each. ingest: the API alone, one by one and in batches. quiet: single events on an idle
    system. noisy: a steady rate beside an endpoint that hangs, and one that is limited. aged: a drain, and lists, with
    millions of finished deliveries in the tables. soak: a steady rate for ten minutes, and the workers' memory. limit:
    each part of the hot path alone. baseline: the plain way (a Celery task and a statement for each delivery) against a
    drain.
    """
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(
        run(
            scenario,
            workers=workers,
            count=count,
            seconds=seconds,
            rate=rate,
            rows=rows,
            as_json=as_json,
            database_url=database_url,
            broker_url=broker_url,
        )
    )


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """End by unwinding, so that servers, processes and files go too."""
    sys.exit(128 + number)
