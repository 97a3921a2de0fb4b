"""Single database sessions that answer no more, while all the others do: a hung disk, a lost packet, a paused process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from uuid import UUID

import requests

from relay.core.model import Status
from relay.outbox.stream import Stream, connect
from tests.stack import Stack, own_postgres, wait_until
from tests.traffic import Traffic, at_rest, check, settle, still_works

#: The sessions on which a worker claims and records, and the one on which a publisher leads. Each of their statements
#: is a transaction, while those of heartbeats and the like end theirs by a statement of its own.
HOT = """datname = current_database() and application_name = %s and state = 'idle'
    and query not in ('COMMIT', 'ROLLBACK', 'BEGIN', 'DEALLOCATE ALL', '')"""


def test_worker_and_publisher_whose_sessions_freeze_say_so_and_get_over_it(broker: str) -> None:
    """The backends behind claims, results and the publisher's lock stop for good. Within half a minute the heartbeats
    tell, readiness is 503 and names both; the processes go on over new sessions, and deliver each event once, though
    the frozen backend keeps the publisher's lock (F-14)."""
    with (
        own_postgres() as server,
        # Leases outlast the silence after which a session is given up: what was sent is recorded, not sent again.
        Stack(database_url=server.url, broker_url=broker, RELAY_LEASE_SECS="60", RELAY_WORKER_THREADS="2") as stack,
        Traffic(stack, senders=0) as traffic,
    ):
        stack.endpoint("/ok")
        publisher, worker, _, _ = stack.start("publisher", "worker", "beat", "api")
        traffic.ingest(5)
        settle(stack)
        wait_until(lambda: stack.get("/readyz") == 200, 20, "all is well")
        with contextlib.ExitStack() as thaw, contextlib.closing(connect(broker)) as client:
            stream = Stream(client, prefix="relay", consumer="tests")
            wait_until(
                lambda: freeze_sessions(stack, "relay publisher", thaw), 10, "the publisher's session is at rest"
            )
            seen: dict[str, str] = {}
            began = time.monotonic()

            def told() -> bool:
                # Those that it opens instead stop, too, after a statement or two.
                if "worker" not in seen:
                    freeze_sessions(stack, "relay worker", thaw)
                    # With the publisher's own session frozen nobody else announces.
                    stream.announce([UUID(id_) for id_ in traffic.ingest(1)])
                time.sleep(0.2)
                answer = requests.get(f"{stack.url}/readyz", timeout=5)
                said = {} if answer.status_code == 200 else answer.json()["checks"]
                seen.update({name: text for name, text in said.items() if text != "ok"})
                return {"worker", "publisher"} <= seen.keys()

            wait_until(told, 60, "readiness names worker and publisher")
            assert "1 of 1 stalled" in seen["worker"]
            assert "none has looked for due deliveries" in seen["publisher"]
            for role in (publisher, worker):
                # A restart would mend nothing.
                assert requests.get(f"http://127.0.0.1:{role.port}/healthz", timeout=5).status_code == 200
            told_at = time.monotonic()
            settle(stack, 40)
            print(f"told after {told_at - began:.0f} s, settled after {time.monotonic() - began:.0f} s")
        wait_until(lambda: len(publisher.said("publishing")) == 2, 20, "the publisher leads again")
        wait_until(lambda: stack.get("/readyz") == 200, 20, "all is well again")
        assert {(one.status, one.attempts, one.receipts) for one in check(stack, traffic).values()} == {
            (Status.DELIVERED, 1, 1)
        }
        at_rest(stack)
        still_works(stack, traffic)


def test_publisher_that_is_paused_is_replaced(database: str, broker: str) -> None:
    """SIGSTOP to the publisher that leads: the server ends its silent session, and another leads within seconds."""
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=0) as traffic:
        stack.endpoint("/ok")
        leader, _ = stack.start("publisher", "worker")
        standby = stack.launch("publisher")
        traffic.ingest(10)
        settle(stack)
        leader.signal(signal.SIGSTOP)
        standby.wait_said("publishing", 20)
        traffic.ingest(10)
        settle(stack)
        leader.signal(signal.SIGCONT)
        leader.wait_said("the database does not answer the publisher", 10)
        traffic.ingest(10)
        settle(stack)
        assert len(leader.said("publishing")) == 1
        assert {(one.attempts, one.receipts) for one in check(stack, traffic).values()} == {(1, 1)}
        at_rest(stack)


def freeze_sessions(stack: Stack, application: str, thaw: contextlib.ExitStack) -> int:
    """Stop the backends of an application's hot sessions where they stand, until `thaw` ends; return how many."""
    pids = [row[0] for row in stack.rows(f"select pid from pg_stat_activity where {HOT}", application)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            thaw.callback(resume, pid)
    return len(pids)


def resume(pid: int) -> None:
    """Let a process go on, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
