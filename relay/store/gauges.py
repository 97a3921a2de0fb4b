"""How the queue stands as a whole, for the gauges: a few bounded statements over the partial indexes.

Rows are counted one by one up to `COUNTED`; where there are more, the planner's estimate stands in (as of the last
vacuum or analyze, and never below `COUNTED`), so that millions of rows cost what 100,000 do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from relay.core.model import BreakerState
from relay.store import announcements, heartbeats

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Rows of a kind that are counted one by one.
COUNTED: Final = 100_000
#: Of the default partition, which should hold none.
_DEFAULT_COUNTED: Final = 10_000
#: Seconds within which a process must have beaten to be looked at.
_LIVE_SECS: Final = 30.0

# For this transaction alone. The scans are by index: a sequential one would read what is finished, too.
_BOUNDS: Final = sa.text("""
select set_config('statement_timeout', '3s', true), set_config('lock_timeout', '500ms', true),
    set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
    set_config('jit', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)
""")
# Announced rows are due, all of them: whatever moves a due time takes the mark.
DEPTHS: Final = sa.text("""
select
  (select count(*) from (select 1 from relay.deliveries
    where status = 0 and announced_at is null and due_at <= now() order by due_at, id limit :counted) fresh),
  (select count(*) from (select 1 from relay.deliveries
    where status = 0 and announced_at is not null order by announced_at limit :counted) announced),
  (select count(*) from (select 1 from relay.deliveries
    where status = 0 and announced_at is null and due_at > now() order by due_at, id limit :counted) waiting),
  (select count(*) from (select 1 from relay.deliveries
    where status = 0 and announced_at is null and due_at is null limit :counted) paused),
  (select count(*) from (select 1 from relay.deliveries
    where status = 1 order by lease_until limit :counted) leased)
""")
# Of the longest due, and of those that come next: to look at all would be to read every row.
OLDEST: Final = sa.text("""
select extract(epoch from now() - min(created_at))::float8 from (
    (select created_at from relay.deliveries where status = 0 and announced_at is null and due_at is not null
     order by due_at, id limit :sample)
    union all
    (select created_at from relay.deliveries where status = 0 and announced_at is not null
     order by announced_at limit :sample)
) next
""")
_SAMPLE: Final = 1000
_ESTIMATES: Final = sa.text("""
select relname, greatest(reltuples, 0)::float8 from pg_class
where relnamespace = 'relay'::regnamespace
  and relname in ('deliveries_unannounced', 'deliveries_announced', 'deliveries_leased')
""")
_ENDPOINTS: Final = sa.text("""
select breaker_state, enabled, count(*) from relay.endpoints where deleted_at is null group by 1, 2
""")
_DEFAULT_ROWS: Final = sa.text("""
select count(*) from (select 1 from relay.delivery_attempts_default limit :counted) stray
""")
_SWEEPS: Final = sa.text("select name, extract(epoch from now() - started_at)::float8 from relay.sweeps")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """The queue at one time. Seconds are by the database's clock."""

    #: By `due`, `waiting` (for a later try, or held back), `paused`, `in_flight`.
    deliveries: Mapping[str, float]
    lateness_secs: float
    #: None on an empty queue. Paused ones do not count: they are neither due nor late.
    oldest_secs: float | None
    #: By the state's name in lower case.
    breakers: Mapping[str, float]
    #: By `enabled`, `disabled`.
    endpoints: Mapping[str, float]
    #: 10,000 stands for that many or more.
    default_rows: int
    #: By role: seconds since any process of it beat.
    beat_ages: Mapping[str, float]
    workers_stalled: int
    #: By sweep: seconds since it last began.
    sweep_ages: Mapping[str, float]


def read(connection: sa.Connection) -> QueueFigures:
    """Look, within the caller's transaction; some milliseconds, or 3 s a statement at most before it raises."""
    connection.execute(_BOUNDS)
    fresh, announced, waiting, paused, leased = connection.execute(DEPTHS, {"counted": COUNTED}).one()
    if max(fresh, announced, waiting, paused, leased) >= COUNTED:
        estimates = {row[0]: row[1] for row in connection.execute(_ESTIMATES)}
        unannounced = max(
            0.0, estimates.get("deliveries_unannounced", 0.0) - _under(fresh) - _under(waiting) - _under(paused)
        )
        # Of these three at most one is usually that many: an estimate is of all together.
        fresh, waiting, paused = (
            max(count, unannounced) if count >= COUNTED else count for count in (fresh, waiting, paused)
        )
        announced = _estimated(announced, estimates.get("deliveries_announced", 0.0))
        leased = _estimated(leased, estimates.get("deliveries_leased", 0.0))
    breakers = {state.name.lower(): 0.0 for state in BreakerState}
    endpoints = {"enabled": 0.0, "disabled": 0.0}
    for state, enabled, count in connection.execute(_ENDPOINTS):
        breakers[BreakerState(state).name.lower()] += count
        endpoints["enabled" if enabled else "disabled"] += count
    live = heartbeats.live(connection, within_secs=_LIVE_SECS)
    return QueueFigures(
        deliveries={"due": fresh + announced, "waiting": waiting, "paused": paused, "in_flight": leased},
        lateness_secs=announcements.lateness_secs(connection) or 0.0,
        oldest_secs=connection.execute(OLDEST, {"sample": _SAMPLE}).scalar_one(),
        breakers=breakers,
        endpoints=endpoints,
        default_rows=connection.execute(_DEFAULT_ROWS, {"counted": _DEFAULT_COUNTED}).scalar_one(),
        beat_ages={role: max(0.0, age) for role, age in heartbeats.youngest_ages(connection).items()},
        workers_stalled=sum(
            one.role == "worker" and bool(one.details.get("stalled") or one.details.get("dead")) for one in live
        ),
        sweep_ages={row[0]: max(0.0, float(row[1])) for row in connection.execute(_SWEEPS)},
    )


def _under(count: int) -> int:
    """Return a count that was not cut short, else 0."""
    return count if count < COUNTED else 0


def _estimated(count: int, estimate: float) -> float:
    return max(count, estimate) if count >= COUNTED else count
