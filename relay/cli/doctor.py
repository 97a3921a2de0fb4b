"""`relay doctor`: looks at everything that deliveries stand on, and says of each fault what to do.

It needs no API: it reads the settings that a role started here would run with, and goes to the servers itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relay.cli.exits import FAILED, OK
from relay.cli.findings import Finding, Verdict, fail
from relay.client.transport import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from relay.config import Settings

_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".relay"),
    show_default=True,
    help="Where `relay up` keeps its servers, for what is not set.",
)
def doctor(*, as_json: bool, data: Path) -> None:
    """Look at settings, database, schema, Redis, clocks, workers, lateness and DNS; say what is wrong and what to do.

    Ends with 1 where something fails. Run it where workers run, with their settings.
    """
    failed = 0
    for finding in examine(data):
        failed += finding.verdict is Verdict.FAIL
        if as_json:
            shown = {"check": finding.check, "verdict": finding.verdict.value, "said": finding.said}
            click.echo(json.dumps({**shown, "remedy": finding.remedy or None}))
            continue
        mark = click.style(f"{finding.verdict.value:<4}", fg=_COLOURS[finding.verdict])
        click.echo(f"{mark}  {finding.check}: {printable(finding.said)}")
        if finding.remedy:
            click.echo(f"      {printable(finding.remedy)}")
    sys.exit(FAILED if failed else OK)


def examine(data: Path) -> Iterator[Finding]:
    """Look at one thing after the other."""
    from relay.cli import doctor_around, doctor_database
    from relay.cli.target import DEV_ENV, read_env
    from relay.config_sources import load_settings
    from relay.core.errors import ConfigurationError

    preset = running_servers(data)
    try:
        settings: Settings = load_settings(os.environ, dotenv=Path(".env"), preset=preset)
    except ConfigurationError as error:
        for line in str(error).splitlines()[1:]:
            yield fail("settings", line.strip(), "correct it in the environment or in .env, and start again")
        return
    yield from doctor_around.look_at_settings(settings)
    urls: list[str] = []
    yield from doctor_database.look(settings, urls)
    yield from doctor_around.look_at_redis(settings)
    yield from doctor_around.look_up_names(settings, urls)
    known = settings.url
    if known is None and preset:
        known = read_env(data / DEV_ENV.name).get("RELAY_URL")
    yield doctor_around.look_at_api(known)


def running_servers(data: Path) -> Mapping[str, str]:
    """What `relay up` in this folder presets; empty where there was none."""
    if not (data / "generated.env").is_file():
        return {}
    from relay.cli.dev_state import DevState
    from relay.embedded.postgres import PostgresServer
    from relay.embedded.redis import RedisServer

    preset = DevState(data).settings()
    for variable, kind in (("DATABASE_URL", PostgresServer), ("RELAY_BROKER_URL", RedisServer)):
        if (data / f"{kind.KIND.lower()}.json").is_file():
            preset[variable] = kind(data).url
    return preset
