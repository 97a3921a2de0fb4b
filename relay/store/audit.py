"""The audit log: who changed what, written in the transaction of the change, without secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

_WRITE = sa.text("""
insert into relay.audit_log (id, workspace_id, actor, action, target, before, after, request_id)
values (relay.uuid7(), :workspace_id, :actor, :action, :target, :before, :after, :request_id)
""")


def write(
    connection: sa.Connection,
    *,
    workspace_id: UUID | None,
    actor: str,
    action: str,
    target: str,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
    request_id: str | None = None,
) -> None:
    """Write one record. `actor` is `key:<id>`, `instance` or `relay`; `action` a word such as `endpoint.created`."""
    connection.execute(
        _WRITE,
        {
            "workspace_id": workspace_id,
            "actor": actor,
            "action": action,
            "target": target,
            "before": None if before is None else Jsonb(dict(before)),
            "after": None if after is None else Jsonb(dict(after)),
            "request_id": request_id,
        },
    )
