"""What may be sent again, and what may be called off: the words that refuse the rest."""

from __future__ import annotations

import enum
from typing import Final

from relay.core.model import Status

#: What a replay takes without being told to.
REPLAYABLE: Final = frozenset({Status.DEAD, Status.CANCELED})


class Refusal(enum.StrEnum):
    """Why a delivery is left as it is; also the problem's code."""

    PENDING = "delivery_pending"
    IN_FLIGHT = "delivery_in_flight"
    DELIVERED = "delivery_delivered"
    DEAD = "delivery_dead"
    LIMIT = "replay_limit"
    ENDPOINT_DELETED = "endpoint_deleted"


_STATUS_REFUSALS: Final = {
    Status.PENDING: Refusal.PENDING,
    Status.IN_FLIGHT: Refusal.IN_FLIGHT,
    Status.DELIVERED: Refusal.DELIVERED,
    Status.DEAD: Refusal.DEAD,
}


def replay_refusal(
    status: Status, *, generation: int, max_replays: int, endpoint_deleted: bool, force: bool
) -> Refusal | None:
    """Return why a delivery may not be replayed, None where it may. `force` takes delivered ones too (B-120).

    `generation` is how often it was replayed already.
    """
    if status not in REPLAYABLE and not (force and status is Status.DELIVERED):
        return _STATUS_REFUSALS[status]
    if endpoint_deleted:
        return Refusal.ENDPOINT_DELETED
    return Refusal.LIMIT if generation >= max_replays else None


def cancel_refusal(status: Status) -> Refusal | None:
    """Return why a delivery may not be canceled, None where it may. A canceled one may: that changes nothing."""
    return None if status in {Status.PENDING, Status.CANCELED} else _STATUS_REFUSALS[status]
