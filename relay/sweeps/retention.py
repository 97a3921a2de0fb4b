"""Drop what is old: whole partitions of the attempt log, other rows in batches, and nothing while the queue is late."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa

from relay.store import announcements, partitions, retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from relay.store.retention import Step

log = logging.getLogger(__name__)

#: Rows looked at by one statement, and the seconds of rest after it: half of the time is others'.
BATCH: Final = 2_000
REST_SECS: Final = 0.05
#: Seconds of lateness from which deliveries come first.
LATE_SECS: Final = 5.0
#: Seconds of one run; the next one goes on.
RUN_SECS: Final = 60.0
#: Days for which an endpoint's counts by the minute are kept, and what has no window of its own.
MINUTES_DAYS: Final = 8
OTHER_DAYS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How long things are kept: the settings RELAY_RETAIN_… in days, and idempotency keys in seconds."""

    attempts_days: int
    delivered_days: int
    dead_days: int
    audit_days: int
    idempotency_secs: int


class _YieldError(Exception):
    """The queue is late, or the run has lasted long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Deletes by age. Pending and in-flight deliveries stay, whatever their age."""

    engine: sa.Engine
    hot: sa.Engine
    windows: Windows
    name: str = "retention"
    interval_secs: float = 600.0

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Delete what is over, as far as time and the queue let it."""
        counts = dict.fromkeys(("partitions", "deliveries", "events", "keys", "audit", "other", "yielded"), 0)
        windows = self.windows
        deadline = time.monotonic() + RUN_SECS
        counts["partitions"] = self._drop_partitions()
        with self.hot.connect() as connection:

            def walk(name: str, step: Callable[[UUID], Step]) -> None:
                after = retention.START
                while True:
                    self._mind(connection, deadline)
                    done = step(after)
                    counts[name] += done.deleted
                    if done.looked < BATCH or done.last is None:
                        return
                    after = done.last

            def drain(name: str, batch: Callable[[], int]) -> None:
                while True:
                    self._mind(connection, deadline)
                    deleted = batch()
                    counts[name] += deleted
                    if deleted < BATCH:
                        return

            try:
                walk(
                    "deliveries",
                    lambda after: retention.drop_deliveries(
                        connection,
                        after=after,
                        delivered_days=windows.delivered_days,
                        dead_days=windows.dead_days,
                        limit=BATCH,
                    ),
                )
                walk(
                    "events",
                    lambda after: retention.drop_events(
                        connection, after=after, days=windows.delivered_days, limit=BATCH
                    ),
                )
                drain(
                    "keys",
                    lambda: retention.drop_idempotency_keys(connection, secs=windows.idempotency_secs, limit=BATCH),
                )
                drain("audit", lambda: retention.drop_audit(connection, days=windows.audit_days, limit=BATCH))
                drain("other", lambda: retention.drop_minutes(connection, days=MINUTES_DAYS, limit=BATCH))
                self._mind(connection, deadline)
                counts["other"] += retention.drop_small(connection, days=OTHER_DAYS)
                counts["other"] += retention.drop_endpoints(connection, days=windows.delivered_days)
            except _YieldError:
                counts["yielded"] = 1
        return counts

    def _drop_partitions(self) -> int:
        """Drop days that are over, one at a time; one whose lock does not come at once waits for the next run."""
        with self.engine.connect() as connection:
            old = partitions.older_than(connection, self.windows.attempts_days)
        dropped = 0
        for name in old:
            try:
                with self.engine.begin() as connection:
                    partitions.drop(connection, name)
            except (sa.exc.OperationalError, psycopg.OperationalError) as error:
                log.warning(
                    "a partition could not be dropped yet", extra={"partition": name, "error": str(error)[:200]}
                )
                continue
            dropped += 1
        return dropped

    def _mind(self, connection: sa.Connection, deadline: float) -> None:
        """Rest between two batches; raise where deliveries come first, or time is up."""
        time.sleep(REST_SECS)
        late = announcements.lateness_secs(connection)
        if time.monotonic() > deadline or (late is not None and late > LATE_SECS):
            raise _YieldError
