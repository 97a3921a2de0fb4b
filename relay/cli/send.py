"""`relay send`: one event over the HTTP API, and what becomes of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relay.cli.exits import FAILED, INTERRUPTED, OK, UNFINISHED
from relay.cli.output import counted, show_json, standing
from relay.cli.target import talks
from relay.client import Forbidden
from relay.client.transport import printable
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from relay.client import Delivery, Job, Relay

#: Seconds between two looks at what is under way.
LOOK_SECS = 0.1


@click.command()
@click.argument("event_type")
@click.option("--data", default=None, help="The payload, as JSON; @FILE reads a file, - standard input.")
@click.option("--content-type", default=None, help="What the payload is, if not JSON.")
@click.option("--idempotency-key", default=None, help="Sent twice under one key it is one event. Default: a new one.")
@click.option("--expires-in", type=float, default=None, help="Seconds after which it is given up.")
@click.option(
    "--wait", type=float, default=10.0, show_default=True, help="Seconds to wait for the deliveries; 0: none."
)
@talks
def send(
    event_type: str,
    *,
    data: str | None,
    content_type: str | None,
    idempotency_key: str | None,
    expires_in: float | None,
    wait: float,
    relay: Relay,
    as_json: bool,
) -> None:
    """Send one event and show what becomes of its deliveries.

    Ends with 0 when all were made (or not waited for), 1 when one failed for good, 4 when some are still under way.
    """
    sent = relay.send(
        event_type,
        _sample() if data is None else read_data(data),
        content_type=content_type,
        idempotency_key=idempotency_key,
        expires_in=expires_in,
    )
    try:
        if as_json:
            show_json(sent)
        else:
            taken = "was taken before" if sent.replayed else "accepted"
            click.echo(f"event {sent.id} {taken}, {counted(len(sent.deliveries), 'delivery', 'deliveries')}")
        code = _watch(relay, [delivery.id for delivery in sent.deliveries], wait, as_json=as_json)
    except Forbidden:
        # The event is in: that a producer's key may not look is no failure of it.
        click.echo("relay: not waited for: the key has not the scope `read`", err=True)
        code = OK
    except KeyboardInterrupt:
        click.echo(f"\nIt goes on: relay events get {sent.id}", err=True)
        code = INTERRUPTED
    sys.exit(code)


def _watch(relay: Relay, ids: list[str], wait: float, *, as_json: bool) -> int:
    deadline = time.monotonic() + wait
    waiting = list(ids)
    failed = False
    while waiting and time.monotonic() < deadline:
        for id_ in list(waiting):
            delivery = relay.deliveries.get(id_)
            if delivery.is_settled:
                waiting.remove(id_)
                failed = failed or delivery.status != "delivered"
                if as_json:
                    show_json(delivery)
                else:
                    click.echo(line_of(delivery))
        if waiting:
            time.sleep(LOOK_SECS)
    if wait and not as_json:
        for id_ in waiting:
            click.echo(f"  {id_}  still under way")
    return FAILED if failed else UNFINISHED if waiting and wait else OK


def line_of(delivery: Delivery | Job) -> str:
    """What became of a delivery or a job, in a line."""
    last = delivery.attempts[-1] if delivery.attempts else delivery.last_attempt
    answered = "no attempt"
    if last is not None:
        answered = f"HTTP {last.status}" if last.status else printable(last.error or "no answer")
    attempts = counted(delivery.attempt_count, "attempt", "attempts")
    return f"  {delivery.id}  {standing(delivery)} after {attempts}: {answered}"


def read_data(data: str) -> bytes:
    """Read what `--data` names: a file after `@`, standard input for `-`, else itself. InvalidInput for no such file."""
    if data == "-":
        return sys.stdin.buffer.read()
    if data.startswith("@"):
        try:
            return Path(data[1:]).read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidInput(
                f"--data: {data[1:]!r} cannot be read ({reason}): name another file", field="data"
            ) from None
    # As it was typed, also where that is no UTF-8.
    return os.fsencode(data)


def _sample() -> bytes:
    return json.dumps({"sent_by": "relay send", "at": time.time()}).encode()
