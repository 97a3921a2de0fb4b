"""A noisy neighbour: one endpoint hangs, then is limited, with thousands of deliveries waiting; do the others notice?

Three spells of the same steady load: alone; beside an endpoint that accepts and never answers; beside one that may get
ten a second. The others' latencies are compared, and the row updates of what waits are counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from relay.loadtest import load
from relay.loadtest.accounting import take
from relay.loadtest.report import percentile
from relay.loadtest.scenario import make_report
from relay.loadtest.seed import Workspace, make_deliveries, make_workspace, payload_of
from relay.loadtest.sustained import CONNECTIONS, FAN_OUT, PAYLOAD_BYTES, WARM_UP_SECS

if TYPE_CHECKING:
    from uuid import UUID

    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options
    from relay.loadtest.sink import Sink
    from relay.loadtest.stack import Stack

#: Deliveries a second to the others, half of what the sustained scenario sends; seconds of each spell; rows that wait.
RATE: Final = 2_500
SECONDS: Final = 60.0
WAITING: Final = 20_000
#: Of the limited endpoint, a second.
LIMIT: Final = 10

# What the server has written; each delivery to the others is marked, claimed and recorded: three updates.
_UPDATES = "select pg_stat_get_tuples_updated('relay.deliveries'::regclass)  -- relay loadtest"
_FLUSH = "select pg_stat_clear_snapshot()  -- relay loadtest"
_QUIET = """
update relay.endpoints set event_types = '{noise}', rate_per_second = %s, burst = 20, max_in_flight = null where id = %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """What one spell came to."""

    p50_ms: float | None
    p99_ms: float | None
    #: Row updates a second that are not the others'.
    updates_per_second: float
    accepted: int
    refused: int


def run(options: Options) -> Report:
    """Run the three spells of `options.seconds` each, with `options.count` rows waiting."""
    seconds, waiting = options.seconds or SECONDS, options.count or WAITING
    rate = options.rate or RATE
    with options.stack() as stack:
        sink = stack.start_sink(origins=FAN_OUT + 1)
        urls = [f"{url}/endpoint/0" for url in sink.urls[:FAN_OUT]]
        workspace = make_workspace(stack.connection, stack.vault, [*urls, f"{sink.urls[FAN_OUT]}/hang"])
        noisy = workspace.endpoint_ids[FAN_OUT]
        stack.connection.execute(_QUIET, [1000.0, noisy])
        load.start_roles(stack, options.workers)
        request = load.request_of(load.make_key(stack, workspace.id), "/v1/events", payload_of(PAYLOAD_BYTES))
        options.say("warming up")
        warm = load.send(stack, request, rate=rate / FAN_OUT, seconds=WARM_UP_SECS, connections=CONNECTIONS)
        load.settle(stack, workspace.id)
        before = stack.read()

        def spell(what: str) -> Spell:
            options.say(what)
            return _spell(stack, sink, workspace, request, rate=rate, seconds=seconds, noisy=noisy)

        alone = spell("the others alone")
        make_deliveries(
            stack.connection,
            Workspace(id=workspace.id, endpoint_ids=[noisy]),
            waiting,
            due_at=datetime.now(UTC),
            payload_bytes=PAYLOAD_BYTES,
        )
        hanging = spell(f"beside an endpoint that hangs, with {waiting:,} waiting")
        stack.connection.execute(
            "update relay.endpoints set url = %s, breaker_state = 0, breaker_failures = 0, breaker_generation ="
            " breaker_generation + 1, rate_per_second = %s where id = %s  -- relay loadtest",
            [f"{sink.urls[FAN_OUT]}/endpoint/limited", LIMIT, noisy],
        )
        stack.connection.execute("insert into relay.wakes (endpoint_id) values (%s) on conflict do nothing", [noisy])
        limited = spell(f"beside one that gets {LIMIT} a second")
        after = stack.read()
        stack.stop_roles()
        arrivals = sink.snapshot()
        # Nobody waits for the noisy endpoint's own: they are left out of the books.
        accepted = warm.accepted + alone.accepted + hanging.accepted + limited.accepted
        tally = take(
            stack.connection,
            workspace.id,
            arrivals,
            made=accepted * FAN_OUT,
            earlier=_deliveries_of(stack, noisy),
        )
        return make_report(
            "noisy",
            stack,
            options=options,
            tally=tally,
            before=before,
            after=after,
            p50_ms=hanging.p50_ms,
            p99_ms=hanging.p99_ms,
            settings={
                "fan_out": FAN_OUT,
                "rate_per_second": rate,
                "seconds": seconds,
                "waiting": waiting,
                "figures": {
                    name: {
                        "p50_ms": one.p50_ms,
                        "p99_ms": one.p99_ms,
                        "p99_ratio": round(one.p99_ms / alone.p99_ms, 2) if one.p99_ms and alone.p99_ms else None,
                        "noise_updates_per_second": one.updates_per_second,
                        "noise_updates_per_row_and_minute": round(one.updates_per_second * 60 / waiting, 3),
                        "refused": one.refused,
                    }
                    for name, one in (("alone", alone), ("hanging", hanging), ("limited", limited))
                },
            },
        )


def _spell(
    stack: Stack, sink: Sink, workspace: Workspace, request: str, *, rate: float, seconds: float, noisy: UUID
) -> Spell:
    updates, since = _updates(stack), time.time()
    sent = load.send(stack, request, rate=rate / FAN_OUT, seconds=seconds, connections=CONNECTIONS)
    load.settle(stack, workspace.id, but=(noisy,))
    lasted = time.time() - since
    waits = load.waits_ms(stack, workspace.id, sink.snapshot(), since=since)
    noise = _updates(stack) - updates - 3 * len(waits)
    return Spell(
        p50_ms=_rounded(percentile(waits, 0.5)),
        p99_ms=_rounded(percentile(waits, 0.99)),
        updates_per_second=round(noise / lasted, 1),
        accepted=sent.accepted,
        refused=sent.refused,
    )


def _updates(stack: Stack) -> int:
    # Sessions write their counts down once a second.
    time.sleep(1.5)
    stack.connection.execute(_FLUSH)
    row = stack.connection.execute(_UPDATES).fetchone()
    return int(row[0]) if row else 0


def _deliveries_of(stack: Stack, endpoint_id: UUID) -> frozenset[bytes]:
    """The ids of an endpoint's deliveries."""
    rows = stack.connection.execute(
        "select id from relay.deliveries where endpoint_id = %s", [endpoint_id], binary=True
    )
    return frozenset(row[0].bytes for row in rows)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
