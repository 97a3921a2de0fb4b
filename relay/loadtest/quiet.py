"""The quiet system: what one event costs in time when nothing else goes on, and what nothing costs in CPU.

Events are sent one by one over HTTP, well apart. The time is from just before the POST is written until the receiver
has read the whole request: ingest, commit, announcing, claiming and connection included.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from relay.core.errors import Unavailable
from relay.core.model import Scope
from relay.embedded.launch import free_port
from relay.loadtest.accounting import take
from relay.loadtest.report import percentile
from relay.loadtest.scenario import make_report
from relay.loadtest.seed import make_workspace, new_id, payload_of
from relay.store import keys
from relay.store.engine import make_engine

if TYPE_CHECKING:
    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options
    from relay.loadtest.seed import Workspace
    from relay.loadtest.stack import Stack

#: Seconds between two events, and of idleness that are measured.
INTERVAL_SECS: Final = 0.2
IDLE_SECS: Final = 20.0
SECONDS: Final = 30.0
#: Events before the measurement.
WARM_UP: Final = 20
_PAYLOAD_BYTES: Final = 500
#: Seconds for the last event to arrive and be recorded.
_PATIENCE_SECS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One event: when its POST began (Unix seconds), and the delivery that came of it."""

    at: float
    delivery_id: UUID


def run(options: Options, *, idle_secs: float = IDLE_SECS) -> Report:
    """Send an event each 200 ms for `options.seconds`, or `options.count` of them, after `idle_secs` of nothing."""
    count = options.count or max(1, int((options.seconds or SECONDS) / INTERVAL_SECS))
    with options.stack() as stack:
        sink = stack.start_sink()
        workspace = make_workspace(stack.connection, stack.vault, [f"{sink.url}/endpoint/0"])
        _start(stack, options)
        producer = Producer(stack, workspace)
        for _ in range(WARM_UP):
            producer.send()
        stack.wait_for(lambda: sink.count() >= WARM_UP, "warming up")

        options.say(f"idle for {idle_secs:.0f} s")
        idle_before, began = stack.read(), time.monotonic()
        time.sleep(idle_secs)
        idle_after, idle_lasted = stack.read(), time.monotonic() - began

        options.say(f"sending {count} events")
        earlier = frozenset(id_ for id_, _ in sink.snapshot().pairs())
        before, started = stack.read(), time.monotonic()
        sent = []
        for number in range(count):
            time.sleep(max(0.0, started + number * INTERVAL_SECS - time.monotonic()))
            sent.append(producer.send())
        _wait_until_recorded(stack, workspace)
        after = stack.read()
        producer.close()

        arrivals = sink.snapshot()
        arrived: dict[bytes, float] = {}
        for id_, at in arrivals.pairs():
            arrived.setdefault(id_, at)
        waits = sorted(
            (arrived[one.delivery_id.bytes] - one.at) * 1000 for one in sent if one.delivery_id.bytes in arrived
        )
        idle = {
            role: round((idle_after.cpu_secs[role] - used) / idle_lasted * 100, 2)
            for role, used in idle_before.cpu_secs.items()
            # The receiver is no part of what an operator runs.
            if role != "sink"
        }
        return make_report(
            "quiet",
            stack,
            options=options,
            tally=take(stack.connection, workspace.id, arrivals, made=count, earlier=earlier),
            before=before,
            after=after,
            p50_ms=_rounded(percentile(waits, 0.5)),
            p99_ms=_rounded(percentile(waits, 0.99)),
            max_ms=_rounded(percentile(waits, 1.0)),
            settings={
                "count": count,
                "interval_ms": INTERVAL_SECS * 1000,
                "payload_bytes": _PAYLOAD_BYTES,
                "figures": {
                    "idle_secs": round(idle_lasted, 1),
                    "idle_cpu_percent_of_a_core": round(sum(idle.values()), 2),
                    "idle_cpu_percent": idle,
                },
            },
        )


class Producer:
    """A producer with a kept connection and an API key of its own."""

    def __init__(self, stack: Stack, workspace: Workspace) -> None:
        engine = make_engine(stack.database_url, name="loadtest", size=1)
        with engine.begin() as connection:
            _, key = keys.create(
                connection,
                key_id=new_id(),
                workspace_id=workspace.id,
                name="loadtest",
                scopes=frozenset({Scope.INGEST}),
                actor="loadtest",
                request_id=None,
            )
        engine.dispose()
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.api_port, timeout=30)
        self._headers = {"Authorization": f"Bearer {key.reveal()}", "Content-Type": "application/json"}
        self._payload = payload_of(_PAYLOAD_BYTES)

    def send(self) -> Sent:
        """Send one event. Raises Unavailable unless it is accepted."""
        at = time.time()
        self._connection.request("POST", "/v1/events", self._payload, self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 202:
            raise Unavailable(f"the API answered {answer.status} to an event: {body[:500]!r}")
        return Sent(at=at, delivery_id=UUID(json.loads(body)["deliveries"][0]["id"]))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _start(stack: Stack, options: Options) -> None:
    """Start every role that a whole installation has, Flower among them where it is installed."""
    if importlib.util.find_spec("flower") is not None:
        stack.environment |= {
            "RELAY_FLOWER_BIND": f"127.0.0.1:{free_port()}",
            "RELAY_FLOWER_AUTH": f"loadtest:{secrets.token_hex(12)}",
        }
        stack.start_role("flower")
    for role in ("api", "publisher", "beat"):
        stack.start_role(role)
    stack.start_role("worker", options.workers)
    stack.wait_for_heartbeats({"publisher": 1, "worker": options.workers})
    stack.wait_for(lambda: _ready(stack.api_port), "the start of the API")


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _wait_until_recorded(stack: Stack, workspace: Workspace) -> None:
    """Wait until no delivery of the workspace is open, or patience ends."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while time.monotonic() < deadline:
        row = stack.connection.execute(
            "select exists (select 1 from relay.deliveries where workspace_id = %s and status in (0, 1))"
            "  -- relay loadtest",
            [workspace.id],
        ).fetchone()
        if row is not None and not row[0]:
            return
        time.sleep(0.1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
