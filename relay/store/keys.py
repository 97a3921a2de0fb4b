"""API keys: found by their public part, decided by the digest of the whole, and shown once.

A key is `rk_`, 12 letters and digits that find its row, `_`, and 43 characters of randomness (256 bits): enough
that one round of SHA-256 is a fit digest, where a password would need a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from psycopg import sql

from relay.core.model import Scope
from relay.core.secret import Secret
from relay.store import audit
from relay.store.engine import run
from relay.store.pages import Page, Position, page_of
from relay.store.workspaces import Workspace

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

#: Seconds between two notes of a key's last use, over all processes.
LAST_USE_EVERY_SECS = 60

_ALPHABET = string.ascii_letters + string.digits
_LOOKUP_LENGTH = 12
_SECRET_BYTES = 32
_KEY = re.compile(r"rk_([A-Za-z0-9]{12})_[A-Za-z0-9_-]{43}")

_COLUMNS = "id, workspace_id, name, lookup, scopes, created_at, last_used_at, revoked_at"
_CREATE = sa.text(f"""
insert into relay.api_keys (id, workspace_id, name, lookup, digest, scopes)
values (:id, :workspace_id, :name, :lookup, :digest, :scopes)
returning {_COLUMNS}
""")
_LIST = sa.text(f"""
select {_COLUMNS} from relay.api_keys
where workspace_id = :workspace_id
  and (cast(:after_at as timestamptz) is null or (created_at, id) < (:after_at, cast(:after_id as uuid)))
order by created_at desc, id desc limit :limit
""")
# Revoking twice keeps the first time.
_REVOKE = sa.text("""
update relay.api_keys set revoked_at = now()
where id = :id and workspace_id = :workspace_id and revoked_at is null
returning name
""")
_EXISTS = sa.text("select 1 from relay.api_keys where id = :id and workspace_id = :workspace_id")
_FIND = sql.SQL("""
select k.digest, k.id, k.scopes, w.id, w.name, w.max_endpoints, w.ingest_rate, w.max_payload_bytes, w.created_at,
    w.event_types_version
from relay.api_keys k join relay.workspaces w on w.id = k.workspace_id
where k.lookup = %(lookup)s and k.revoked_at is null
""")
# A row that somebody holds is passed over: nobody waits for so small a thing, nor keeps a connection for it.
_NOTE_USE = sa.text("""
with stale as (
    select id from relay.api_keys
    where id = any(:ids) and (last_used_at is null or last_used_at < now() - make_interval(secs => :every))
    for no key update skip locked
)
update relay.api_keys k set last_used_at = now() from stale where k.id = stale.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as its owners may see it: without what would open anything."""

    id: UUID
    workspace_id: UUID
    name: str
    #: Its public part, by which an owner recognises it.
    lookup: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    #: May lag by a minute and more.
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who a key's text belongs to."""

    key_id: UUID
    scopes: frozenset[Scope]
    workspace: Workspace


def create(
    connection: sa.Connection,
    *,
    key_id: UUID,
    workspace_id: UUID,
    name: str,
    scopes: Collection[Scope],
    actor: str,
    request_id: str | None = None,
) -> tuple[Key, Secret]:
    """Make a key and its audit record; return it with its text, which is stored nowhere."""
    lookup = "".join(secrets.choice(_ALPHABET) for _ in range(_LOOKUP_LENGTH))
    text = f"rk_{lookup}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    names = [scope.value for scope in Scope if scope in scopes]
    row = (
        connection.execute(
            _CREATE,
            {
                "id": key_id,
                "workspace_id": workspace_id,
                "name": name,
                "lookup": lookup,
                "digest": digest_of(text),
                "scopes": names,
            },
        )
        .mappings()
        .one()
    )
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="key.created",
        target=f"key:{key_id}",
        after={"name": name, "scopes": names},
        request_id=request_id,
    )
    return _key(row), Secret(text)


def list_page(connection: sa.Connection, *, workspace_id: UUID, after: Position | None, limit: int) -> Page[Key]:
    """Return up to `limit` keys of the workspace, revoked ones included, the newest first, from behind `after`."""
    rows = connection.execute(
        _LIST,
        {
            "workspace_id": workspace_id,
            "after_at": None if after is None else after.created_at,
            "after_id": None if after is None else after.id,
            "limit": limit + 1,
        },
    ).mappings()
    return page_of([_key(row) for row in rows], limit)


def revoke(
    connection: sa.Connection, *, workspace_id: UUID, key_id: UUID, actor: str, request_id: str | None = None
) -> bool:
    """End the key, with an audit record; return whether the workspace has such a key. One that is revoked stays so.

    Processes that know the key may let it in for a second more.
    """
    parameters = {"id": key_id, "workspace_id": workspace_id}
    name = connection.execute(_REVOKE, parameters).scalar_one_or_none()
    if name is None:
        return connection.execute(_EXISTS, parameters).one_or_none() is not None
    audit.write(
        connection,
        workspace_id=workspace_id,
        actor=actor,
        action="key.revoked",
        target=f"key:{key_id}",
        before={"name": name},
        request_id=request_id,
    )
    return True


def find(connection: sa.Connection, text: str) -> Holder | None:
    """Return whose key `text` is; None for what is no key, unknown or revoked. The comparison takes constant time."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    row = run(connection, _FIND, {"lookup": match.group(1)}).fetchone()
    if row is None or not hmac.compare_digest(row[0], digest_of(text)):
        return None
    return Holder(
        key_id=row[1],
        scopes=frozenset(Scope(name) for name in row[2]),
        workspace=Workspace(
            id=row[3],
            name=row[4],
            max_endpoints=row[5],
            ingest_rate=row[6],
            max_payload_bytes=row[7],
            created_at=row[8],
            event_types_version=row[9],
        ),
    )


def note_use(connection: sa.Connection, key_ids: Sequence[UUID]) -> None:
    """Set the keys' last use to now, but for those where it is younger than `LAST_USE_EVERY_SECS`."""
    connection.execute(_NOTE_USE, {"ids": list(key_ids), "every": LAST_USE_EVERY_SECS})


def digest_of(text: str) -> bytes:
    """Return what stands for a key's text at rest."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _key(row: Mapping[Any, Any]) -> Key:
    fields = dict(row)
    return Key(scopes=tuple(Scope(name) for name in fields.pop("scopes")), **fields)
