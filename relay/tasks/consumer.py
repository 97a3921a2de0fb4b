"""Celery's consumer, with patience for a Redis that answers and refuses.

One that is full, cannot write to its disk, or was made a replica answers commands with errors. To Celery these are faults
of a channel, which by default end the worker, and with `broker_channel_error_retry` are tried again at once, for ever.
"""

from __future__ import annotations

import time
from typing import Final

import redis
from celery.worker.consumer import Consumer

#: Seconds between two tries. A lost connection is not concerned: for that Celery has pauses of its own.
PAUSE_SECS: Final = 2.0


class PatientConsumer(Consumer):
    """Waits before it tries a refusing Redis again. Deliveries need none of this, and go on."""

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Log it, and wait."""
        super().on_connection_error_before_connected(exc)
        _pause(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Log it, and wait."""
        super().on_connection_error_after_connected(exc)
        _pause(exc)


def _pause(exc: Exception) -> None:
    if isinstance(exc, redis.ResponseError):
        time.sleep(PAUSE_SECS)
