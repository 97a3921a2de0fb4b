"""Testing an endpoint: its owner asks, a worker sends at once, and the answer tells what the receiver said."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response

from relay.core.model import Scope
from relay.store import deliveries, endpoint_testing
from relay.store.endpoint_testing import TEST_TYPE, NewTest
from relay.web.deliveries import attempt_of
from relay.web.endpoint_life import owned, read_nothing
from relay.web.endpoints import by, locked
from relay.web.parts import new_id
from relay.web.problems import unknown
from relay.web.render import json_response, time_text

if TYPE_CHECKING:
    from uuid import UUID

    from relay.store.endpoint_changes import By
    from relay.store.endpoints import Endpoint
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api

#: Calls of one process that wait for their attempt at once: each keeps a thread from everything else.
MOST_WAITING: Final = 2
#: Seconds that a call waits at most, and those that it gives a request beyond the endpoint's own time-out.
LONGEST_WAIT_SECS: Final = 10.0
_BEYOND_TIMEOUT_SECS: Final = 2.0
#: Seconds between two looks.
_LOOK_SECS: Final = 0.05


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the route of tests."""
    blueprint = Blueprint("endpoint_testing", __name__)
    # One thread at least is left for the rest: with few threads nobody waits.
    places = threading.Semaphore(max(0, min(MOST_WAITING, api.settings.api_threads - 1)))

    @blueprint.post("/v1/endpoints/<endpoint_id>/test")
    @gate.scoped(Scope.WRITE)
    def test_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Send one `relay.test` event to an endpoint, disabled or not; 200 with its attempt, 202 if none came in time."""
        read_nothing()
        acting = by(caller, endpoint_id)
        test = _new_test(acting, caller.key_id)
        with api.engine.begin() as connection:
            endpoint = owned(locked(connection, acting))
            endpoint_testing.commit(connection, acting, test)
        if places.acquire(blocking=False):
            try:
                _await(acting.workspace_id, test.delivery_id, _patience(endpoint))
            finally:
                places.release()
        with api.engine.connect() as connection:
            delivery = deliveries.get(connection, workspace_id=acting.workspace_id, delivery_id=test.delivery_id)
        if delivery is None:
            # Retention took it while it was waited for.
            raise unknown("delivery")
        attempts = [attempt for attempt in delivery.attempts if attempt.number is not None]
        tried = attempts or delivery.finished_at is not None
        shown: answers.Tested = {
            "delivery_id": str(delivery.id),
            "status": delivery.status.label,
            "reason": delivery.reason,
            "attempt": attempt_of(attempts[-1]) if attempts else None,
        }
        return json_response(shown, 200 if tried else 202)

    def _patience(endpoint: Endpoint) -> float:
        timeout_ms = endpoint.timeout_ms or api.settings.total_timeout_ms
        return min(LONGEST_WAIT_SECS, timeout_ms / 1000 + _BEYOND_TIMEOUT_SECS)

    def _await(workspace_id: UUID, delivery_id: UUID, seconds: float) -> None:
        # A connection for each look: none is kept from others while nothing happens.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with api.engine.connect() as connection:
                if endpoint_testing.is_tried(connection, workspace_id=workspace_id, delivery_id=delivery_id):
                    return
            time.sleep(_LOOK_SECS)

    return blueprint


def _new_test(acting: By, key_id: UUID | None) -> NewTest:
    """Make the event. Its payload says what it is and nothing that a receiver could mistake for an order."""
    payload = {
        "type": TEST_TYPE,
        "created_at": time_text(datetime.now(UTC)),
        "data": {"endpoint_id": str(acting.endpoint_id), "message": "This is a test of your endpoint."},
    }
    return NewTest(event_id=new_id(), delivery_id=new_id(), payload=json.dumps(payload).encode(), api_key_id=key_id)
