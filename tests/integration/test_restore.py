"""A restored backup: Postgres as it was some days ago, a Redis that knows nothing, and everything resumes."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING
from uuid import UUID

from relay.core.days import days_ahead, partition_name
from relay.core.model import Status
from relay.embedded.binaries import find_postgres
from relay.outbox.publisher import Publisher
from relay.outbox.stream import Stream, connect
from relay.store import partitions
from relay.store.engine import make_engine, make_hot_engine
from relay.sweeps.partitions_ahead import PartitionsAhead
from relay.sweeps.reap import Reap
from relay.sweeps.reconcile import Reconcile
from tests.hostile import wait_until
from tests.instance import instance
from tests.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from relay.bootstrap.worker import Worker
    from relay.store.vault import Vault
    from relay.testkit.receiver import Receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
#: What a backup need not hold, nor does a standby: pg_dump leaves it out on request.
UNLOGGED = ("endpoint_buckets", "ingest_buckets")


def _restore(source: str, target: str, folder: Path) -> None:
    """Take a backup as docs/running.md says, and restore it into an empty database."""
    programs, file = find_postgres().bin_dir, str(folder / "relay.dump")
    for argv in (
        ["pg_dump", "--format=custom", "--no-unlogged-table-data", "--schema=relay", "--file", file, source],
        ["pg_restore", "--exit-on-error", "--no-owner", "--dbname", target, file],
    ):
        done = subprocess.run([programs / argv[0], *argv[1:]], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_a_restored_backup_and_an_empty_redis_go_on(
    database: str,
    bare_database: str,
    broker: str,
    start_worker: Callable[..., Worker],
    receiver: Receiver,
    vault: Vault,
    tmp_path: Path,
) -> None:
    """What was pending goes out, lost hints are replaced, leases run out and are rescued; buckets and days come back.

    What had been delivered is not sent again, and keys, secrets and endpoints work on.
    """
    with Rows(database) as rows, instance(database) as before:
        workspace = UUID(before.workspace("acme", ingest_rate=1000))
        key = before.key()
        endpoint = rows.endpoint(
            f"{receiver.url}/verify",
            workspace_id=workspace,
            signing="standard",
            secret=SECRET,
            vault=vault,
            retry={"strategy": "fixed", "base_ms": 100, "jitter": 0.0},
            # The bucket is empty after a crash: it has filled again by the time that anything is claimed.
            rate=100_000.0,
            burst=200,
        )
        assert before.event(key, b'{"type": "test.made"}').status_code == 202
        (delivered,) = (
            row["id"] for row in rows.sql("update relay.deliveries set status = 2, due_at = null returning id")
        )
        pending = rows.deliveries(endpoint, 3)
        hinted = rows.deliveries(endpoint, 3, announced_ago=60.0)
        leased = rows.deliveries(endpoint, 2)
        rows.sql(
            "update relay.deliveries set status = 1, attempt_count = 1, lease_token = relay.uuid7(),"
            " lease_until = now() + interval '1 second', announced_at = now() where id = any(%s)",
            [leased],
        )
        later = rows.delivery(endpoint, due_in=3600.0)
        # As in a backup that is three days old: of the days ahead, the last are missing.
        days = days_ahead(rows.value("select (now() at time zone 'UTC')::date"), partitions.DAYS_AHEAD)
        for day in days[-3:]:
            rows.connection.execute(f"drop table relay.{partition_name(day)}".encode())
        assert all(rows.value(f"select count(*) from relay.{table}") for table in UNLOGGED)

    _restore(database, bare_database, tmp_path)

    receiver.set_secret(SECRET)
    with ExitStack() as undo:
        rows = undo.enter_context(Rows(bare_database))
        assert [rows.value(f"select count(*) from relay.{table}") for table in UNLOGGED] == [0, 0]
        assert rows.statuses() == {Status.PENDING: 7, Status.IN_FLIGHT: 2, Status.DELIVERED: 1}
        engine = make_engine(bare_database, name="test", size=2)
        hot = make_hot_engine(bare_database, name="test", size=2)
        undo.callback(engine.dispose)
        undo.callback(hot.dispose)
        stream = Stream(undo.enter_context(connect(broker)), prefix="t", consumer="sweeps")
        publisher = Publisher(hot, stream)

        assert PartitionsAhead(engine=engine).run_once(since_last=0.0) == {"moved": 0, "made": 3}
        # The hints that the backup tells of were in another Redis.
        assert Reconcile(hot=hot, stream=stream, after_secs=30).run_once(since_last=0.0) == {"unannounced": len(hinted)}
        with hot.connect() as connection:
            assert publisher.run_once(connection) == len(pending) + len(hinted)
        reap = Reap(hot=hot)
        wait_until(lambda: reap.run_once(since_last=0.0)["rescued"] == len(leased))

        start_worker(DATABASE_URL=bare_database)
        after = undo.enter_context(instance(bare_database))
        answer = after.event(key, b'{"type": "test.made"}')
        assert answer.status_code == 202, answer.text
        fresh = UUID(answer.json["deliveries"][0]["id"])  # type: ignore[index]  # an object, as the status says
        with hot.connect() as connection:

            def all_delivered() -> bool:
                publisher.run_once(connection)
                return rows.statuses() == {Status.PENDING: 1, Status.DELIVERED: 10}

            wait_until(all_delivered, patience=20.0)

        assert rows.get(later)["status"] == Status.PENDING
        came = receiver.requests(path="/verify")
        assert {request.status for request in came} == {200}
        expected = [*pending, *hinted, *leased, fresh]
        assert sorted(str(request.delivery_id) for request in came) == sorted(map(str, expected))
        assert str(delivered) not in {request.delivery_id for request in came}
        for id_ in leased:
            assert [line["code"] for line in rows.attempts(id_)] == ["worker_lost", None]
        assert all(rows.value(f"select count(*) from relay.{table}") for table in UNLOGGED)
