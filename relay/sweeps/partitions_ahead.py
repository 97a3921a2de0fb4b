"""Make the attempt log's partitions a fortnight ahead, and empty the default one should anything have got there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.store import partitions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsAhead:
    """Makes missing day partitions."""

    engine: sa.Engine
    name: str = "partitions"
    interval_secs: float = 3600.0

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Make what is missing of today and the next fourteen days, the default partition emptied first."""
        with self.engine.begin() as connection:
            moved = partitions.empty_default(connection)
        if moved:
            log.warning("attempts lay in the default partition and were moved to their days", extra={"count": moved})
        with self.engine.begin() as connection:
            return {"moved": moved, "made": partitions.ensure_ahead(connection)}
