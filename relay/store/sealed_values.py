"""Every sealed value of the record, for the rotation of master keys: found in batches, and sealed anew where it stands.

A row is written only where it still holds what was read (compare and set): a secret that is rotated meanwhile stays
the newer one. Each place below ties its values to a row by that row's id (see `vault`).
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from psycopg.types.json import Jsonb

from relay.core.errors import SealedSecretUnreadable
from relay.store.vault import key_id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from relay.store.vault import Vault

#: Before every id.
_FIRST: Final = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A table that holds sealed values. The names are constants of this module: they go into statements as they are."""

    #: What a row is called to a person.
    noun: str
    table: str
    #: The column of the id that the values are tied to.
    key: str
    #: Columns of one sealed value each.
    columns: Sequence[str] = ()
    #: A column of header values, sealed and in base64: an object by name, or a list of pairs.
    headers: str | None = None
    #: A column of `columns` that is worth nothing after the time in another one.
    expiring: tuple[str, str] | None = None
    #: Which rows hold sealed values at all.
    where: str = "true"


PLACES: Final = (
    Place(
        noun="endpoint",
        table="endpoints",
        key="id",
        columns=("secret", "previous_secret", "certificate_key"),
        headers="headers",
        expiring=("previous_secret", "previous_secret_expires_at"),
    ),
    Place(
        noun="workspace",
        table="workspaces",
        key="id",
        columns=("job_secret", "job_previous_secret"),
        expiring=("job_previous_secret", "job_previous_secret_expires_at"),
    ),
    Place(noun="job", table="jobs", key="delivery_id", headers="headers", where="headers_sealed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A value that does not open."""

    noun: str
    id: UUID
    #: The column, with a header's name behind it.
    place: str
    why: str


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was found and done."""

    resealed: int = 0
    #: Rows that somebody wrote meanwhile: to be looked at again.
    missed: int = 0
    #: Values by the id of the key that seals them after this.
    held_by: Counter[str] = field(default_factory=Counter)
    unreadable: list[Unreadable] = field(default_factory=list)


def reseal_batch(
    connection: sa.Connection, place: Place, vault: Vault, tally: Tally, *, after: UUID | None, limit: int
) -> UUID | None:
    """Seal anew what is sealed with another key than the first, in up to `limit` rows behind `after`.

    Adds to `tally`; returns the id to go on behind, None after the last row. Rows are written in the order of their
    ids, and none of them is locked before.
    """
    rows = connection.execute(_select(place), {"after": after or _FIRST, "limit": limit}).mappings().all()
    for row in rows:
        _reseal_row(connection, place, vault, tally, dict(row))
    return rows[-1]["id"] if len(rows) == limit else None


def _reseal_row(connection: sa.Connection, place: Place, vault: Vault, tally: Tally, row: dict[str, Any]) -> None:
    owner: UUID = row["id"]
    held: Counter[str] = Counter()
    moved: dict[str, Any] = {}
    changed = 0

    def anew(sealed: bytes, where: str) -> bytes:
        nonlocal changed
        value = sealed
        try:
            value = vault.reseal(sealed, owner=owner) or sealed
        except SealedSecretUnreadable as error:
            tally.unreadable.append(Unreadable(noun=place.noun, id=owner, place=where, why=str(error)))
        changed += value != sealed
        held[key_id_of(value)] += 1
        return value

    for name in place.columns:
        stored = row[name]
        if stored is not None:
            over = place.expiring is not None and name == place.expiring[0] and row["over"]
            moved[name] = None if over else anew(stored, name)
    if place.headers is not None:
        moved[place.headers] = _each_header(row[place.headers], lambda name, value: anew(value, f"headers.{name}"))
    if all(value == row[name] for name, value in moved.items()):
        tally.held_by += held
        return
    if connection.execute(_update(place, list(moved)), _parameters(owner, row, moved)).rowcount:
        tally.resealed += changed
        tally.held_by += held
    else:
        tally.missed += 1


def _each_header(stored: Any, anew: Callable[[str, bytes], bytes]) -> Any:
    """Return the headers in the form that they are stored in, each value as `anew` returns it."""

    def value(name: str, text: str) -> str:
        try:
            sealed = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            # No value of ours: `anew` says so of what is empty.
            sealed = b""
        found = anew(name, sealed)
        return text if found == sealed else base64.b64encode(found).decode()

    if isinstance(stored, dict):
        return {name: value(name, text) for name, text in stored.items()}
    return [[name, value(name, text)] for name, text in stored]


def _select(place: Place) -> sa.TextClause:
    over = "false" if place.expiring is None else f"coalesce({place.expiring[1]} <= now(), false)"
    wanted = [*place.columns, *([place.headers] if place.headers else [])]
    filled = [f"{name} is not null" for name in place.columns]
    if place.headers:
        filled.append(f"{place.headers} not in ('{{}}', '[]')")
    return sa.text(f"""
        select {place.key} as id, {over} as over, {", ".join(wanted)} from relay.{place.table}
        where {place.key} > cast(:after as uuid) and {place.where} and ({" or ".join(filled)})
        order by {place.key} limit :limit
    """)


def _update(place: Place, names: Sequence[str]) -> sa.TextClause:
    return sa.text(f"""
        update relay.{place.table} set {", ".join(f"{name} = :new_{name}" for name in names)}
        where {place.key} = :id and {" and ".join(f"{name} = :old_{name}" for name in names)}
    """)


def _parameters(owner: UUID, row: dict[str, Any], moved: dict[str, Any]) -> dict[str, Any]:
    def bound(value: Any) -> Any:
        return Jsonb(value) if isinstance(value, (dict, list)) else value

    old = {f"old_{name}": bound(row[name]) for name in moved}
    return {"id": owner, **old, **{f"new_{name}": bound(value) for name, value in moved.items()}}
