"""A week that never was: millions of finished deliveries and their attempts, put into the tables by SQL.

Rows look as a week of work leaves them: ids and times rise together, ten endpoints share an event, each delivery failed once
and then succeeded, but for one in a hundred that is dead. Ids are computed from a number, so that deliveries and
attempts are made side by side, without asking for each other's.
"""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import psycopg

from relay.core.days import bounds, days_ahead, partition_name
from relay.core.errors import Unavailable
from relay.loadtest.seed import EVENT_TYPE, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.loadtest.accounting import Connection
    from relay.loadtest.seed import Workspace

#: Days that the rows are spread over, today included, and deliveries of an event.
DAYS: Final = 7
FAN_OUT: Final = 10
PAYLOAD_BYTES: Final = 500
#: One delivery in so many is dead: a number without a factor in common with that of endpoints, so that each has some.
DEAD_EVERY: Final = 101
#: Bytes that a delivery takes with its two attempts, its share of an event, all indexes, and the log of writing them.
BYTES_A_ROW: Final = 2_500
#: Events whose rows one statement makes.
_CHUNK: Final = 50_000

# RFC 9562 version 7, as relay.uuid7() makes them, but of a given time and with 48 bits of a hash in place of random ones:
# drawing or digesting them takes longer than writing the rows. No argument is used twice, or Postgres would call the
# function instead of writing its text into the query, which is slower again.
_ID = """
create function pg_temp.made_id(at timestamptz, hash bigint) returns uuid language sql stable as $$
    select encode(
        substring(int8send((date_part('epoch', at) * 1000)::bigint) from 3) || '\\x70008000'::bytea
            || substring(int8send(hash) from 3),
        'hex')::uuid
$$
"""
_TIME = "%(start)s::timestamptz + number * %(gap)s::interval"
_EVENTS = f"""
insert into relay.events (id, workspace_id, type, content_type, payload, delivery_ids, created_at)
select pg_temp.made_id(at, hashint8extended(number, 0)), %(workspace)s, %(type)s, 'application/json', %(payload)s,
    array(
        select pg_temp.made_id(at, hashint8extended(number * {FAN_OUT} + place, 1))
        from generate_series(0, {FAN_OUT - 1}) as place
    ),
    at
from generate_series(%(first)s::bigint, %(last)s::bigint) as number cross join lateral (select {_TIME} as at) t
-- relay loadtest
"""
_DELIVERIES = f"""
insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, status, reason, attempt_count, due_at,
    created_at, finished_at)
select pg_temp.made_id(at, hashint8extended(which, 1)), %(workspace)s, pg_temp.made_id(at, hashint8extended(number, 0)),
    (%(endpoints)s::uuid[])[1 + which %% array_length(%(endpoints)s::uuid[], 1)], %(type)s,
    case when which %% {DEAD_EVERY} = 0 then 3 else 2 end,
    case when which %% {DEAD_EVERY} = 0 then 'attempts_exhausted' end,
    2, at + interval '30 s', at, at + interval '30.05 s'
from generate_series(%(first)s::bigint, %(last)s::bigint) as number cross join lateral (select {_TIME} as at) t
cross join lateral (select number * {FAN_OUT} + place as which from generate_series(0, {FAN_OUT - 1}) as place) d
-- relay loadtest
"""
_ATTEMPTS = f"""
insert into relay.delivery_attempts (delivery_id, at, lease_token, number, generation, class, code, status, sends, dns_us,
    connect_us, tls_us, first_byte_us, total_us, bytes_sent, bytes_received, remote_address, worker, snippet)
select pg_temp.made_id(at, hashint8extended(which, 1)), at + (tried - 1) * interval '30 s',
    pg_temp.made_id(at, hashint8extended(which, tried + 1)), tried, 0, case when good then 0 else 1 end,
    case when not good then 'http_503' end, case when good then 204 else 503 end,
    1, 0, 150, 0, 1800, 2000, 900, 120, '127.0.0.1', 'worker-1@loadtest',
    case when not good then 'the service is not available for the moment' end
from generate_series(%(first)s::bigint, %(last)s::bigint) as number cross join lateral (select {_TIME} as at) t
cross join lateral (select number * {FAN_OUT} + place as which from generate_series(0, {FAN_OUT - 1}) as place) d
cross join lateral (
    select tried, tried = 2 and which %% {DEAD_EVERY} <> 0 as good from generate_series(1, 2) as tried
) a
-- relay loadtest
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How many rows there are now."""

    deliveries: int
    attempts: int
    seconds: float


def make(
    database_url: str,
    connection: Connection,
    workspace: Workspace,
    rows: int,
    *,
    here: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Made:
    """Make `rows` finished deliveries (to the next ten) of the workspace's endpoints, and twice as many attempts.

    Their statistics are taken and the tables cleaned up, as they would be by themselves in time. `here` says that the
    database lies on this machine's disk. Raises Unavailable where that has too little room.
    """
    if here:
        _require_room(rows)
    events = -(-rows // FAN_OUT)
    now = datetime.now(UTC)
    start = now - timedelta(days=DAYS - 1)
    _make_days(connection, start)
    work = {
        "workspace": workspace.id,
        "endpoints": list(workspace.endpoint_ids),
        "type": EVENT_TYPE,
        "payload": payload_of(PAYLOAD_BYTES),
        "start": start,
        # The last attempts, too, are of the past.
        "gap": (now - timedelta(minutes=1) - start) / events,
    }
    # The log does not refer to the deliveries, so it is written beside them.
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(_fill, database_url, (_EVENTS, _DELIVERIES), events, work, say),
            pool.submit(_fill, database_url, (_ATTEMPTS,), events, work, lambda _: None),
        ]:
            done.result()
    say("cleaning up and taking statistics")
    for table in ("events", "deliveries", "delivery_attempts"):
        connection.execute(f"vacuum (analyze) relay.{table}")
    try:
        # What is dirty is written before the measurement, and not during it.
        connection.execute("checkpoint")
    except psycopg.errors.InsufficientPrivilege:
        say("no checkpoint: this user may not ask for one")
    return Made(
        deliveries=events * FAN_OUT,
        attempts=events * FAN_OUT * 2,
        seconds=round((datetime.now(UTC) - now).total_seconds(), 1),
    )


def _require_room(rows: int) -> None:
    needed, place = rows * BYTES_A_ROW, tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if free < needed:
        raise Unavailable(
            f"{rows:,} deliveries take about {needed / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB free:"
            " take fewer --rows, or set TMPDIR to where there is more room"
        )


def _make_days(connection: Connection, start: datetime) -> None:
    """Make the log's partitions of the days gone by."""
    for day in days_ahead(start.date(), DAYS - 2):
        since, until = bounds(day)
        connection.execute(
            f"create table if not exists relay.{partition_name(day)} partition of relay.delivery_attempts"
            f" for values from ('{since}') to ('{until}')"
        )


def _fill(
    database_url: str, statements: tuple[str, ...], events: int, work: dict[str, object], say: Callable[[str], None]
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(_ID)
        # Rows that can be made again need not wait for the disk.
        connection.execute("set synchronous_commit = off")
        try:
            # The endpoints are there: millions of look-ups would only say so.
            connection.execute("set session_replication_role = replica")
        except psycopg.errors.InsufficientPrivilege:
            say("this takes longer: the user may not leave out foreign keys")
        for first in range(0, events, _CHUNK):
            last = min(first + _CHUNK, events) - 1
            for statement in statements:
                connection.execute(statement, {**work, "first": first, "last": last})
            say(f"{(last + 1) * FAN_OUT:,} of {events * FAN_OUT:,} finished deliveries")
