"""Rows of a test's database, made and read with plain SQL: tests of the store must not lean on the store."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, LiteralString
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from relay.core.secret import Secret
from relay.store.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from relay.store.vault import Vault


class Rows:
    """One autocommit connection to a database, with a workspace of its own in it."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True, row_factory=dict_row)
        self.workspace_id = self.workspace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.connection.close()

    def sql(
        self, statement: LiteralString, parameters: Sequence[object] | Mapping[str, object] = ()
    ) -> list[dict[str, Any]]:
        """Run a statement; return its rows, none for one that has no result."""
        cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def value(self, statement: LiteralString, parameters: Sequence[object] | Mapping[str, object] = ()) -> Any:
        """Return the one value of a statement's one row."""
        (row,) = self.sql(statement, parameters)
        (value,) = row.values()
        return value

    def workspace(self) -> UUID:
        """Make a workspace."""
        id_ = new_id()
        self.sql("insert into relay.workspaces (id, name) values (%s, %s)", [id_, id_.hex])
        return id_

    def endpoint(
        self,
        url: str = "http://127.0.0.1:1/never",
        *,
        workspace_id: UUID | None = None,
        retry: Mapping[str, object] | None = None,
        signing: str = "none",
        secret: str | None = None,
        headers: Mapping[str, str] | None = None,
        vault: Vault | None = None,
        max_in_flight: int | None = None,
        timeout_ms: int | None = None,
        event_types: Sequence[str] = (),
        enabled: bool = True,
        rate: float = 100_000.0,
        burst: int = 100_000,
    ) -> UUID:
        """Make an endpoint; `secret` and `headers` are sealed with `vault`. Its rate is far above what tests send."""
        id_ = new_id()
        sealed = (
            {}
            if vault is None
            else {
                name: base64.b64encode(vault.seal(Secret(value), owner=id_)).decode()
                for name, value in (headers or {}).items()
            }
        )
        self.sql(
            """
            insert into relay.endpoints (id, workspace_id, url, signing, secret, headers, retry, max_in_flight, timeout_ms,
                event_types, enabled, rate_per_second, burst)
            values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
            """,
            [
                id_,
                workspace_id or self.workspace_id,
                url,
                signing,
                None if secret is None or vault is None else vault.seal(Secret(secret), owner=id_),
                Jsonb(sealed),
                Jsonb(dict(retry or {})),
                max_in_flight,
                timeout_ms,
                list(event_types),
                enabled,
                rate,
                burst,
            ],
        )
        return id_

    def deliveries(
        self,
        endpoint_id: UUID,
        count: int = 1,
        *,
        payload: bytes = b'{"n":1}',
        due_in: float = 0.0,
        announced_ago: float | None = None,
        event_type: str = "test.made",
        content_type: str = "application/json",
    ) -> list[UUID]:
        """Make an event for each of `count` pending deliveries, due in `due_in` seconds; return the deliveries' ids."""
        ids = [new_id() for _ in range(count)]
        events = [uuid4() for _ in range(count)]
        self.sql(
            """
            with e as (
                insert into relay.events (id, workspace_id, type, content_type, payload)
                select event_id, p.workspace_id, %(type)s, %(content_type)s, %(payload)s
                from unnest(%(events)s::uuid[]) as r(event_id), relay.endpoints p where p.id = %(endpoint)s
                returning id
            )
            insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, due_at, announced_at)
            select r.id, p.workspace_id, r.event_id, p.id, %(type)s, now() + make_interval(secs => %(due)s),
                now() - make_interval(secs => %(announced)s)
            from unnest(%(ids)s::uuid[], %(events)s::uuid[]) as r(id, event_id), relay.endpoints p,
                (select count(*) from e) as after
            where p.id = %(endpoint)s
            """,
            {
                "ids": ids,
                "events": events,
                "endpoint": endpoint_id,
                "type": event_type,
                "content_type": content_type,
                "payload": payload,
                "due": due_in,
                "announced": announced_ago,
            },
        )
        return ids

    def delivery(self, endpoint_id: UUID, **how: Any) -> UUID:
        """Make one delivery, as `deliveries` does."""
        (id_,) = self.deliveries(endpoint_id, **how)
        return id_

    def get(self, delivery_id: UUID) -> dict[str, Any]:
        """Return a delivery's row, with the seconds until it is due as `due_in` and its lease's as `leased_for`."""
        (row,) = self.sql(
            """
            select *, extract(epoch from due_at - clock_timestamp())::float8 as due_in,
                extract(epoch from lease_until - clock_timestamp())::float8 as leased_for
            from relay.deliveries where id = %s
            """,
            [delivery_id],
        )
        return row

    def attempts(self, delivery_id: UUID) -> list[dict[str, Any]]:
        """Return a delivery's log, deferrals included, the oldest first."""
        return self.sql(
            "select * from relay.delivery_attempts where delivery_id = %s order by at, number nulls first",
            [delivery_id],
        )

    def statuses(self) -> dict[int, int]:
        """Return how many deliveries stand in each status."""
        rows = self.sql("select status, count(*) as n from relay.deliveries group by status")
        return {row["status"]: row["n"] for row in rows}
