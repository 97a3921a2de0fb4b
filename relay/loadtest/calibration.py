"""How fast this machine runs plain Python just now, so that figures of two machines, or of two hours, can be compared."""

from __future__ import annotations

import time
from typing import Final

#: Additions in one loop, and loops of which the fastest counts.
_ROUNDS: Final = 1_000_000
_LOOPS: Final = 3


def python_loop_ms() -> float:
    """Return the milliseconds of CPU that a loop of a million additions takes: the fastest of three.

    CPU and not wall time: waiting for a core is left out, a core that is slow or shared with a neighbour is not.
    """
    return round(min(_loop_secs() for _ in range(_LOOPS)) * 1000, 1)


def _loop_secs() -> float:
    began = time.process_time()
    total = 0
    for number in range(_ROUNDS):
        total += number
    return time.process_time() - began
