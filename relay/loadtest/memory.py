"""The workers' memory over time: does it stay where it is, or grow for as long as they run?"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.loadtest.stack import Stack

#: Samples after the first, however long it takes.
SAMPLES: Final = 20
#: The share of the time in which buffers, plans and caches fill up: growth is counted from its end on.
SETTLED_AFTER: Final = 0.2


class Memory:
    """Watches, within a `with` block that takes about `seconds`, how much memory the largest worker process holds."""

    def __init__(self, stack: Stack, seconds: float) -> None:
        self._stack = stack
        self._gap = seconds / SAMPLES
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loadtest-memory", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def figures(self) -> dict[str, object]:
        """Return MiB at the start and at the end, the growth after it had settled, and the samples, for a report."""
        return summary(self._samples)

    def _run(self) -> None:
        while not self._over.wait(self._gap):
            self._look()

    def _look(self) -> None:
        now = self._stack.worker_rss_now_mb()
        if now is not None:
            self._samples.append((time.monotonic() - self._began, now))


def summary(samples: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Put samples of (seconds since the start, MiB), in order, into figures; none where nothing could be read."""
    if not samples:
        return {}
    settled = next((mb for at, mb in samples if at >= SETTLED_AFTER * samples[-1][0]), samples[-1][1])
    end = samples[-1][1]
    return {
        "rss_start_mb": samples[0][1],
        "rss_settled_mb": settled,
        "rss_end_mb": end,
        "rss_growth_percent": round((end / settled - 1) * 100, 2),
        "rss_mb": [[round(at, 1), mb] for at, mb in samples],
    }
