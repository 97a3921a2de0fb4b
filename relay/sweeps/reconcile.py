"""Announce again what was announced and came to nothing: a flushed Redis, a crash between commit and hint.

It adds no hint itself: it takes the mark away, and the publisher does the rest. Rows whose hint
may still be unread are left alone, so that a backlog is not fed to itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import redis

from relay.store import announcements

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.outbox.stream import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile:
    """The reconciler."""

    hot: sa.Engine
    stream: Stream
    #: Seconds after which a hint that came to nothing counts as lost.
    after_secs: float
    name: str = "reconcile"
    interval_secs: float = 10.0
    batch: int = 1000

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Take the mark from rows whose hint is lost; nothing while Redis does not answer."""
        try:
            unread_since = self.stream.unread_since()
        except redis.RedisError as error:
            log.warning("the reconciler cannot see the stream", extra={"error": str(error)[:200]})
            return {"unannounced": 0}
        unannounced = 0
        with self.hot.connect() as connection:
            # While entries wait, only rows announced well before those already delivered can have lost theirs.
            horizon = unread_since or announcements.database_now(connection)
            before = horizon - timedelta(seconds=self.after_secs)
            while True:
                count = announcements.unmark_overdue(connection, before=before, limit=self.batch)
                unannounced += count
                if count < self.batch:
                    break
        return {"unannounced": unannounced}
