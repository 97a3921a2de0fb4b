"""The public keys of endpoints that sign with ed25519. They are for anybody, so no workspace is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from uuid import UUID

# The previous key goes by the same clock and column as its signatures do, so it is shown as long as it signs.
_FIND = sa.text("""
select public_key,
    case when previous_secret_expires_at > now() then previous_public_key end as previous_public_key,
    extract(epoch from previous_secret_expires_at - now())::double precision as previous_ends_in
from relay.endpoints
where id = :id and kind = 0 and deleted_at is null and signing = 'standard-ed25519' and public_key is not null
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKeys:
    """What an endpoint's signatures are verified with: 32 raw bytes each."""

    current: bytes
    #: Signs beside the current one for `previous_ends_in` seconds more.
    previous: bytes | None
    previous_ends_in: float | None


def find(connection: sa.Connection, endpoint_id: UUID) -> PublicKeys | None:
    """Return an endpoint's public keys; None for one that does not sign with ed25519, was deleted, or never was."""
    row = connection.execute(_FIND, {"id": endpoint_id}).one_or_none()
    if row is None:
        return None
    previous = None if row.previous_public_key is None else bytes(row.previous_public_key)
    return PublicKeys(
        current=bytes(row.public_key),
        previous=previous,
        previous_ends_in=None if previous is None else row.previous_ends_in,
    )
