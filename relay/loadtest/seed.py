"""Work for a load test, put into the tables by SQL: a workspace, endpoints at the sink, deliveries to them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.core.ids import RANDOM_BYTES, uuid7
from relay.core.secret import RANDOM_BYTES as SECRET_BYTES
from relay.core.secret import new_secret

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from relay.loadtest.accounting import Connection
    from relay.store.vault import Vault

#: Limits of each endpoint that are checked on the way and never act.
RATE_PER_SECOND = 1_000_000
BURST = 1_000_000
MAX_IN_FLIGHT = 10_000
EVENT_TYPE = "loadtest.made"
#: Deliveries made by one statement.
_CHUNK = 5_000

_WORKSPACE = "insert into relay.workspaces (id, name, max_endpoints) values (%s, %s, 100000)  -- relay loadtest"
_ENDPOINT = """
insert into relay.endpoints (id, workspace_id, url, secret, rate_per_second, burst, max_in_flight)
values (%s, %s, %s, %s, %s, %s, %s)  -- relay loadtest
"""
# An event for each delivery: every claim then joins another row, which is the harder case.
_DELIVERIES = """
with event as (
    insert into relay.events (id, workspace_id, type, content_type, payload)
    select relay.uuid7(), %(workspace)s, %(type)s, 'application/json', %(payload)s
    from generate_series(1, %(count)s)
    returning id
)
insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, due_at)
select relay.uuid7(), %(workspace)s, id,
    (%(endpoints)s::uuid[])[1 + row_number() over () %% array_length(%(endpoints)s::uuid[], 1)], %(type)s, %(due)s
from event  -- relay loadtest
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A workspace of the load test's own, and its endpoints."""

    id: UUID
    endpoint_ids: Sequence[UUID]


def make_workspace(connection: Connection, vault: Vault, urls: Sequence[str], *, name: str = "loadtest") -> Workspace:
    """Make a workspace with an endpoint for each of `urls`, signing as by default, with limits that never act."""
    workspace = Workspace(id=new_id(), endpoint_ids=[new_id() for _ in urls])
    with connection.transaction():
        connection.execute(_WORKSPACE, [workspace.id, name])
        for endpoint_id, url in zip(workspace.endpoint_ids, urls, strict=True):
            secret = vault.seal(new_secret(os.urandom(SECRET_BYTES)), owner=endpoint_id)
            connection.execute(
                _ENDPOINT, [endpoint_id, workspace.id, url, secret, RATE_PER_SECOND, BURST, MAX_IN_FLIGHT]
            )
    return workspace


def make_deliveries(
    connection: Connection, workspace: Workspace, count: int, *, due_at: datetime, payload_bytes: int
) -> None:
    """Make `count` pending deliveries, spread evenly over the workspace's endpoints, due at `due_at`."""
    payload = payload_of(payload_bytes)
    for made in range(0, count, _CHUNK):
        connection.execute(
            _DELIVERIES,
            {
                "workspace": workspace.id,
                "endpoints": list(workspace.endpoint_ids),
                "type": EVENT_TYPE,
                "payload": payload,
                "count": min(_CHUNK, count - made),
                "due": due_at,
            },
        )


def payload_of(size: int) -> bytes:
    """A JSON object of exactly `size` bytes, at least 50."""
    head = b'{"type":"' + EVENT_TYPE.encode() + b'","filler":"'
    return head + b"x" * (size - len(head) - 2) + b'"}'


def new_id() -> UUID:
    """A fresh identifier."""
    return uuid7(time.time_ns() // 1_000_000, os.urandom(RANDOM_BYTES))
