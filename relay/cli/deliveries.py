"""`relay deliveries` and `relay events`: what was sent in, and what became of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from relay.cli.exits import FAILED, OK
from relay.cli.output import Moment, show_fields, show_json, show_table, standing
from relay.cli.target import complete_endpoint, talks
from relay.client import ApiError
from relay.client.transport import printable
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from relay.client import Attempt, Delivery, Event, Job, Relay

#: Rows where a list does not say how many.
USUAL_LIMIT = 50

_LIMIT = click.option("--limit", type=click.IntRange(1), default=USUAL_LIMIT, show_default=True, help="Rows at most.")
_ALL = click.option("--all", "all_", is_flag=True, help="All rows, however many.")
_SINCE = click.option(
    "--since", type=Moment(), default=None, help="Made then or later: RFC 3339, or 2h for so long ago."
)
_UNTIL = click.option("--until", type=Moment(), default=None, help="Made before that time.")


@click.group()
def deliveries() -> None:
    """See what became of deliveries, and send them again or call them off."""


@deliveries.command("list")
@click.option("--endpoint", "endpoint_id", default=None, shell_complete=complete_endpoint, help="Of this endpoint.")
@click.option(
    "--status", type=click.Choice(["pending", "in_flight", "delivered", "dead", "canceled"]), help="That stand so."
)
@click.option("--type", "event_type", default=None, help="Of this event type.")
@click.option("--reason", default=None, help="That are dead of this.")
@_SINCE
@_UNTIL
@_LIMIT
@_ALL
@talks
def list_deliveries(
    *,
    endpoint_id: str | None,
    status: str | None,
    event_type: str | None,
    reason: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    all_: bool,
    relay: Relay,
    as_json: bool,
) -> None:
    """List deliveries, the newest first."""
    found = relay.deliveries.list(
        endpoint_id=endpoint_id,
        status=status,
        event_type=event_type,
        reason=reason,
        since=since,
        until=until,
        limit=None if all_ else limit,
    )
    _show_rows(found, as_json=as_json)


@deliveries.command("get")
@click.argument("delivery_id", metavar="ID")
@talks
def get_delivery(delivery_id: str, *, relay: Relay, as_json: bool) -> None:
    """Show one delivery with its attempts."""
    one = relay.deliveries.get(delivery_id)
    if as_json:
        show_json(one)
        return
    names = ("id", "event_id", "endpoint_id", "event_type", "status", "reason", "attempt_count", "generation")
    show_standing(one, names)


def show_standing(one: Delivery | Job, names: Iterable[str]) -> None:
    """Show a delivery or a job: these fields, its times, what holds it back, its attempts and the last answer."""
    deferred = one.deferred
    held = None if deferred is None else f"{deferred.reason}, {deferred.count} times since {deferred.since}"
    facts = [(name, getattr(one, name)) for name in (*names, "created_at", "due_at", "finished_at")]
    show_fields([*facts, ("deferred", held)])
    if one.attempts:
        click.echo()
        show_table(
            ("attempt", "at", "class", "answer", "ms", "worker"), (_attempt(attempt) for attempt in one.attempts)
        )
    last = one.attempts[-1] if one.attempts else one.last_attempt
    if last is not None and last.snippet:
        click.echo("\nthe last answer's body:")
        for line in last.snippet.splitlines():
            click.echo(f"  {printable(line)}")


@deliveries.command("replay")
@click.argument("delivery_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Delivered ones, too.")
@talks
def replay_deliveries(delivery_ids: tuple[str, ...], *, force: bool, relay: Relay, as_json: bool) -> None:
    """Send dead or canceled deliveries again. Ends with 1 where one of them was refused."""
    sys.exit(each(delivery_ids, lambda one: relay.deliveries.replay(one, force=force), as_json=as_json))


@deliveries.command("cancel")
@click.argument("delivery_ids", metavar="ID...", nargs=-1, required=True)
@talks
def cancel_deliveries(delivery_ids: tuple[str, ...], *, relay: Relay, as_json: bool) -> None:
    """Call pending deliveries off. Ends with 1 where one of them was refused."""
    sys.exit(each(delivery_ids, relay.deliveries.cancel, as_json=as_json))


@click.group()
def events() -> None:
    """See what was sent in."""


@events.command("list")
@click.option("--type", "event_type", default=None, help="Of this type.")
@_SINCE
@_UNTIL
@_LIMIT
@_ALL
@talks
def list_events(
    *,
    event_type: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    all_: bool,
    relay: Relay,
    as_json: bool,
) -> None:
    """List events, the newest first."""
    found = relay.events.list(type=event_type, since=since, until=until, limit=None if all_ else limit)
    if as_json:
        for one in found:
            show_json(one)
        return
    names = ("id", "created", "type", "bytes", "deliveries", "source")
    show_table(names, ((e.id, e.created_at, e.type, e.payload_bytes, e.delivery_count, e.source) for e in found))


@events.command("get")
@click.argument("event_id", metavar="ID")
@talks
def get_event(event_id: str, *, relay: Relay, as_json: bool) -> None:
    """Show one event with its deliveries."""
    one: Event = relay.events.get(event_id)
    if as_json:
        show_json(one)
        return
    names = ("id", "type", "source", "content_type", "payload_bytes", "idempotency_key", "request_id", "created_at")
    show_fields((name, getattr(one, name)) for name in names)
    if one.deliveries:
        click.echo()
        _show_rows(one.deliveries, as_json=False)


@events.command("payload")
@click.argument("event_id", metavar="ID")
@click.option("--url", default=None, help="The API. Default: RELAY_URL, or what `relay up` made.")
def get_payload(event_id: str, *, url: str | None) -> None:
    """Write an event's payload to standard output: the bytes as they came in."""
    from relay.cli.target import connect

    with connect(url) as relay:
        sys.stdout.buffer.write(relay.events.payload(event_id))
        sys.stdout.buffer.flush()


def _show_rows(found: Iterable[Delivery], *, as_json: bool) -> None:
    if as_json:
        for one in found:
            show_json(one)
        return
    names = ("id", "created", "type", "status", "tries", "why", "due", "endpoint")
    show_table(names, (_row(one) for one in found))


def _row(one: Delivery) -> tuple[object, ...]:
    why = one.reason or (one.deferred.reason if one.deferred is not None else None)
    return (one.id, one.created_at, one.event_type, one.status, one.attempt_count, why, one.due_at, one.endpoint_id)


def _attempt(one: Attempt) -> tuple[object, ...]:
    answer = f"HTTP {one.status}" if one.status else one.error
    total = None if one.durations.total is None else round(one.durations.total)
    return (one.number, one.at, one.class_, answer, total, one.worker)


def each(ids: Iterable[str], act: Callable[[str], Delivery | Job], *, as_json: bool) -> int:
    """Do something with each of several deliveries or jobs, show what becomes of it, and return the exit code."""
    code = OK
    for one in ids:
        try:
            after = act(one)
        except (ApiError, InvalidInput) as error:
            # Of several the others are done all the same. What the API takes as a field is an option here.
            said = str(error).replace('{"force": true}', "--force")
            click.echo(f"relay: {printable(one)}: {said}", err=True)
            code = FAILED
            continue
        if as_json:
            show_json(after)
        else:
            click.echo(f"{after.id}: {standing(after)}")
    return code
