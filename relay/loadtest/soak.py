"""The soak: the sustained load at a rate that leaves room, for ten minutes. Does the workers' memory stay flat?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from relay.loadtest import sustained

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options

#: Deliveries a second, and seconds. What comes is kept until the end, about a kilobyte a delivery.
RATE: Final = 1_000
SECONDS: Final = 600.0


def run(options: Options) -> Report:
    """Send `options.rate` deliveries a second for `options.seconds`; memory over time is among the figures."""
    return sustained.run_with(
        replace(options, seconds=options.seconds or SECONDS),
        "soak",
        fan_out=sustained.FAN_OUT,
        rate=options.rate or RATE,
    )
