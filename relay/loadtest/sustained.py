"""Sustained load: producers send events at a steady rate, each for ten endpoints, and every delivery is timed.

An open loop: arrivals keep their times, so that waiting counts. `events` is the same with one endpoint an event, `soak`
the same for longer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from relay.loadtest import load
from relay.loadtest.accounting import take
from relay.loadtest.memory import Memory
from relay.loadtest.report import percentile
from relay.loadtest.scenario import make_report
from relay.loadtest.seed import make_workspace, payload_of

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options

FAN_OUT: Final = 10
#: Deliveries a second, and seconds.
RATE: Final = 5_000
SECONDS: Final = 60.0
#: Seconds of the same load before the measurement: connections open, plans and modules are there.
WARM_UP_SECS: Final = 3.0
PAYLOAD_BYTES: Final = 500
CONNECTIONS: Final = 32


def run(options: Options) -> Report:
    """Send `options.rate` deliveries a second, at a fan-out of ten, for `options.seconds`."""
    return run_with(options, "sustained", fan_out=FAN_OUT, rate=options.rate or RATE)


def run_with(options: Options, scenario: str, *, fan_out: int, rate: float) -> Report:
    """Send `rate` deliveries a second, as events for `fan_out` endpoints each."""
    seconds = options.seconds or SECONDS
    with options.stack() as stack:
        sink = stack.start_sink(origins=fan_out)
        workspace = make_workspace(stack.connection, stack.vault, [f"{url}/endpoint/0" for url in sink.urls])
        load.start_roles(stack, options.workers)
        request = load.request_of(load.make_key(stack, workspace.id), "/v1/events", payload_of(PAYLOAD_BYTES))
        options.say("warming up")
        warm = load.send(stack, request, rate=rate / fan_out, seconds=WARM_UP_SECS, connections=CONNECTIONS)
        load.settle(stack, workspace.id)

        options.say(f"sending {rate:,.0f} deliveries a second for {seconds:.0f} s")
        before, since = stack.read(), time.time()
        with Memory(stack, seconds) as memory:
            sent = load.send(stack, request, rate=rate / fan_out, seconds=seconds, connections=CONNECTIONS)
        load.settle(stack, workspace.id)
        after = stack.read()
        arrivals = sink.snapshot()
        waits = load.waits_ms(stack, workspace.id, arrivals, since=since)
        return make_report(
            scenario,
            stack,
            options=options,
            tally=take(stack.connection, workspace.id, arrivals, made=(warm.accepted + sent.accepted) * fan_out),
            before=before,
            after=after,
            rate_per_second=round(len(waits) / sent.seconds, 1),
            p50_ms=_rounded(percentile(waits, 0.5)),
            p99_ms=_rounded(percentile(waits, 0.99)),
            max_ms=_rounded(percentile(waits, 1.0)),
            settings={
                "fan_out": fan_out,
                "rate_per_second": rate,
                "seconds": seconds,
                "payload_bytes": PAYLOAD_BYTES,
                "connections": CONNECTIONS,
                "figures": {**load.figures(sent), **memory.figures()},
            },
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
