"""Make the attempt log's partitions a fortnight ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.store import partitions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsAhead:
    """Makes missing day partitions."""

    engine: sa.Engine
    name: str = "partitions"
    interval_secs: float = 3600.0

    def run_once(self, *, since_last: float) -> Mapping[str, int]:  # noqa: ARG002
        """Make what is missing of today and the next fourteen days."""
        with self.engine.begin() as connection:
            return {"made": partitions.ensure_ahead(connection)}
