"""A whole Relay under producers' load: starts the roles, sends events over HTTP, and times each delivery."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from relay.core.errors import Unavailable
from relay.core.model import Scope
from relay.embedded.launch import shim_argv
from relay.loadtest.report import percentile
from relay.loadtest.seed import new_id
from relay.store import keys
from relay.store.engine import make_engine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from relay.loadtest.sink import Arrivals
    from relay.loadtest.stack import Stack

#: Run as a file, without the package around it: it needs the standard library alone.
_GENERATOR: Final = Path(__file__).with_name("generator.py")
#: Seconds beyond its plan that the generator may take.
_SPARE_SECS: Final = 60.0
#: Seconds that deliveries may take to be recorded once the last event was sent.
SETTLE_SECS: Final = 60.0

_OPEN = """
select count(*) from relay.deliveries d join relay.endpoints p on p.id = d.endpoint_id
where d.workspace_id = %s and d.status in (0, 1) and not p.id = any(%s)  -- relay loadtest
"""
_MADE = """
select id, extract(epoch from created_at)::float8 from relay.deliveries
where workspace_id = %s and created_at >= to_timestamp(%s)  -- relay loadtest
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What producers saw."""

    statuses: Mapping[str, int]
    #: Seconds from the time a request was due to its answer, in ascending order.
    latencies: list[float]
    broken: int
    #: Requests whose answer, or whose turn, never came.
    unsent: int
    seconds: float

    @property
    def accepted(self) -> int:
        """How many were answered 202."""
        return self.statuses.get("202", 0)

    @property
    def unanswered(self) -> int:
        """How many may have been taken in or not: no answer says."""
        return self.broken + self.unsent

    @property
    def refused(self) -> int:
        """How many were not accepted, for whatever reason."""
        return sum(self.statuses.values()) - self.accepted + self.unanswered


def start_roles(stack: Stack, workers: int) -> None:
    """Start what takes events in and delivers them, and wait until it does."""
    for role in ("api", "publisher", "beat"):
        stack.start_role(role)
    stack.start_role("worker", workers)
    stack.wait_for_heartbeats({"publisher": 1, "worker": workers})
    stack.wait_for(lambda: answers(stack), "the start of the API")


def answers(stack: Stack) -> bool:
    """Whether the API takes connections."""
    try:
        socket.create_connection(("127.0.0.1", stack.api_port), timeout=5).close()
    except OSError:
        return False
    return True


def make_key(stack: Stack, workspace_id: UUID, scope: Scope = Scope.INGEST) -> str:
    """Make an API key of one scope: by default it may send events."""
    engine = make_engine(stack.database_url, name="loadtest", size=1)
    try:
        with engine.begin() as connection:
            _, key = keys.create(
                connection,
                key_id=new_id(),
                workspace_id=workspace_id,
                name="loadtest",
                scopes=frozenset({scope}),
                actor="loadtest",
                request_id=None,
            )
    finally:
        engine.dispose()
    return key.reveal()


def request_of(key: str, path: str, body: bytes) -> str:
    """Return a whole request, as text of Latin-1."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: relay\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head + body.decode("latin-1")


def send(stack: Stack, request: str, *, rate: float, seconds: float, connections: int) -> Sent:
    """Send one request over and over, `rate` a second (0: as fast as it is answered), from a process of its own.

    Raises Unavailable where the generator fails.
    """
    plan = {
        "host": "127.0.0.1",
        "port": stack.api_port,
        "request": request,
        "connections": connections,
        "seconds": seconds,
        "rate": rate,
    }
    done = subprocess.run(  # noqa: S603  # our own interpreter and file
        shim_argv([sys.executable, "-I", "-S", str(_GENERATOR)], death_signal=9),
        input=json.dumps(plan).encode(),
        capture_output=True,
        timeout=seconds + _SPARE_SECS,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"the load generator failed: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    found["latencies"].sort()
    return Sent(**found)


def settle(stack: Stack, workspace_id: UUID, *, but: tuple[UUID, ...] = ()) -> None:
    """Wait until no delivery is open, but those of some endpoints, or patience ends."""
    deadline = time.monotonic() + SETTLE_SECS
    while time.monotonic() < deadline:
        row = stack.connection.execute(_OPEN, [workspace_id, list(but)]).fetchone()
        if row is not None and row[0] == 0:
            return
        stack.check_roles()
        time.sleep(0.25)


def waits_ms(stack: Stack, workspace_id: UUID, arrivals: Arrivals, *, since: float) -> list[float]:
    """Return the milliseconds from commit to the receiver of the deliveries made from `since` (Unix seconds) on, sorted.

    The commit's time is the row's, which is that of the statement's beginning: a little early.
    """
    made = {row[0].bytes: row[1] for row in stack.connection.execute(_MADE, [workspace_id, since], binary=True)}
    first: dict[bytes, float] = {}
    for id_, at in arrivals.pairs():
        first.setdefault(id_, at)
    return sorted((first[id_] - at) * 1000 for id_, at in made.items() if id_ in first)


def figures(sent: Sent) -> dict[str, object]:
    """Return what producers saw, for a report."""
    return {
        "accepted": sent.accepted,
        "refused": sent.refused,
        "statuses": dict(sent.statuses),
        "ingest_per_second": round(sent.accepted / sent.seconds, 1) if sent.seconds else None,
        "ingest_p50_ms": _ms(percentile(sent.latencies, 0.5)),
        "ingest_p99_ms": _ms(percentile(sent.latencies, 0.99)),
    }


def _ms(secs: float | None) -> float | None:
    return None if secs is None else round(secs * 1000, 2)
