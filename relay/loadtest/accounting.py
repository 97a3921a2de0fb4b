"""The books of a load test: every delivery is looked up at the receiver and in the database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from relay.core.model import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from relay.loadtest.sink import Arrivals

Connection = psycopg.Connection[tuple[Any, ...]]

# What the attempt log accounts for, libcurl's own resends included; deferrals have no number and sent nothing.
_SENDS = """
select delivery_id, sum(greatest(sends, 1))::int from relay.delivery_attempts
where number is not null and delivery_id = any(%s) group by delivery_id  -- relay loadtest
"""
_STATES = "select id, status from relay.deliveries where workspace_id = %s  -- relay loadtest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of the deliveries that were offered."""

    #: Made, whether or not their rows are still there.
    offered: int
    #: On record as delivered, and seen by the receiver.
    delivered: int
    lost: int
    #: Requests beyond each delivery's first.
    duplicates: int
    #: Those of them that no attempt on record accounts for.
    unexplained: int
    #: Ids that came and were never offered: always a fault.
    strangers: int

    @property
    def ok(self) -> bool:
        """Nothing lost, nothing twice without a cause, nothing that nobody sent."""
        return not (self.lost or self.unexplained or self.strangers)


def tally(
    *,
    states: Mapping[bytes, int],
    arrivals: Iterable[bytes],
    sends: Mapping[bytes, int],
    earlier: frozenset[bytes],
    made: int,
) -> Tally:
    """Compare the rows' `states` with the ids that came; `sends` says, for those that came twice, what is on record.

    `earlier` are ids that were sent before the measurement began: they are left out on both sides. `made` is how many
    there must be at least, by the count of whoever made them: a row that is no longer there is a loss like any other.
    """
    seen = Counter(arrivals)
    rows = states.keys() - earlier
    offered = max(made, len(rows))
    delivered = sum(1 for id_ in rows if states[id_] == Status.DELIVERED and id_ in seen)
    repeated = {id_: times - 1 for id_, times in seen.items() if times > 1 and id_ not in earlier}
    return Tally(
        offered=offered,
        delivered=delivered,
        lost=offered - delivered,
        duplicates=sum(repeated.values()),
        unexplained=sum(max(0, 1 + extra - sends.get(id_, 0)) for id_, extra in repeated.items()),
        strangers=len(seen.keys() - states.keys()),
    )


def take(
    connection: Connection,
    workspace_id: UUID,
    arrivals: Arrivals,
    *,
    made: int,
    earlier: frozenset[bytes] = frozenset(),
) -> Tally:
    """Read the rows of a workspace and compare them with what came, and with how many were `made`."""
    states = {row[0].bytes: row[1] for row in connection.execute(_STATES, [workspace_id], binary=True)}
    ids = [id_ for id_, _ in arrivals.pairs()]
    repeated = [UUID(bytes=id_) for id_, times in Counter(ids).items() if times > 1]
    sends = {row[0].bytes: row[1] for row in connection.execute(_SENDS, [repeated])}
    return tally(states=states, arrivals=ids, sends=sends, earlier=earlier, made=made)
