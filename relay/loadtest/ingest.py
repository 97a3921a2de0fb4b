"""Ingest alone: how many events a second an API takes in, one by one and in batches, with nothing delivering them.

A closed loop over kept connections. Each event has one endpoint, so a delivery is stored with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from relay.loadtest import load
from relay.loadtest.accounting import Tally
from relay.loadtest.scenario import make_report
from relay.loadtest.seed import EVENT_TYPE, make_workspace, payload_of

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options

SECONDS: Final = 10.0
CONNECTIONS: Final = 32
PAYLOAD_BYTES: Final = 500
BATCH: Final = 100

_STORED = "select count(*) from relay.deliveries where workspace_id = %s  -- relay loadtest"


def run(options: Options) -> Report:
    """Send single events for `options.seconds`, then batches for as long."""
    seconds = options.seconds or SECONDS
    with options.stack() as stack:
        workspace = make_workspace(stack.connection, stack.vault, ["http://127.0.0.1:9/never"])
        stack.start_role("api")
        stack.wait_for(lambda: load.answers(stack), "the start of the API")
        key = load.make_key(stack, workspace.id)
        single = load.request_of(key, "/v1/events", payload_of(PAYLOAD_BYTES))
        event = {"type": EVENT_TYPE, "payload": json.loads(payload_of(PAYLOAD_BYTES))}
        batch = load.request_of(key, "/v1/events/batch", json.dumps([event] * BATCH).encode())
        load.send(stack, single, rate=0, seconds=1.0, connections=CONNECTIONS)

        options.say("single events")
        stored, before = _stored(stack.connection.execute(_STORED, [workspace.id]).fetchone()), stack.read()
        one_by_one = load.send(stack, single, rate=0, seconds=seconds, connections=CONNECTIONS)
        after = stack.read()
        options.say(f"batches of {BATCH}")
        batches = load.send(stack, batch, rate=0, seconds=seconds, connections=CONNECTIONS // 4)
        offered = one_by_one.accepted + batches.accepted * BATCH
        found = _stored(stack.connection.execute(_STORED, [workspace.id]).fetchone()) - stored
        more = max(0, found - offered - one_by_one.unanswered - batches.unanswered * BATCH)
        per_batch = load.figures(batches)
        return make_report(
            "ingest",
            stack,
            options=options,
            # What was accepted and is not there is lost; nothing is delivered here.
            tally=Tally(
                offered=offered,
                delivered=min(found, offered),
                lost=max(0, offered - found),
                # Stored, and neither accepted nor left without an answer.
                duplicates=more,
                unexplained=more,
                strangers=0,
            ),
            before=before,
            after=after,
            rate_per_second=round(one_by_one.accepted / one_by_one.seconds, 1),
            settings={
                "seconds": seconds,
                "connections": CONNECTIONS,
                "payload_bytes": PAYLOAD_BYTES,
                "figures": {
                    **load.figures(one_by_one),
                    "batch": BATCH,
                    "batch_events_per_second": round(batches.accepted * BATCH / batches.seconds, 1),
                    "batch_p99_ms": per_batch["ingest_p99_ms"],
                    "batch_refused": batches.refused,
                },
            },
        )


def _stored(row: tuple[object, ...] | None) -> int:
    return int(str(row[0])) if row else 0
