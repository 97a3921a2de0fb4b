"""The queue's gauges, from one place only: the publisher that works.

A thread of its own looks every few seconds, so that a scrape costs the database nothing and is answered whatever
hangs. Other publishers, and one whose last look is too old, show none of these gauges: a figure that nobody has is
absent, and not a zero that looks well. What a query sums over processes is then right as it stands.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

import psycopg
import redis
import sqlalchemy as sa

from relay import metrics
from relay.store import gauges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from relay.outbox.stream import Stream
    from relay.store.gauges import QueueFigures

log = logging.getLogger(__name__)

#: Seconds between two looks; more where a look takes long, so that it takes no more than a twentieth of the time.
LOOK_SECS: Final = 5.0
SHARE: Final = 20.0
#: Seconds after which figures are shown no more, beyond the wait for the next.
STALE_SECS: Final = 15.0


class QueueGauges:
    """Looks while `leading` says so, until stopped; a collector for the registry."""

    def __init__(
        self, engine: sa.Engine, stream: Stream, *, leading: Callable[[], bool], look_secs: float = LOOK_SECS
    ) -> None:
        """Take a pool that is not the hot one, and a stream with a client of its own."""
        self._engine = engine
        self._stream = stream
        self._leading = leading
        self._look_secs = look_secs
        #: What was seen last, and until when (monotonic) it is shown.
        self._seen: tuple[QueueFigures, int | None, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-gauges", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, without waiting for a look that hangs."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def look(self) -> float:
        """Look once; return for how many seconds to wait. Raises what the database does."""
        began = time.monotonic()
        with self._engine.begin() as connection:
            figures = gauges.read(connection)
        took = time.monotonic() - began
        wait = max(self._look_secs, SHARE * took)
        try:
            unread: int | None = self._stream.unread()
        except redis.RedisError:
            unread = None
        self._seen = (figures, unread, time.monotonic() + wait + STALE_SECS)
        return wait

    def describe(self) -> Iterator[Metric]:
        """For the registry: nothing, as nothing may be shown now."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """For a scrape."""
        leads = self._leading()
        metrics.LEADING.set(leads)
        seen = self._seen
        if not leads or seen is None or time.monotonic() > seen[2]:
            return
        figures, unread, _ = seen
        yield metrics.QUEUE_DEPTH.gauge(figures.deliveries["due"])
        yield metrics.QUEUE_LATENESS.gauge(figures.lateness_secs)
        yield metrics.QUEUE_OLDEST.gauge(float("nan") if figures.oldest_secs is None else figures.oldest_secs)
        yield metrics.DELIVERIES.gauges(figures.deliveries)
        yield metrics.BREAKERS.gauges(figures.breakers)
        yield metrics.ENDPOINTS.gauges(figures.endpoints)
        yield metrics.DEFAULT_ROWS.gauge(figures.default_rows)
        yield metrics.BEAT_AGE.gauges(figures.beat_ages)
        yield metrics.STALLED.gauge(figures.workers_stalled)
        yield metrics.SWEEP_AGE.gauges(figures.sweep_ages)
        if unread is not None:
            yield metrics.STREAM_UNREAD.gauge(unread)

    def _run(self) -> None:
        while not self._stop.is_set():
            wait = self._look_secs
            if not self._leading():
                self._seen = None
                wait = min(wait, 0.5)
            else:
                try:
                    wait = self.look()
                except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                    log.warning("the queue's gauges could not be read", extra={"error": str(error).strip()[:200]})
                except Exception:  # the thread's own boundary: gauges must come back after whatever it was
                    log.exception("the queue's gauges could not be read")
            self._stop.wait(wait)
