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
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from relay.store.retention import Step

log = logging.getLogger(__name__)

#: Rows looked at by one statement.
BATCH: Final = 2_000
#: Rest after a batch, as a multiple of the time that it took: half of the time is others'. And the least, in seconds.
REST: Final = 1.0
LEAST_REST_SECS: Final = 0.005
#: Seconds of lateness from which deliveries come first.
LATE_SECS: Final = 5.0
#: Seconds of one run, fewer than a worker has for its end; what is left over is for the next tick.
RUN_SECS: Final = 25.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Deletes by age. Pending and in-flight deliveries stay, whatever their age."""

    engine: sa.Engine
    hot: sa.Engine
    windows: Windows
    name: str = "retention"
    interval_secs: float = 600.0

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Delete what is over, as far as time and the queue let it: `yielded` is 1 where something may be left."""
        counts = dict.fromkeys(("partitions", "deliveries", "events", "keys", "audit", "other", "yielded"), 0)
        deadline = time.monotonic() + RUN_SECS
        counts["partitions"] = self._drop_partitions()
        with self.hot.connect() as connection:
            left = self._batches(connection)
            # In turns, so that a backlog of one kind keeps none of the others from its own.
            while left:
                for name, batches in list(left.items()):
                    if self._must_yield(connection, deadline):
                        counts["yielded"] = 1
                        return counts
                    began = time.monotonic()
                    deleted = next(batches, None)
                    if deleted is None:
                        del left[name]
                    else:
                        counts[name] += deleted
                        time.sleep(max(LEAST_REST_SECS, (time.monotonic() - began) * REST))
        return counts

    def _batches(self, connection: sa.Connection) -> dict[str, Iterator[int]]:
        """Return by kind what deletes a batch at each step, and tells how many rows that were."""
        windows = self.windows

        def walk(step: Callable[[UUID], Step]) -> Iterator[int]:
            after: UUID | None = retention.START
            while after is not None:
                done = step(after)
                yield done.deleted
                after = done.last if done.looked == BATCH else None

        def drain(batch: Callable[[], int]) -> Iterator[int]:
            deleted = BATCH
            while deleted == BATCH:
                deleted = batch()
                yield deleted

        def others() -> Iterator[int]:
            yield from drain(lambda: retention.drop_minutes(connection, days=MINUTES_DAYS, limit=BATCH))
            yield retention.drop_small(connection, days=OTHER_DAYS)
            yield retention.drop_endpoints(connection, days=windows.delivered_days)

        return {
            "deliveries": walk(
                lambda after: retention.drop_deliveries(
                    connection,
                    after=after,
                    delivered_days=windows.delivered_days,
                    dead_days=windows.dead_days,
                    limit=BATCH,
                )
            ),
            # Behind the deliveries of the same age, without which they may go.
            "events": walk(
                lambda after: retention.drop_events(connection, after=after, days=windows.delivered_days, limit=BATCH)
            ),
            "keys": drain(
                lambda: retention.drop_idempotency_keys(connection, secs=windows.idempotency_secs, limit=BATCH)
            ),
            "audit": drain(lambda: retention.drop_audit(connection, days=windows.audit_days, limit=BATCH)),
            "other": others(),
        }

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

    @staticmethod
    def _must_yield(connection: sa.Connection, deadline: float) -> bool:
        """Say whether deliveries come first, or time is up."""
        late = announcements.lateness_secs(connection)
        return time.monotonic() > deadline or (late is not None and late > LATE_SECS)
