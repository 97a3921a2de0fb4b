"""What may be sent again and what may be called off, case by case."""

from __future__ import annotations

import pytest

from relay.core.model import Status
from relay.core.replay import Refusal, cancel_refusal, replay_refusal


@pytest.mark.parametrize(
    ("status", "plain", "forced"),
    [
        (Status.PENDING, Refusal.PENDING, Refusal.PENDING),
        (Status.IN_FLIGHT, Refusal.IN_FLIGHT, Refusal.IN_FLIGHT),
        (Status.DELIVERED, Refusal.DELIVERED, None),
        (Status.DEAD, None, None),
        (Status.CANCELED, None, None),
    ],
)
def test_replay_by_status(status: Status, plain: Refusal | None, forced: Refusal | None) -> None:
    """B-120: dead and canceled ones at any time, a delivered one where the call says so, others never."""
    found = [
        replay_refusal(status, generation=0, max_replays=1, endpoint_deleted=False, force=force)
        for force in (False, True)
    ]
    assert found == [plain, forced]


def test_replay_has_a_limit_and_a_destination() -> None:
    """The generation counts replays up to the limit, 0 means none; a deleted endpoint comes first of the two."""

    def refusal(generation: int, limit: int, *, deleted: bool = False) -> Refusal | None:
        return replay_refusal(
            Status.DEAD, generation=generation, max_replays=limit, endpoint_deleted=deleted, force=False
        )

    assert [refusal(generation, 2) for generation in (0, 1, 2, 3)] == [None, None, Refusal.LIMIT, Refusal.LIMIT]
    assert refusal(0, 0) is Refusal.LIMIT
    assert refusal(5, 2, deleted=True) is Refusal.ENDPOINT_DELETED


def test_cancel_by_status() -> None:
    """B-121: a pending one, and one that is canceled already; the rest is too late, each with its own word."""
    assert {status: cancel_refusal(status) for status in Status} == {
        Status.PENDING: None,
        Status.CANCELED: None,
        Status.IN_FLIGHT: Refusal.IN_FLIGHT,
        Status.DELIVERED: Refusal.DELIVERED,
        Status.DEAD: Refusal.DEAD,
    }
