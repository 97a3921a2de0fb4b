"""The drain: many deliveries that become due at one instant, as after a long outage. How fast are they gone?

The whole path is measured: announcing, the stream, claiming, sending and recording. The rows are in the tables before,
with a due time a little ahead, so that releasing them costs nothing and leaves nothing behind.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from relay.core.errors import Unavailable
from relay.loadtest.accounting import Tally, take
from relay.loadtest.scenario import Options, make_report
from relay.loadtest.seed import Workspace, make_deliveries, make_workspace
from relay.loadtest.stack import POLL_SECS, Stack

if TYPE_CHECKING:
    from uuid import UUID

    from relay.loadtest.report import Report
    from relay.loadtest.sink import Sink

COUNT = 40_000
ENDPOINTS = 50
PAYLOAD_BYTES = 500
#: Deliveries made before the measurement: connections open, plans and modules are there.
WARM_UP = 1_000
#: Rows that even a slow machine makes in a second, and seconds beside: when the rows become due is said beforehand.
_SEEDED_PER_SECOND = 4_000
_SPARE_SECS = 3.0
#: Seconds before the release at which the readings are taken.
_READING_SECS = 0.2
#: Seconds without any progress after which what is missing is lost.
PATIENCE_SECS = 20.0

_UNFINISHED = """
select exists (select 1 from relay.deliveries where status = 0 and announced_at is null)
    or exists (select 1 from relay.deliveries where status = 0 and announced_at is not null)
    or exists (select 1 from relay.deliveries where status = 1)  -- relay loadtest
"""
_LAST = """
select extract(epoch from max(finished_at))::float8 from relay.deliveries
where workspace_id = %s and finished_at >= %s  -- relay loadtest
"""
_IDS = "select id from relay.deliveries where workspace_id = %s  -- relay loadtest"


def run(
    options: Options, *, endpoints: int = ENDPOINTS, dropping: int = 0, patience_secs: float = PATIENCE_SECS
) -> Report:
    """Drain `options.count` deliveries over `endpoints` endpoints, each an origin of its own.

    For trying the accounting itself, the sink drops all requests to `dropping` of the endpoints.
    """
    with options.stack() as stack:
        return run_in(stack, options, endpoints=endpoints, dropping=dropping, patience_secs=patience_secs)


def run_in(
    stack: Stack,
    options: Options,
    *,
    endpoints: int = ENDPOINTS,
    dropping: int = 0,
    patience_secs: float = PATIENCE_SECS,
    name: str = "loadtest",
) -> Report:
    """The same in a stack that is there and has no roles running, in a new workspace called `name`."""
    count = options.count or COUNT
    sink = stack.start_sink(origins=endpoints)
    paths = ["/drop" if number < dropping else f"/endpoint/{number}" for number in range(endpoints)]
    urls = [origin + path for origin, path in zip(sink.urls, paths, strict=True)]
    workspace = make_workspace(stack.connection, stack.vault, urls, name=name)
    stack.start_role("publisher")
    stack.start_role("worker", options.workers)
    stack.wait_for_heartbeats({"publisher": 1, "worker": options.workers})
    earlier = frozenset() if dropping else _warm_up(stack, sink, workspace, min(WARM_UP, count))

    options.say(f"making {count:,} deliveries")
    due_at = datetime.now(UTC) + timedelta(seconds=_SPARE_SECS + count / _SEEDED_PER_SECOND)
    make_deliveries(stack.connection, workspace, count, due_at=due_at, payload_bytes=PAYLOAD_BYTES)
    left = due_at.timestamp() - _READING_SECS - time.time()
    if left < 0:
        raise Unavailable(f"making {count} rows took longer than planned: the machine is too busy to measure on")
    time.sleep(left)
    before = stack.read()
    options.say("releasing them")
    time.sleep(max(0.0, due_at.timestamp() - time.time()))
    _wait_until_gone(stack, sink, count, patience_secs)
    after = stack.read()

    arrivals = sink.snapshot()
    tally = take(stack.connection, workspace.id, arrivals, made=count, earlier=earlier)
    ended = max(_last_record(stack, workspace, due_at), max(arrivals.times, default=0.0))
    return make_report(
        "drain",
        stack,
        options=options,
        tally=tally,
        before=before,
        after=after,
        rate_per_second=_rate(tally, ended - due_at.timestamp()),
        settings={
            "count": count,
            "endpoints": endpoints,
            "origins": endpoints,
            "payload_bytes": PAYLOAD_BYTES,
            "warm_up": len(earlier),
            "figures": {"seconds": round(ended - due_at.timestamp(), 3)},
        },
    )


def _warm_up(stack: Stack, sink: Sink, workspace: Workspace, count: int) -> frozenset[bytes]:
    """Make some deliveries, wait until they are done, and return their ids."""
    make_deliveries(stack.connection, workspace, count, due_at=datetime.now(UTC), payload_bytes=PAYLOAD_BYTES)
    stack.wait_for(lambda: sink.count() >= count and not _unfinished(stack), "warming up")
    sink.reset()
    ids: list[tuple[UUID]] = stack.connection.execute(_IDS, [workspace.id], binary=True).fetchall()
    return frozenset(row[0].bytes for row in ids)


def _wait_until_gone(stack: Stack, sink: Sink, count: int, patience_secs: float) -> None:
    """Wait until all came and all is recorded, or nothing has come for so long."""
    seen, last_progress, looked = -1, time.monotonic(), 0.0
    while True:
        now, came = time.monotonic(), sink.count()
        if came != seen:
            seen, last_progress = came, now
        # The database is asked when it is nearly over, or seems stuck: asking costs what is measured.
        if came >= count or now - max(last_progress, looked) > 1.0:
            looked = now
            if not _unfinished(stack):
                return
        if now - last_progress > patience_secs:
            return
        stack.check_roles()
        time.sleep(POLL_SECS)


def _unfinished(stack: Stack) -> bool:
    row = stack.connection.execute(_UNFINISHED).fetchone()
    return row is None or bool(row[0])


def _last_record(stack: Stack, workspace: Workspace, due_at: datetime) -> float:
    row = stack.connection.execute(_LAST, [workspace.id, due_at]).fetchone()
    return 0.0 if row is None or row[0] is None else float(row[0])


def _rate(tally: Tally, seconds: float) -> float | None:
    return round(tally.delivered / seconds, 1) if tally.delivered and seconds > 0 else None
