"""`relay replay`: an endpoint's deliveries sent again by filter, with a bar that shows how far it is."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from relay.cli.exits import FAILED, INTERRUPTED, OK, UNFINISHED
from relay.cli.output import Moment, cell, counted, show_json, show_table
from relay.cli.target import complete_endpoint, talks
from relay.client import WaitedTooLong

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from relay.client import Relay, Replay

#: Rows that are counted before a replay, for the bar's end: so many cost a second. Beyond that the bar has none.
COUNTED: Final = 5_000
#: Rows of the list.
LISTED: Final = 50


@click.command()
@click.argument("endpoint_id", metavar="[ENDPOINT]", required=False, shell_complete=complete_endpoint)
@click.option(
    "--status",
    type=click.Choice(["dead", "canceled", "delivered"]),
    default="dead",
    show_default=True,
    help="Those that stand so. Delivered ones are sent again although they arrived.",
)
@click.option("--type", "event_type", default=None, help="Of this event type alone.")
@click.option("--reason", default=None, help="That are dead of this alone.")
@click.option("--since", type=Moment(), default=None, help="Made then or later: RFC 3339, or 2h for so long ago.")
@click.option("--until", type=Moment(), default=None, help="Made before that time.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Watch it until it is done.")
@click.option("--timeout", type=float, default=None, help="Seconds to watch at most; then end with 4. It goes on.")
@click.option("--watch", "watched", metavar="REPLAY", default=None, help="Watch one that is under way.")
@click.option("--cancel", "canceled", metavar="REPLAY", default=None, help="Stop one.")
@click.option(
    "--list", "listed", is_flag=True, help=f"List the last {LISTED} replays: of ENDPOINT, where it is given, or all."
)
@talks
def replay(
    endpoint_id: str | None,
    *,
    status: str,
    event_type: str | None,
    reason: str | None,
    since: datetime | None,
    until: datetime | None,
    wait: bool,
    timeout: float | None,
    watched: str | None,
    canceled: str | None,
    listed: bool,
    relay: Relay,
    as_json: bool,
) -> None:
    """Send an endpoint's dead deliveries again, or those that filters name.

    They go at the endpoint's rate; the replay is done when all are on their way. Ctrl-C ends the watching alone.
    """
    if listed:
        if watched is not None or canceled is not None:
            raise click.UsageError("--list goes with an endpoint's id or none, --since and --until")
        found = relay.replays.list(endpoint_id=endpoint_id, since=since, until=until, limit=LISTED)
        _show_list(found, as_json=as_json)
        return
    if sum(one is not None for one in (endpoint_id, watched, canceled)) != 1:
        raise click.UsageError("give an endpoint's id, or --watch or --cancel with a replay's, or --list")
    if canceled is not None:
        _say(relay.replays.cancel(canceled), as_json=as_json)
        return
    total: int | None = None
    if endpoint_id is not None:
        if wait:
            matching = relay.deliveries.list(
                endpoint_id=endpoint_id,
                status=status,
                event_type=event_type,
                reason=reason,
                since=since,
                until=until,
                limit=COUNTED + 1,
            )
            total = sum(1 for _ in islice(matching, COUNTED + 1))
        started = relay.endpoints.replay(
            endpoint_id, status=status, event_type=event_type, reason=reason, since=since, until=until
        )
    else:
        assert watched is not None
        started = relay.replays.get(watched)
    if not wait:
        _say(started, as_json=as_json)
        return
    sys.exit(_watch(relay, started, total if total is None or total <= COUNTED else None, timeout, as_json=as_json))


def _watch(relay: Relay, started: Replay, total: int | None, timeout: float | None, *, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("replay", total=total)

            def look(now: Replay) -> None:
                # More may have died since they were counted.
                end = None if total is None else max(total, now.matched)
                progress.update(task, completed=now.matched, total=end)

            ended = relay.replays.wait(started.id, timeout=timeout, watch=look)
    except WaitedTooLong:
        _say(relay.replays.get(started.id), as_json=as_json)
        return UNFINISHED
    except KeyboardInterrupt:
        click.echo(f"\nIt goes on: relay replay --watch {started.id}, or --cancel {started.id}", err=True)
        return INTERRUPTED
    _say(ended, as_json=as_json)
    return OK if ended.state == "done" else FAILED


def _show_list(found: Iterable[Replay], *, as_json: bool) -> None:
    if as_json:
        for one in found:
            show_json(one)
        return
    names = ("id", "created", "state", "again", "skipped", "wanted", "endpoint")
    show_table(names, (_row(one) for one in found))


def _row(one: Replay) -> tuple[object, ...]:
    """What was wanted goes into one column: most filters are not given, most of the time."""
    words = [word for word in (one.status, one.event_type, one.reason) if word is not None]
    words += [f"{name} {cell(time)}" for name, time in (("since", one.since), ("until", one.until)) if time is not None]
    return (one.id, one.created_at, one.state, one.replayed, one.skipped, ", ".join(words), one.endpoint_id)


def _say(one: Replay, *, as_json: bool) -> None:
    if as_json:
        show_json(one)
        return
    skipped = f", {one.skipped} skipped (replayed as often as is allowed)" if one.skipped else ""
    again = counted(one.replayed, "delivery", "deliveries")
    click.echo(f"replay {one.id} {cell(one.state)}: {again} sent again{skipped}")
