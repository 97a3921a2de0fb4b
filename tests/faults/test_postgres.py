"""Postgres is the record: while it is gone nothing is accepted, and what was accepted or sent before is not forgotten."""

from __future__ import annotations

import signal
import threading
import time

import requests

from relay.core.model import Status
from tests.stack import LONG, Role, Stack, freeze, freeze_end, own_postgres, wait_until
from tests.traffic import Traffic, at_rest, check, duplicates, settle, still_works, unsettled

#: Seconds that Postgres stands still.
FROZEN_SECS = 30.0 if LONG else 5.0
#: Seconds of grace that the worker has which is told to stop meanwhile.
GRACE_SECS = 3
SUCCESS = 'relay_delivery_attempts_total{outcome="success"}'


def test_immediate_restart_under_load(broker: str) -> None:
    """Every 202 survives a crash of the database, ingest answers 503 and nothing else meanwhile, all reconnect (B-28)."""
    with own_postgres() as server, Stack(database_url=server.url, broker_url=broker) as stack:
        assert stack.rows("select current_setting('fsync'), current_setting('synchronous_commit')") == [("on", "on")]
        stack.endpoint("/slow/crash?ms=200")
        stack.start("api", "publisher", "worker", "worker", "beat")
        roles = [role for role in stack.roles if role.alive]
        with Traffic(stack) as traffic:
            for _ in range(2):
                traffic.wait_accepted(100)
                refused = traffic.answers[503]
                server.stop("immediate")
                wait_until(lambda: traffic.answers[503] >= refused + 8, 20, "ingest says 503")  # noqa: B023
                assert stack.get("/healthz") == 200
                server.start()
            traffic.wait_accepted(100)
        assert set(traffic.answers) == {202, 503}
        assert (traffic.unknown, traffic.not_connected) == ([], 0)
        settle(stack, 60)
        accounts = check(stack, traffic)
        # Only what had begun before the crash, with its claim's or its record's reply lost, may have come again.
        assert all(one.lost for one in duplicates(accounts)), duplicates(accounts)
        assert all(one.status is Status.DELIVERED for one in accounts.values())
        assert [role for role in roles if not role.alive] == []
        stack.sweeps_run()
        at_rest(stack)
        still_works(stack, traffic)


def test_backend_terminated_between_send_and_record(database: str, broker: str) -> None:
    """A recorder whose connection is gone writes over another, with the same token: no second send, one attempt."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/ok")
        stack.start("publisher")
        worker = stack.start("worker", RELAY_FAILPOINT="record.before:sleep")[0]
        traffic.ingest(20)
        worker.wait_said("failpoint", 20)
        ended = stack.rows(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'relay worker' and datname = current_database()"
        )
        assert len(ended) >= 2
        settle(stack)
        assert {(one.status, one.attempts, one.receipts) for one in check(stack, traffic).values()} == {
            (Status.DELIVERED, 1, 1)
        }
        wait_until(lambda: worker.metrics()[SUCCESS] == 20, 5, "each is counted once")
        at_rest(stack)


def test_frozen_for_a_while(broker: str) -> None:
    """Postgres stands still: healthz stays 200, readyz is 503 within 2 s, a SIGTERM is obeyed within the grace;
    afterwards no delivery has a false failure."""
    # Twice as many threads as senders: those that wait for the database are not all that there are.
    with (
        own_postgres() as server,
        Stack(database_url=server.url, broker_url=broker, RELAY_API_THREADS="16") as stack,
    ):
        stack.endpoint("/slow/frozen?ms=200")
        leaver = stack.launch("worker", RELAY_SHUTDOWN_GRACE_SECS=str(GRACE_SECS))
        stack.start("api", "publisher", "worker", "beat")
        with Traffic(stack) as traffic:
            traffic.wait_accepted(100)
            wait_until(lambda: stack.get("/readyz") == 200, 20, "all is well")
            wait_until(lambda: leaver.metrics()["relay_sends_in_flight"] > 0, 20, "a worker is at work")
            freeze(server)
            frozen_at = time.monotonic()
            leaver.signal(signal.SIGTERM)
            left_at: list[float] = []
            threading.Thread(target=lambda: left_at.append(_end_of(leaver))).start()
            try:
                while time.monotonic() < frozen_at + FROZEN_SECS:
                    began = time.monotonic()
                    assert stack.get("/healthz") == 200
                    assert time.monotonic() - began < 1.0
                    began = time.monotonic()
                    answer = requests.get(f"{stack.url}/readyz", timeout=10)
                    assert (answer.status_code, time.monotonic() - began < 2.0) == (503, True)
                    assert "database" in answer.json()["checks"]
                    time.sleep(0.1)
                assert left_at, "it waited for the database"
                assert left_at[0] - frozen_at < GRACE_SECS + 0.5
            finally:
                freeze_end(server)
            traffic.wait_accepted(100)
        assert set(traffic.answers) <= {202, 503}
        wait_until(lambda: stack.end_leases(older_secs=2.0) or not unsettled(stack), 20, "what it held is left")
        settle(stack, 60)
        accounts = check(stack, traffic)
        assert all(one.status is Status.DELIVERED and one.attempts == 1 + one.lost for one in accounts.values())
        assert all(one.lost for one in duplicates(accounts)), duplicates(accounts)
        stack.sweeps_run()
        at_rest(stack)
        still_works(stack, traffic)


def _end_of(role: Role) -> float:
    """Wait until a role has ended; return when it did, on the monotonic clock."""
    role.wait(60)
    return time.monotonic()
