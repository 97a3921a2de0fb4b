"""Keep the stream tidy: take over what dead consumers left, forget the consumers themselves."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from relay.store import announcements

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.outbox.stream import Stream

log = logging.getLogger(__name__)

#: Entries taken over in one call.
BATCH = 500
#: Milliseconds of silence after which a consumer that holds nothing is forgotten. A live one reads every second.
CONSUMER_IDLE_MS = 5 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUpkeep:
    """Reclaims entries and forgets consumers."""

    hot: sa.Engine
    stream: Stream
    #: Milliseconds after which an entry that was read and not settled is left by a dead consumer.
    idle_ms: int = 30_000
    consumer_idle_ms: int = CONSUMER_IDLE_MS
    name: str = "stream-upkeep"
    interval_secs: float = 15.0

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Reclaim and forget; nothing while Redis does not answer.

        A reclaimed entry's row, if it still waits, is unmarked and so announced again; then the entry is settled.
        """
        reclaimed = forgotten = 0
        try:
            while True:
                hints = self.stream.reclaim(idle_ms=self.idle_ms, count=BATCH)
                if not hints:
                    break
                with self.hot.connect() as connection:
                    announcements.unmark(connection, [hint.delivery_id for hint in hints])
                self.stream.acknowledge([hint.entry for hint in hints])
                reclaimed += len(hints)
            forgotten = self.stream.remove_idle_consumers(idle_ms=self.consumer_idle_ms)
        except redis.RedisError as error:
            log.warning("the stream cannot be tidied just now", extra={"error": str(error)[:200]})
        return {"reclaimed": reclaimed, "forgotten_consumers": forgotten}
