"""When an endpoint has failed for so long that sending to it goes on for nobody."""

from __future__ import annotations

from typing import Final

#: Fewer attempts than this say nothing, however long ago the first of them was.
LEAST_ATTEMPTS: Final = 10


def fails_for_good(attempts: int, failing_s: float, after_s: float) -> bool:
    """Say whether an endpoint is to be disabled at a failure just seen.

    `attempts` have failed in a row, this one among them, over the last `failing_s` seconds; `after_s` is
    RELAY_AUTO_DISABLE_AFTER_SECS. Asked at a failure only, so the last one is always recent.
    """
    return attempts >= LEAST_ATTEMPTS and failing_s >= after_s
