"""`relay endpoints`: the workspace's endpoints, looked at and looked after."""

from __future__ import annotations

import inspect
import json
import sys
from typing import IO, TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from relay.cli.exits import FAILED, OK, UNFINISHED
from relay.cli.output import cell, plain, read_secret, show_fields, show_json, show_table
from relay.cli.target import complete_endpoint, talks
from relay.client.endpoints import Endpoints

if TYPE_CHECKING:
    from relay.client import Endpoint, Relay, Rotated

#: What an endpoint is made with, but for its URL and its secret, which does not belong on a command line.
FIELDS: Final = tuple(sorted(set(inspect.signature(Endpoints.create).parameters) - {"self", "url", "secret"}))

#: Fields that are text, also where it looks like a number.
_TEXTS: Final = frozenset({"description", "signing", "transport", "url"})


def _complete_field(_ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(f"{name}=") for name in (*FIELDS, "url") if name.startswith(typed)]


_ID = click.argument("endpoint_id", metavar="ID", shell_complete=complete_endpoint)
_GIVEN = click.argument("given", metavar="[FIELD=VALUE]...", nargs=-1, shell_complete=_complete_field)
_SECRET = click.option("--secret-file", type=click.File("r"), help="A secret of your own; - reads standard input.")


@click.group()
def endpoints() -> None:
    """Look after the workspace's endpoints."""


@endpoints.command("list")
@click.option("--limit", type=click.IntRange(1), default=None, help="So many at most. Default: all.")
@talks
def list_(*, limit: int | None, relay: Relay, as_json: bool) -> None:
    """List endpoints, the newest first."""
    found = relay.endpoints.list(limit=limit)
    if as_json:
        for one in found:
            show_json(one)
        return
    names = ("id", "url", "kind", "state", "types", "ok 24h", "failed 24h", "last success")
    show_table(names, (_row(one) for one in found))


@endpoints.command()
@_ID
@talks
def get(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Show one endpoint."""
    _show(relay.endpoints.get(endpoint_id), as_json=as_json)


@endpoints.command()
@click.argument("url_")
@_GIVEN
@_SECRET
@talks
def create(url_: str, given: tuple[str, ...], *, secret_file: IO[str] | None, relay: Relay, as_json: bool) -> None:
    """Make an endpoint for URL, and show its secret, this once.

    FIELD=VALUE sets a field of the API's, the value JSON, or else text: rate_per_second=50 event_types=order.*,user.*
    """
    # What is null is left to Relay.
    given_fields = {name: value for name, value in _fields(given, FIELDS).items() if value is not None}
    _show(relay.endpoints.create(url_, secret=read_secret(secret_file), **given_fields), as_json=as_json)


@endpoints.command()
@_ID
@_GIVEN
@talks
def update(endpoint_id: str, given: tuple[str, ...], *, relay: Relay, as_json: bool) -> None:
    """Change fields of an endpoint; null sets one to its default: rate_per_second=50 timeout_ms=null."""
    fields = _fields(given, (*FIELDS, "url"))
    if not fields:
        raise click.UsageError("name what is to change, as FIELD=VALUE")
    _show(relay.endpoints.update(endpoint_id, **fields), as_json=as_json)


@endpoints.command()
@_ID
@click.option("--yes", is_flag=True, help="Do not ask.")
@talks
def delete(endpoint_id: str, *, yes: bool, relay: Relay, as_json: bool) -> None:
    """End an endpoint for good. Its pending deliveries become dead, its history stays."""
    if not yes:
        url = cell(relay.endpoints.get(endpoint_id).url)
        click.confirm(f"End {url}? What is pending for it dies.", abort=True, err=True)
    relay.endpoints.delete(endpoint_id)
    _done(endpoint_id, "deleted", as_json=as_json)


@endpoints.command()
@_ID
@talks
def enable(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Switch an endpoint on; what was paused comes back at its rate."""
    _show(relay.endpoints.enable(endpoint_id), as_json=as_json)


@endpoints.command()
@_ID
@talks
def disable(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Switch an endpoint off; its deliveries are paused."""
    _show(relay.endpoints.disable(endpoint_id), as_json=as_json)


@endpoints.command()
@_ID
@talks
def reset_breaker(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Close an endpoint's breaker, end its hold, and bring what waits forward."""
    _show(relay.endpoints.reset_breaker(endpoint_id), as_json=as_json)


@endpoints.command()
@_ID
@talks
def retry_now(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Bring forward what waits for an endpoint, at its rate."""
    relay.endpoints.retry_now(endpoint_id)
    _done(endpoint_id, "what waits is brought forward", as_json=as_json)


@endpoints.command()
@_ID
@click.option("--yes", is_flag=True, help="Do not ask.")
@talks
def cancel_pending(endpoint_id: str, *, yes: bool, relay: Relay, as_json: bool) -> None:
    """Cancel all that is pending for an endpoint."""
    if not yes:
        url = cell(relay.endpoints.get(endpoint_id).url)
        click.confirm(f"Cancel all that is pending for {url}?", abort=True, err=True)
    relay.endpoints.cancel_pending(endpoint_id)
    _done(endpoint_id, "what is pending is being canceled", as_json=as_json)


@endpoints.command()
@_ID
@_SECRET
@talks
def rotate_secret(endpoint_id: str, *, secret_file: IO[str] | None, relay: Relay, as_json: bool) -> None:
    """Replace an endpoint's secret and show the new one, this once. The old one signs too for a while."""
    made: Rotated = relay.endpoints.rotate_secret(endpoint_id, secret=read_secret(secret_file))
    if as_json:
        show_json(made)
        return
    show_fields([("secret", made.secret), ("the old one signs until", made.previous_secret_expires_at)])


@endpoints.command()
@_ID
@talks
def test(endpoint_id: str, *, relay: Relay, as_json: bool) -> None:
    """Send an endpoint a test event and show what it answers: 0 if that is success, 4 if nothing came in time."""
    tested = relay.endpoints.test(endpoint_id)
    if as_json:
        show_json(tested)
    elif tested.attempt is None:
        said = f"dead: {tested.reason}" if tested.reason else f"{tested.status}: no attempt yet"
        click.echo(f"{said} (relay deliveries get {tested.delivery_id})")
    else:
        attempt = tested.attempt
        answered = f"HTTP {attempt.status}" if attempt.status else attempt.error
        took = "" if attempt.durations.total is None else f" after {attempt.durations.total:.0f} ms"
        click.echo(f"{tested.status}: {cell(answered)}{took}")
    settled = tested.status in {"delivered", "dead", "canceled"}
    sys.exit(OK if tested.status == "delivered" else FAILED if settled or tested.attempt else UNFINISHED)


def _row(one: Endpoint) -> tuple[object, ...]:
    return (
        one.id,
        one.url,
        one.kind,
        _state(one),
        # One that jobs imply gets no events.
        "none" if one.kind == "origin" else one.event_types or "all",
        one.last_day.success,
        one.last_day.retryable_failure + one.last_day.permanent_failure,
        one.last_success_at,
    )


def _state(one: Endpoint) -> str:
    if not one.enabled:
        return f"disabled ({one.disabled_reason})" if one.disabled_reason else "disabled"
    if one.breaker.state != "closed":
        return f"breaker {one.breaker.state}"
    return "held" if one.held_until is not None else "enabled"


def _show(one: Endpoint, *, as_json: bool) -> None:
    if as_json:
        show_json(one)
        return
    shown: dict[str, Any] = plain(one)
    # As the API spells them: these are the names to change them by.
    show_fields((name, value) for name, value in shown.items() if name not in {"breaker", "last_day"})
    show_fields((f"{name}.{inner}", value) for name in ("breaker", "last_day") for inner, value in shown[name].items())


def _done(endpoint_id: str, said: str, *, as_json: bool) -> None:
    if as_json:
        show_json({"id": endpoint_id})
    else:
        click.echo(f"{endpoint_id}: {said}")


def _fields(given: tuple[str, ...], known: tuple[str, ...]) -> dict[str, Any]:
    """Read FIELD=VALUE arguments. Raises click's BadParameter."""
    found: dict[str, Any] = {}
    for one in given:
        name, mark, text = one.partition("=")
        if not mark or name not in known:
            raise click.BadParameter(f"{one!r} is not FIELD=VALUE with one of {', '.join(known)}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
        if name == "event_types" and not isinstance(found[name], list | None):
            found[name] = [pattern.strip() for pattern in text.split(",")]
        elif name in _TEXTS and not isinstance(found[name], str | None):
            found[name] = text
    return found
