"""Sending one delivery again, and calling one off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response

from relay.core.model import Scope
from relay.core.replay import Refusal
from relay.store import delivery_changes
from relay.web import models
from relay.web.auth import request_id
from relay.web.deliveries import summary
from relay.web.endpoint_life import optional_object, read_nothing
from relay.web.parts import path_id
from relay.web.problems import Problem, unknown
from relay.web.render import json_response

if TYPE_CHECKING:
    from relay.store.deliveries import Delivery
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api

#: What follows on `The delivery` or `The job`; `anew` is what is sent in its place.
_REFUSALS: Final = {
    Refusal.PENDING: " is pending: it will be sent by itself.",
    Refusal.IN_FLIGHT: " is being sent just now: look again when its attempt has ended.",
    Refusal.DELIVERED: ' has arrived: to send it once more, replay it with {{"force": true}}.',
    Refusal.DEAD: " is dead already: nothing will be sent.",
    Refusal.LIMIT: " was replayed as often as it may be (RELAY_MAX_REPLAYS): send a new {anew}.",
    Refusal.ENDPOINT_DELETED: "'s endpoint is deleted: make a new one, and send it a new {anew}.",
}
_ANEW: Final = {"delivery": "event", "job": "job"}


class ReplayDelivery(models.Request):
    """POST /v1/deliveries/{id}/replay."""

    force: bool = False


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the routes that change one delivery."""
    blueprint = Blueprint("delivery_changes", __name__)
    max_replays = api.settings.max_replays

    @blueprint.post("/v1/deliveries/<delivery_id>/replay")
    @gate.scoped(Scope.WRITE)
    def replay_delivery(caller: Caller, delivery_id: str) -> Response:
        """Send a finished delivery again, with a fresh budget; 202 with it. 409 where that may not be."""
        asked = models.parse(ReplayDelivery, optional_object())
        by = _by(caller, delivery_id)
        with api.engine.begin() as connection:
            outcome = delivery_changes.replay(connection, by, max_replays=max_replays, force=asked.force)
        return json_response(summary(changed(outcome)), 202)

    @blueprint.post("/v1/deliveries/<delivery_id>/cancel")
    @gate.scoped(Scope.WRITE)
    def cancel_delivery(caller: Caller, delivery_id: str) -> Response:
        """Call a pending delivery off; 200 with it, also where it was canceled before. 409 where it is too late."""
        read_nothing()
        by = _by(caller, delivery_id)
        with api.engine.begin() as connection:
            outcome = delivery_changes.cancel(connection, by)
        return json_response(summary(changed(outcome, finished="nothing can be called off any more")))

    return blueprint


def changed(outcome: Delivery | Refusal | None, *, noun: str = "delivery", finished: str | None = None) -> Delivery:
    """Return a delivery that was changed; raise the Problem of one that was not, or is unknown. `noun` is what it is called.

    `finished` says what is too late for one that has arrived, where that is not a matter of `force`.
    """
    if outcome is None:
        raise unknown(noun)
    if isinstance(outcome, Refusal):
        detail = _REFUSALS[outcome].format(anew=_ANEW[noun])
        if outcome is Refusal.DELIVERED and finished is not None:
            detail = f" has arrived: {finished}."
        raise Problem(409, outcome.value, f"The {noun}{detail}")
    return outcome


def _by(caller: Caller, delivery_id: str) -> delivery_changes.By:
    wanted = path_id(delivery_id)
    if wanted is None:
        raise unknown("delivery")
    return delivery_changes.By(
        workspace_id=caller.workspace.id, delivery_id=wanted, actor=caller.actor, request_id=request_id()
    )
