"""The plain way, for comparison: a Celery task for each delivery, `requests`, a statement a row.

Same tables, same rows, same receiver, same signature, in the same run as a drain. Nothing here is slow on purpose: the
session keeps its connections, the statements are prepared, each task makes two of them. It has none of Relay's
checks, caps, limits or breakers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import psycopg
import requests
from celery import Celery
from celery.signals import worker_process_init
from requests.adapters import HTTPAdapter

from relay.loadtest import drain
from relay.loadtest.scenario import Options, costs
from relay.loadtest.seed import make_deliveries, make_workspace
from relay.loadtest.stack import POLL_SECS

if TYPE_CHECKING:
    from relay.loadtest.accounting import Connection
    from relay.loadtest.report import Report
    from relay.loadtest.stack import Stack

#: Deliveries: its rate is steady, so few will do.
COUNT: Final = 3_000
WARM_UP: Final = 200
_QUEUE: Final = "baseline"
_TASK: Final = "relay.loadtest.baseline.deliver"
#: Processes of the worker: the receiver is at hand, so more than the cores bring nothing.
_PROCESSES: Final = 2

_CLAIM: Final = """
update relay.deliveries d set status = 1, attempt_count = attempt_count + 1, lease_token = %s,
    lease_until = now() + interval '60 s'
from relay.events e, relay.endpoints p
where d.id = %s and d.status = 0 and e.id = d.event_id and p.id = d.endpoint_id
returning d.event_id, d.event_type, d.attempt_count, e.payload, p.url, now()
"""
_RECORD: Final = """
with done as (
    update relay.deliveries set status = 2, finished_at = now(), lease_token = null, lease_until = null
    where id = %(id)s and lease_token = %(token)s returning id
)
insert into relay.delivery_attempts (delivery_id, at, lease_token, number, generation, class, status, sends, total_us)
select id, %(at)s, %(token)s, %(number)s, 0, 0, %(status)s, 1, %(total_us)s from done
"""
_SECRET: Final = b"whsec_plain"

app = Celery("baseline", broker=os.environ.get("RELAY_BROKER_URL"), set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    task_default_queue=_QUEUE,
    broker_transport_options={"global_keyprefix": f"{os.environ.get('RELAY_PREFIX', 'relay')}:"},
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
)
#: A process's own; made after the fork.
_process: dict[str, Any] = {}


def run(options: Options) -> Report:
    """Drain the plain way, then as Relay does; the report is the drain's, with the ratio in its figures."""
    with options.stack() as stack:
        options.say("the plain way")
        plain = _measure(stack, min(options.count or COUNT, COUNT))
        stack.stop_roles()
        stack.connection.execute("truncate relay.workspaces, relay.delivery_attempts cascade  -- relay loadtest")
        options.say("the same as Relay does it")
        drained = drain.run_in(stack, options)
        ratio = (drained.rate_per_second or 0.0) / plain["per_second"]
        return replace(
            drained,
            scenario="baseline",
            settings={**drained.settings, "figures": {"plain": plain, "ratio": round(ratio, 1)}},
        )


def _measure(stack: Stack, count: int) -> dict[str, Any]:
    """Return rate and costs of `count` deliveries, from the first task's publication to the last record."""
    sink = stack.start_sink(origins=drain.ENDPOINTS)
    urls = [f"{origin}/endpoint/{number}" for number, origin in enumerate(sink.urls)]
    workspace = make_workspace(stack.connection, stack.vault, urls, name="baseline")
    make_deliveries(
        stack.connection, workspace, WARM_UP + count, due_at=datetime.now(UTC), payload_bytes=drain.PAYLOAD_BYTES
    )
    ids = [row[0] for row in stack.connection.execute("select id from relay.deliveries order by id")]
    stack.start_process(
        "worker",
        [
            *(sys.executable, "-m", "celery", "-A", "relay.loadtest.baseline", "worker", "--loglevel=ERROR"),
            *(f"--concurrency={_PROCESSES}", f"--queues={_QUEUE}", "--without-gossip", "--without-mingle"),
        ],
    )
    with _producer(stack) as producer:
        for id_ in ids[:WARM_UP]:
            producer.send_task(_TASK, args=[str(id_)])
        stack.wait_for(lambda: _finished(stack.connection) >= WARM_UP, "warming up")
        before, began = stack.read(), time.time()
        # The publisher's part: here each task is one more command of its own, beside the worker as it works.
        publishing = threading.Thread(
            target=lambda: [producer.send_task(_TASK, args=[str(id_)]) for id_ in ids[WARM_UP:]]
        )
        publishing.start()
        stack.wait_for(lambda: sink.count() >= WARM_UP + count, "the plain way", secs=30 + count / 50)
        publishing.join()
        while _finished(stack.connection) < WARM_UP + count:
            time.sleep(POLL_SECS)
    row = stack.connection.execute(
        "select extract(epoch from max(finished_at))::float8 from relay.deliveries  -- relay loadtest"
    ).fetchone()
    cpu, statements, round_trips = costs(before, stack.read(), count)
    return {
        "count": count,
        "per_second": round(count / (float(row[0] if row else began) - began), 1),
        "cpu_us": cpu,
        "sql": statements,
        "redis": round_trips,
    }


def _finished(connection: Connection) -> int:
    row = connection.execute("select count(*) from relay.deliveries where status = 2  -- relay loadtest").fetchone()
    return 0 if row is None else int(row[0])


@contextlib.contextmanager
def _producer(stack: Stack) -> Any:
    producer = Celery("producer", broker=stack.broker_url, set_as_current=False)
    producer.conf.update(
        task_ignore_result=True,
        task_default_queue=_QUEUE,
        broker_transport_options={"global_keyprefix": f"{stack.prefix}:"},
    )
    try:
        yield producer
    finally:
        producer.close()


@worker_process_init.connect
def _open(**_: object) -> None:
    _process["connection"] = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)
    session = requests.Session()
    # By itself it keeps ten origins' connections and would open one for nearly every delivery.
    session.mount("http://", HTTPAdapter(pool_connections=drain.ENDPOINTS))
    _process["session"] = session


@app.task(name=_TASK)
def deliver(text: str) -> None:
    """Claim, sign, send and record one delivery."""
    connection: Connection = _process["connection"]
    session: requests.Session = _process["session"]
    delivery_id, token = UUID(text), uuid4()
    row = connection.execute(_CLAIM, [token, delivery_id]).fetchone()
    if row is None:
        return
    event_id, event_type, number, payload, url, at = row
    timestamp = str(int(time.time()))
    signature = hmac.new(_SECRET, timestamp.encode() + b"." + payload, hashlib.sha256).hexdigest()
    answer = session.post(
        url,
        data=payload,
        headers={
            "Content-Type": "application/json",
            "Relay-Timestamp": timestamp,
            "Relay-Signature": f"v1={signature}",
            "Relay-Delivery-Id": text,
            "Relay-Event-Id": str(event_id),
            "Relay-Event-Type": event_type,
            "Relay-Attempt": str(number),
        },
        timeout=30,
    )
    parameters = {
        "id": delivery_id,
        "token": token,
        "at": at,
        "number": number,
        "status": answer.status_code,
        "total_us": int(answer.elapsed.total_seconds() * 1e6),
    }
    connection.execute(_RECORD, parameters)
