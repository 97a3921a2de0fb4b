"""Keeps threads for health while the database hangs: all other requests share the rest.

A frozen database holds every thread that asks it for as long as its time-outs last. Were that all of them,
a liveness probe would find a process that answers nothing, and restart what is well.
"""

from __future__ import annotations

import threading
from typing import Final

from flask import g, request

from relay.web.problems import RETRY_AFTER_SECS, Problem

#: Threads kept free.
KEPT: Final = 2
#: Seconds that a request waits for its turn. Many times what one takes when all is well.
WAIT_SECS: Final = 0.25

_FREE: Final = frozenset({"/healthz", "/readyz"})


class Turnstile:
    """Lets requests in, as many at once as there are threads but for `KEPT`."""

    def __init__(self, threads: int) -> None:
        self._places = threading.BoundedSemaphore(max(1, threads - KEPT))
        #: The last who waited waited in vain: the next do not wait at all, until one gets in.
        self._jammed = False

    def enter(self) -> None:
        """Take a place, or raise the Problem of a 503: for Flask's `before_request`."""
        if request.path in _FREE:
            return
        if not self._places.acquire(timeout=0.0 if self._jammed else WAIT_SECS):
            self._jammed = True
            raise Problem(
                503,
                "busy",
                "Every thread is taken: the database is slow, or bodies come in slowly. Try again.",
                headers={"Retry-After": str(RETRY_AFTER_SECS)},
            )
        self._jammed = False
        g.has_place = True

    def leave(self, _error: BaseException | None) -> None:
        """Give the place back, whatever became of the request: for Flask's `teardown_request`."""
        if g.pop("has_place", False):
            self._places.release()
