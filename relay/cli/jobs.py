"""`relay jobs`: single requests to any URL, without an endpoint, and what becomes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click

from relay.cli.deliveries import each, show_standing
from relay.cli.exits import FAILED, INTERRUPTED, OK, UNFINISHED
from relay.cli.output import read_secret, show_fields, show_json
from relay.cli.send import line_of, read_data
from relay.cli.target import talks
from relay.client import WaitedTooLong

if TYPE_CHECKING:
    from relay.client import Relay

#: Seconds to wait for a job that is due at once, where the command does not say.
USUAL_WAIT_SECS: Final = 10.0

_IDS = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)


@click.group()
def jobs() -> None:
    """Have single requests made, look at them, and send them again or call them off."""


@jobs.command("send")
@click.argument("to", metavar="URL")
@click.option("--data", default=None, help="The body; @FILE reads a file, - standard input. Default: none.")
@click.option("--content-type", default=None, help="What the body is. Default: JSON where it is JSON, else not said.")
@click.option(
    "--header",
    "given",
    multiple=True,
    help="A header to send, as 'Name: value'; @FILE reads lines of them, - standard input. May be repeated.",
)
@click.option("--sign", type=click.Choice(["none", "relay", "standard"]), default=None, help="Default: none.")
@click.option("--max-attempts", type=int, default=None, help="How often it is tried. Default: 5.")
@click.option("--timeout-ms", type=int, default=None, help="Milliseconds that the exchange may take.")
@click.option("--delay", type=float, default=None, help="Seconds until it is due. Default: at once.")
@click.option("--expires-in", type=float, default=None, help="Seconds after which it is given up.")
@click.option("--idempotency-key", default=None, help="Sent twice under one key it is one job. Default: a new one.")
@click.option(
    "--wait", type=float, default=None, help="Seconds to wait for it; 0: none. Default: 10, or none with --delay."
)
@talks
def send_job(
    to: str,
    *,
    data: str | None,
    content_type: str | None,
    given: tuple[str, ...],
    sign: str | None,
    max_attempts: int | None,
    timeout_ms: int | None,
    delay: float | None,
    expires_in: float | None,
    idempotency_key: str | None,
    wait: float | None,
    relay: Relay,
    as_json: bool,
) -> None:
    """Have one POST made to URL and show what becomes of it.

    What is secret in a header is better read from a file: other users of this machine see command lines.

    Ends with 0 when it was delivered (or not waited for), 1 when it failed for good, 4 when it is still under way.
    """
    body = b"" if data is None else read_data(data)
    taken = relay.enqueue(
        to,
        body,
        headers=_headers(given),
        content_type=content_type or ("application/json" if _is_json(body) else None),
        signing=sign,
        max_attempts=max_attempts,
        timeout_ms=timeout_ms,
        delay=delay,
        expires_in=expires_in,
        idempotency_key=idempotency_key,
    )
    if wait is None:
        wait = 0.0 if delay else USUAL_WAIT_SECS
    try:
        if as_json:
            show_json(taken)
        else:
            click.echo(f"job {taken.id} {'was taken before' if taken.replayed else 'accepted'}")
        code = _watch(relay, taken.id, wait, as_json=as_json) if wait else OK
    except KeyboardInterrupt:
        click.echo(f"\nIt goes on: relay jobs get {taken.id}", err=True)
        code = INTERRUPTED
    sys.exit(code)


@jobs.command("get")
@click.argument("job_id", metavar="ID")
@talks
def get_job(job_id: str, *, relay: Relay, as_json: bool) -> None:
    """Show one job with its attempts."""
    one = relay.jobs.get(job_id)
    if as_json:
        show_json(one)
        return
    fields = ("id", "url", "state", "reason", "attempt_count", "generation", "endpoint_id")
    options = ("headers", "content_type", "signing", "max_attempts", "timeout_ms", "expires_at")
    show_standing(one, (*fields, *options))


@jobs.command("replay")
@_IDS
@click.option("--force", is_flag=True, help="Delivered ones, too.")
@talks
def replay_jobs(job_ids: tuple[str, ...], *, force: bool, relay: Relay, as_json: bool) -> None:
    """Send dead or canceled jobs again. Ends with 1 where one of them was refused."""
    sys.exit(each(job_ids, lambda one: relay.jobs.replay(one, force=force), as_json=as_json))


@jobs.command("cancel")
@_IDS
@talks
def cancel_jobs(job_ids: tuple[str, ...], *, relay: Relay, as_json: bool) -> None:
    """Call waiting jobs off. Ends with 1 where one of them was refused."""
    sys.exit(each(job_ids, relay.jobs.cancel, as_json=as_json))


@jobs.command()
@click.option("--secret-file", type=click.File("r"), help="A secret of your own; - reads standard input.")
@talks
def rotate_secret(*, secret_file: IO[str] | None, relay: Relay, as_json: bool) -> None:
    """Make or replace the secret that signs jobs, and show it, this once. An old one signs too for a while."""
    made = relay.rotate_job_secret(secret=read_secret(secret_file))
    if as_json:
        show_json(made)
        return
    show_fields([("secret", made.secret), ("the old one signs until", made.previous_secret_expires_at)])


def _watch(relay: Relay, job_id: str, secs: float, *, as_json: bool) -> int:
    try:
        job = relay.jobs.wait(job_id, timeout=secs)
    except WaitedTooLong:
        if not as_json:
            click.echo(f"  {job_id}  still under way")
        return UNFINISHED
    if as_json:
        show_json(job)
    else:
        click.echo(line_of(job))
    return OK if job.state == "delivered" else FAILED


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _headers(given: tuple[str, ...]) -> list[tuple[str, str]]:
    """Read `--header` options, in order. Raises click's BadParameter, without the value: it may be a secret."""
    found: list[tuple[str, str]] = []
    for text in (line for one in given for line in _lines(one)):
        name, mark, value = text.partition(":")
        name = name.strip()
        if not mark or not name:
            raise click.BadParameter("a header is 'Name: value'", param_hint="--header")
        found.append((name, value.strip()))
    return found


def _lines(given: str) -> list[str]:
    if given != "-" and not given.startswith("@"):
        return [given]
    try:
        text = sys.stdin.read() if given == "-" else Path(given[1:]).read_text("utf-8")
    except (OSError, ValueError):
        raise click.BadParameter(f"{given.removeprefix('@')!r} cannot be read", param_hint="--header") from None
    return [line for line in text.splitlines() if line.strip()]
