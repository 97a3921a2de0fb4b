"""Single events: each has one endpoint, so that ingest costs as much as it can a delivery. See `sustained`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from relay.loadtest import sustained

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options

#: Events a second.
RATE: Final = 3_000


def run(options: Options) -> Report:
    """Send `options.rate` events a second for `options.seconds`."""
    return sustained.run_with(options, "events", fan_out=1, rate=options.rate or RATE)
