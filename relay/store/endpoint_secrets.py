"""Rotation of endpoints' secrets: the old one signs beside the new one for a while, and there are never more than two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from datetime import datetime

    from relay.store.endpoint_changes import By

# One statement: of two rotations at once the second finds the first one's secret, and makes that the old one. Its time
# is read once the row is its own, so that the later expiry belongs to the later rotation, whichever began first.
_ROTATE = sa.text("""
update relay.endpoints
set previous_secret = case when :overlap > 0 then secret end,
    previous_public_key = case when :overlap > 0 then public_key end,
    previous_secret_expires_at = case when :overlap > 0 and secret is not null
        then clock_timestamp() + make_interval(secs => :overlap) end,
    secret = :secret, public_key = :public_key, updated_at = now()
where id = :id and workspace_id = :workspace_id and deleted_at is null
returning previous_secret_expires_at
""")


def rotate(
    connection: sa.Connection, by: By, *, sealed: bytes, public_key: bytes | None, overlap_secs: float
) -> datetime | None:
    """Put a new secret in place and record that; return until when the old one signs too, None where it does not.

    What was old before goes. Nothing ends the overlap but its time: the old secret is passed over from then on.
    """
    expires_at: datetime | None = connection.execute(
        _ROTATE,
        {
            "id": by.endpoint_id,
            "workspace_id": by.workspace_id,
            "secret": sealed,
            "public_key": public_key,
            "overlap": float(overlap_secs),
        },
    ).scalar_one()
    by.write_audit(
        connection,
        "endpoint.secret_rotated",
        after={"previous_secret_expires_at": None if expires_at is None else expires_at.isoformat()},
    )
    return expires_at
