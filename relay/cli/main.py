"""The `relay` command: every role of an installation, and what a person needs around them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click

from relay import __version__
from relay.cli.exits import FAILED, UNREACHABLE
from relay.core.errors import RelayError

if TYPE_CHECKING:
    from relay.config import Settings

#: Commands that are modules of their own, loaded when they are asked for: name to module.
_ELSEWHERE: Final = {
    "completion": "relay.cli.completion",
    "deliveries": "relay.cli.deliveries",
    "doctor": "relay.cli.doctor",
    "endpoints": "relay.cli.endpoints",
    "events": "relay.cli.deliveries",
    "jobs": "relay.cli.jobs",
    "listen": "relay.cli.listen",
    "loadtest": "relay.loadtest.main",
    "replay": "relay.cli.replay",
    "send": "relay.cli.send",
}


class Commands(click.Group):
    """A group whose errors are a sentence on stderr and an exit code (relay/cli/exits.py), not a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in order."""
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name in _ELSEWHERE:
            return cast("click.Command", getattr(importlib.import_module(_ELSEWHERE[cmd_name]), cmd_name))
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RelayError as error:
            click.echo(f"relay: {error}", err=True)
            ctx.exit(_code_of(error))
        except Exception as error:
            said = _database_says(error)
            if said is None:
                raise
            click.echo(f"relay: the database says: {said}", err=True)
            ctx.exit(FAILED)
        return None


def _code_of(error: RelayError) -> int:
    # Whoever has no client loaded did not talk to the API.
    errors = sys.modules.get("relay.client.errors")
    unreachable = errors is not None and isinstance(error, (errors.Unreachable, errors.UnexpectedAnswer))
    return UNREACHABLE if unreachable else FAILED


def _database_says(error: Exception) -> str | None:
    """A database error's own words; None for any other. The drivers are loaded by the commands that use them."""
    sqlalchemy, psycopg = sys.modules.get("sqlalchemy"), sys.modules.get("psycopg")
    if sqlalchemy is not None and isinstance(error, sqlalchemy.exc.DBAPIError):
        return str(error.orig).strip()
    return str(error).strip() if psycopg is not None and isinstance(error, psycopg.Error) else None


def read_settings(role: str) -> Settings:
    """Read the settings of a process and set its logging up."""
    from relay import logs
    from relay.config_sources import load_settings

    settings = load_settings(os.environ, dotenv=Path(".env"))
    logs.configure(role, level=settings.log_level, style=settings.log_format)
    return settings


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="relay")
def main() -> None:
    """Relay delivers webhooks: signed, retried, recorded, at least once."""


@main.command()
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".relay"),
    show_default=True,
    help="Where databases and generated keys are kept.",
)
def up(workers: int, data: Path) -> None:
    """Run everything on this machine: database, Redis, API, publisher, workers, beat, Flower and a test receiver."""
    from relay.cli.up import run_up

    sys.exit(run_up(workers=workers, base=data))


@main.command()
@click.option("--revision", default="head", show_default=True, help="How far.")
def migrate(revision: str) -> None:
    """Bring the database's schema up to date. Safe to run from several machines at once."""
    from relay.config import require
    from relay.store.migrate import upgrade

    settings = read_settings("migrate")
    upgrade(require(settings.database_url, "DATABASE_URL"), revision)
    click.echo("The schema is up to date.")


@main.command()
def api() -> None:
    """Serve the HTTP API on RELAY_BIND."""
    from relay.cli.api import serve

    sys.exit(serve(read_settings("api")))


@main.command()
def publisher() -> None:
    """Announce due deliveries on the stream. Run two or more: one works, the others wait."""
    from relay.cli.roles import run_publisher

    sys.exit(run_publisher(read_settings("publisher")))


@main.command()
@click.option("--name", default=None, help="This worker's name in Flower. Default: host and process id.")
def worker(name: str | None) -> None:
    """Claim and send deliveries. Run as many as there are cores to spare."""
    # libcurl reads it when it is loaded, and would write the keys of every TLS session there.
    os.environ.pop("SSLKEYLOGFILE", None)
    from relay.cli.roles import run_worker

    sys.exit(run_worker(read_settings("worker"), name=name))


@main.command()
def beat() -> None:
    """Send the ticks of the housekeeping tasks. Two do no harm."""
    from relay.cli.roles import run_beat

    sys.exit(run_beat(read_settings("beat")))


@main.command()
def flower() -> None:
    """Show workers and tasks on RELAY_FLOWER_BIND, behind RELAY_FLOWER_AUTH."""
    from relay.cli.roles import run_flower

    run_flower(read_settings("flower"))


@main.command()
def testkit() -> None:
    """Run a receiver to try things on, at RELAY_TESTKIT_BIND: verifies, fails, hangs and misbehaves on request.

    GET / of it lists its paths and their parameters.
    """
    from relay.testkit.main import run

    settings = read_settings("testkit")
    secret = settings.testkit_secret
    sys.exit(
        run(
            settings.testkit_bind.host,
            settings.testkit_bind.port,
            None if secret is None else secret.get_secret_value(),
        )
    )


@main.command()
@click.option("--markdown", is_flag=True, help="Print the manual's page of settings instead.")
def config(markdown: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Print the effective settings and where each comes from, secrets hidden."""
    if markdown:
        from relay.cli import config_docs

        click.echo(config_docs.markdown(), nl=False)
        return
    from relay.config import effective
    from relay.config_sources import load_settings

    settings = load_settings(os.environ, dotenv=Path(".env"))
    for name, value, source in effective(settings):
        click.echo(f"{name}={value}" + ("" if source == "default" else f"  # {source}"))


@main.group()
def partitions() -> None:
    """Look after the attempt log's day partitions."""


@partitions.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(*, as_json: bool) -> None:
    """Show which days have a partition. Ends with 1 where one of the next days lacks, or the default one holds rows."""
    from relay.cli.partitions import show

    sys.exit(show(read_settings("partitions"), as_json=as_json))


@main.group()
def keys() -> None:
    """Look after the master keys that seal secrets."""


@keys.command()
def rotate() -> None:
    """Seal every secret with the first of RELAY_MASTER_KEYS, while everything runs.

    First add the new key to the list of all workers and API processes, as the second, and restart them; then make it
    the first everywhere, restart again, and run this. It says which of the older keys may go.
    """
    from relay.cli.keys import rotate as run

    sys.exit(run(read_settings("keys")))


if __name__ == "__main__":
    main()
