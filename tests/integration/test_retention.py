"""Retention: each thing goes when its window is over, what is owed never does, and deliveries come first (B-161)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.core.days import partition_name
from relay.core.model import Status
from relay.store import partitions
from relay.store.engine import make_engine
from relay.sweeps import retention as sweep
from relay.sweeps.retention import Retention, Windows
from relay.sweeps.runner import run_sweep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    import sqlalchemy as sa

    from tests.rows import Rows

WINDOWS = Windows(attempts_days=30, delivered_days=30, dead_days=90, audit_days=365, idempotency_secs=86_400)


@pytest.fixture
def retention(database: str, hot: sa.Engine) -> Iterator[Retention]:
    """The sweep with the default windows."""
    engine = make_engine(database, name="test", size=2)
    yield Retention(engine=engine, hot=hot, windows=WINDOWS)
    engine.dispose()


def old(rows: Rows, endpoint: UUID, days: int, status: Status) -> UUID:
    """Make a delivery and its event as if `days` ago, ids included, ended then unless it is pending."""
    made = rows.value(
        "select overlay(relay.uuid7()::text placing lpad(to_hex((extract(epoch from now() - make_interval(days => %s))"
        " * 1000)::bigint >> 16), 8, '0') from 1 for 8)::uuid",
        [days],
    )
    event = rows.value("select overlay(%s::text placing '7abc' from 15 for 4)::uuid", [made])
    finished = "null" if status in {Status.PENDING, Status.IN_FLIGHT} else "at"
    rows.connection.execute(
        f"""
        with t as (select now() - make_interval(days => %(days)s) as at),
        e as (
            insert into relay.events (id, workspace_id, type, content_type, payload, delivery_ids, created_at)
            select %(event)s, %(workspace)s, 'a.b', 'application/json', '1', array[%(id)s::uuid], at from t
        )
        insert into relay.deliveries
            (id, workspace_id, event_id, endpoint_id, event_type, status, due_at, created_at, finished_at)
        select %(id)s, %(workspace)s, %(event)s, %(endpoint)s, 'a.b', %(status)s, null, at, {finished} from t
        """,
        {
            "id": made,
            "event": event,
            "workspace": rows.workspace_id,
            "endpoint": endpoint,
            "status": int(status),
            "days": days,
        },
    )
    id_: UUID = made
    return id_


def test_each_thing_has_its_window(retention: Retention, rows: Rows) -> None:
    """Finished rows go after theirs; pending of any age, and younger dead ones, stay with their events (C-61)."""
    endpoint = rows.endpoint()
    gone = [
        old(rows, endpoint, 40, Status.DELIVERED),
        old(rows, endpoint, 31, Status.CANCELED),
        old(rows, endpoint, 95, Status.DEAD),
    ]
    kept = [
        old(rows, endpoint, 400, Status.PENDING),
        old(rows, endpoint, 400, Status.IN_FLIGHT),
        old(rows, endpoint, 20, Status.DEAD),
        old(rows, endpoint, 60, Status.DEAD),
        old(rows, endpoint, 5, Status.DELIVERED),
    ]
    rows.sql(
        "insert into relay.events (id, workspace_id, type, content_type, payload, created_at)"
        " values ('00000000-0000-7000-8000-000000000001', %s, 'a.b', 'x/y', '1', now() - interval '60 d')",
        [rows.workspace_id],
    )
    rows.sql(
        "insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response, created_at) values"
        " (%(w)s, 'old', '', relay.uuid7(), '', now() - interval '25 h'), (%(w)s, 'new', '', relay.uuid7(), '', now())",
        {"w": rows.workspace_id},
    )
    rows.sql(
        "insert into relay.audit_log (id, actor, action, target) values"
        " ('00000000-0000-7000-8000-000000000002', 'x', 'x', 'x'), (relay.uuid7(), 'x', 'x', 'x')"
    )
    rows.sql(
        "insert into relay.endpoint_minutes (endpoint_id, minute) select %s, now() - make_interval(days => d)"
        " from unnest(array[0, 7, 9, 40]) d",
        [endpoint],
    )
    rows.sql(
        "insert into relay.heartbeats (process_id, role, host, pid, release, beat_at) values"
        " (relay.uuid7(), 'worker', '', 1, '', now() - interval '31 d'), (relay.uuid7(), 'worker', '', 1, '', now())"
    )
    counts = retention.run_once(since_last=0.0)

    assert counts == {"partitions": 0, "deliveries": 3, "events": 4, "keys": 1, "audit": 1, "other": 3, "yielded": 0}
    assert {row["id"] for row in rows.sql("select id from relay.deliveries")} == set(kept)
    assert not set(gone) & set(kept)
    orphans = "select count(*) from relay.deliveries d where not exists (select 1 from relay.events e where e.id = d.event_id)"
    assert rows.value(orphans) == 0
    assert retention.run_once(since_last=0.0)["deliveries"] == 0


def test_old_partitions_are_dropped_whole(retention: Retention, rows: Rows) -> None:
    """A day goes when all of it is older than the window; the default partition, today and later days stay."""
    with retention.engine.begin() as connection:
        today = partitions.today(connection)
        before = partitions.existing(connection)
        for days in (29, 30, 31, 45):
            partitions._make(connection, today.fromordinal(today.toordinal() - days))
    assert retention.run_once(since_last=0.0)["partitions"] == 2

    kept = {partition_name(today.fromordinal(today.toordinal() - days)) for days in (29, 30)}
    with retention.engine.connect() as connection:
        assert partitions.existing(connection) == before | kept
    assert rows.value("select count(*) from relay.delivery_attempts") == 0


def test_it_yields_to_a_queue_that_is_late(retention: Retention, rows: Rows) -> None:
    """With deliveries waiting for workers nothing is deleted but whole partitions."""
    endpoint = rows.endpoint()
    old(rows, endpoint, 40, Status.DELIVERED)
    rows.delivery(endpoint, due_in=-sweep.LATE_SECS - 1)

    assert retention.run_once(since_last=0.0) == {
        **dict.fromkeys(("partitions", "deliveries", "events", "keys", "audit", "other"), 0),
        "yielded": 1,
    }


def test_a_backlog_of_one_kind_keeps_no_other_from_its_turn(
    retention: Retention, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has no time for all of a backlog deletes some of each kind, and the next tick goes on (B-161)."""
    monkeypatch.setattr(sweep, "BATCH", 2)
    endpoint = rows.endpoint()
    for _ in range(9):
        old(rows, endpoint, 40, Status.DELIVERED)
    rows.sql(
        "insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response, created_at)"
        " select %s, 'k' || n, '', relay.uuid7(), '', now() - interval '40 d' from generate_series(1, 9) n",
        [rows.workspace_id],
    )
    steps = 5

    def is_over(*_: object) -> bool:
        nonlocal steps
        steps -= 1
        return steps < 0

    monkeypatch.setattr(Retention, "_must_yield", is_over)
    first = run_sweep(retention.engine, retention)
    assert first is not None
    assert (first["deliveries"], first["events"], first["keys"], first["yielded"]) == (2, 2, 2, 1)

    monkeypatch.undo()
    with monkeypatch.context() as hurried:
        hurried.setattr(sweep, "RUN_SECS", -1.0)
        assert run_sweep(retention.engine, retention) == {**dict.fromkeys(first, 0), "yielded": 1}
    assert run_sweep(retention.engine, retention) is not None, "what is left waits for half of the interval"
    for table in ("deliveries", "events", "idempotency_keys"):
        assert rows.value(f"select count(*) from relay.{table}") == 0
    assert run_sweep(retention.engine, retention) is None


def test_a_held_log_costs_a_partition_its_drop_and_nobody_else_anything(
    retention: Retention, rows: Rows, database: str
) -> None:
    """Where the lock does not come at once the day waits for the next run; rows are deleted all the same (F-22)."""
    old(rows, rows.endpoint(), 40, Status.DELIVERED)
    with retention.engine.begin() as connection:
        today = partitions.today(connection)
        partitions._make(connection, today.fromordinal(today.toordinal() - 45))
    with psycopg.connect(database) as holder:
        holder.execute("select * from relay.delivery_attempts")
        counts = retention.run_once(since_last=0.0)

    assert (counts["partitions"], counts["deliveries"]) == (0, 1)
    assert retention.run_once(since_last=0.0)["partitions"] == 1


def test_implicit_and_deleted_endpoints_go_when_nothing_tells_of_them(retention: Retention, rows: Rows) -> None:
    """An origin that no job has used for a month goes, and a deleted endpoint whose deliveries are gone; others stay."""
    unused, used, deleted, own = (rows.endpoint() for _ in range(4))
    rows.sql("update relay.endpoints set created_at = now() - interval '40 d'")
    rows.sql("update relay.endpoints set kind = 1, origin = id::text where id = any(%s)", [[unused, used]])
    rows.sql("update relay.endpoints set deleted_at = now() - interval '31 d' where id = %s", [deleted])
    rows.delivery(used, due_in=60)
    retention.run_once(since_last=0.0)

    assert {row["id"] for row in rows.sql("select id from relay.endpoints")} == {used, own}
