"""Idempotency keys: the first request with a key makes what it asks for, the later ones get its answer (B-10 to B-13).

A key is a primary key. Its claim is written in the transaction of what it stands for, with the answer's bytes: whoever
comes second waits for that transaction's end, and then either finds the answer or, where it was rolled back, is the
first. Nothing is read before it is tried, so that the usual request, with a key of its own, costs no statement more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from relay.core.errors import RelayError
from relay.store.engine import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import sqlalchemy as sa

_CLAIM = sql.SQL("""
insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response)
values (%(workspace_id)s, %(key)s, %(fingerprint)s, %(event_id)s, %(response)s)
on conflict (workspace_id, key) do nothing
""")
_FIND = sql.SQL("""
select key, fingerprint, response, created_at <= now() - make_interval(secs => %(retention)s)
from relay.idempotency_keys where workspace_id = %(workspace_id)s and key = any(%(keys)s::text[])
""")
# Locked in the order of the keys, as claims are made, so that two batches cannot wait for each other. Whoever waited
# here finds the row gone, or younger.
_FREE = sql.SQL("""
with expired as materialized (
    select workspace_id, key from relay.idempotency_keys
    where workspace_id = %(workspace_id)s and key = any(%(keys)s::text[])
      and created_at <= now() - make_interval(secs => %(retention)s)
    order by key for update
)
delete from relay.idempotency_keys k using expired x where k.workspace_id = x.workspace_id and k.key = x.key
""")


class KeyReused(RelayError):
    """The idempotency key belongs to another request: send a new key, or the same request again."""

    def __init__(self, indexes: Sequence[int]) -> None:
        super().__init__()
        #: The places of those requests in what was asked for, ascending.
        self.indexes = tuple(indexes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A key, and the request that wants it (see relay/core/fingerprint.py)."""

    key: str
    fingerprint: bytes


def claim(connection: sa.Connection, wanted: Claim, *, workspace_id: UUID, event_id: UUID, response: bytes) -> bool:
    """Take the key for what the caller is about to write in the same transaction; False, and nothing written, where it
    is taken.

    Waits for the end of a transaction that has taken it and is not over. `response` is the answer's body: what
    `answers` gives to those that come later. Several claims of one transaction go in the order of their keys.
    """
    parameters = {
        "workspace_id": workspace_id,
        "key": wanted.key,
        "fingerprint": wanted.fingerprint,
        "event_id": event_id,
        "response": response,
    }
    return run(connection, _CLAIM, parameters).rowcount == 1


def answers(
    connection: sa.Connection, claims: Mapping[int, Claim], *, workspace_id: UUID, retention_secs: int
) -> dict[int, bytes]:
    """Return the stored answers to claims that found their keys taken, by the claims' places.

    A claim that is missing from the result can be tried again: its key was given up in the meantime, or it had expired
    by the database's clock and was removed just now. Raises KeyReused with the places of those whose key was taken by
    another request; then nothing is removed.
    """
    parameters = {
        "workspace_id": workspace_id,
        "keys": sorted({one.key for one in claims.values()}),
        "retention": float(retention_secs),
    }
    known: dict[str, tuple[bytes, bytes]] = {}
    expired: list[str] = []
    for key, fingerprint, response, is_expired in run(connection, _FIND, parameters):
        if is_expired:
            expired.append(key)
        else:
            known[key] = (fingerprint, response)
    found: dict[int, bytes] = {}
    reused: list[int] = []
    for place, one in sorted(claims.items()):
        if (kept := known.get(one.key)) is not None:
            if kept[0] == one.fingerprint:
                found[place] = kept[1]
            else:
                reused.append(place)
    if reused:
        raise KeyReused(reused)
    if expired:
        run(connection, _FREE, parameters | {"keys": expired})
    return found
