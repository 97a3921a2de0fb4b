"""The `relay` command: every role of an installation, and what a person needs around them."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click
from click.shell_completion import CompletionItem

from relay import __version__
from relay.cli.exits import FAILED, INTERRUPTED, UNREACHABLE
from relay.core.errors import RelayError

if TYPE_CHECKING:
    from relay.config import Settings

#: Commands that are modules of their own, loaded when they are asked for: name to module, and to the first sentence of
#: their help, so that the list of all needs none of them, nor what they need.
_ELSEWHERE: Final = {
    "completion": ("relay.cli.completion", "Print what makes a shell complete `relay`."),
    "deliveries": ("relay.cli.deliveries", "See what became of deliveries, and send them again or call them off."),
    "doctor": (
        "relay.cli.doctor",
        "Look at settings, database, schema, Redis, clocks, workers, lateness and DNS; say what is wrong and what to do.",
    ),
    "endpoints": ("relay.cli.endpoints", "Look after the workspace's endpoints."),
    "events": ("relay.cli.deliveries", "See what was sent in."),
    "jobs": ("relay.cli.jobs", "Have single requests made, look at them, and send them again or call them off."),
    "listen": (
        "relay.cli.listen",
        "Receive here: registers an endpoint, prints what arrives, and removes the endpoint at the end.",
    ),
    "loadtest": (
        "relay.loadtest.main",
        "Measure: start a Relay, give it work, count every delivery at the receiver and in the database.",
    ),
    "replay": ("relay.cli.replay", "Send an endpoint's dead deliveries again, or those that filters name."),
    "send": ("relay.cli.send", "Send one event and show what becomes of its deliveries."),
}

#: Characters of a command's first sentence, at most.
_HELP_LENGTH: Final = 200

#: What the system says of an output that takes no more: full, over a quota or a limit, broken, or not open.
_OUTPUT_FAULTS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


class Commands(click.Group):
    """A group whose errors are a sentence on stderr and an exit code (relay/cli/exits.py), not a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in order."""
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name in _ELSEWHERE:
            module, _ = _ELSEWHERE[cmd_name]
            return cast("click.Command", getattr(importlib.import_module(module), cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command is for."""
        with formatter.section("Commands"):
            formatter.write_dl(self._told(ctx))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, and options, that begin so."""
        named = [CompletionItem(name, help=says) for name, says in self._told(ctx) if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def _told(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return each command and what it is for, loading none."""
        told = []
        for name in self.list_commands(ctx):
            own = super().get_command(ctx, name)
            told.append((name, _ELSEWHERE[name][1] if own is None else own.get_short_help_str(_HELP_LENGTH)))
        return told

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, and end the process with its exit code."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_FAULTS:
                raise
            _drop_output()
            click.echo(f"relay: the output cannot be written ({error.strerror})", err=True)
            sys.exit(FAILED)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # After the terminal's own ^C.
            click.echo("", err=True)
            ctx.exit(INTERRUPTED)
        except RelayError as error:
            click.echo(f"relay: {_told(error)}", err=True)
            ctx.exit(_code_of(error))
        except UnicodeEncodeError as error:
            # Bytes that are no UTF-8 come from outside as halves of surrogate pairs (PEP 383).
            if not any("\udc80" <= one <= "\udcff" for one in error.object):
                raise
            raise click.UsageError("the command line or the environment has bytes that are not UTF-8 text") from None
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


def _told(error: RelayError) -> str:
    """The error's sentence; with how to send again what has a key, where nobody knows whether it was taken."""
    errors = sys.modules.get("relay.client.errors")
    if errors is None or not isinstance(error, (errors.Unreachable, errors.UnexpectedAnswer, errors.ServerFault)):
        return str(error)
    if error.idempotency_key is None:
        return str(error)
    # Its own sentence names the key to programs, as what it is called there.
    return f"{error.args[0]} (sent again with --idempotency-key {shlex.quote(error.idempotency_key)} it counts once)"


def _drop_output() -> None:
    # Else what is buffered is tried once more at the end, and fails with a traceback.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
