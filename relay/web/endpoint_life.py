"""What becomes of an endpoint: switched off and on, ended, its breaker closed, its waiting rows moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, request

from relay.core.model import Scope
from relay.store import endpoint_changes
from relay.store.endpoints import ORIGIN, Endpoint, Fields
from relay.web import bodies, models
from relay.web.endpoint_models import NoFields
from relay.web.endpoints import by, found, locked, rendered
from relay.web.problems import Problem
from relay.web.render import json_response

if TYPE_CHECKING:
    from typing import Any

    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the routes of endpoints' life."""
    blueprint = Blueprint("endpoint_life", __name__)

    @blueprint.delete("/v1/endpoints/<endpoint_id>")
    @gate.scoped(Scope.WRITE)
    def delete_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """End an endpoint; 204. Its pending deliveries die, what is in flight ends by itself, its history stays."""
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            before = owned(locked(connection, acting))
            endpoint_changes.delete(connection, acting, before)
        return Response(status=204)

    @blueprint.post("/v1/endpoints/<endpoint_id>/enable")
    @gate.scoped(Scope.WRITE)
    def enable_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Switch an endpoint on; 200 with it, also where it was on. What was paused comes back at its rate."""
        return switch(caller, endpoint_id, Fields(enabled=True))

    @blueprint.post("/v1/endpoints/<endpoint_id>/disable")
    @gate.scoped(Scope.WRITE)
    def disable_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Switch an endpoint off; 200 with it, also where it was off. Its deliveries are paused, not dead."""
        return switch(caller, endpoint_id, Fields(enabled=False))

    def switch(caller: Caller, endpoint_id: str, fields: Fields) -> Response:
        read_nothing()
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            before = owned(locked(connection, acting))
            endpoint_changes.change(connection, acting, before, fields)
            after = found(connection, acting)
        return json_response(rendered(after))

    @blueprint.post("/v1/endpoints/<endpoint_id>/reset-breaker")
    @gate.scoped(Scope.WRITE)
    def reset_breaker(caller: Caller, endpoint_id: str) -> Response:
        """Close an endpoint's breaker, end its hold and bring its waiting deliveries forward; 200 with it."""
        read_nothing()
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            endpoint_changes.reset_breaker(connection, acting, locked(connection, acting))
            after = found(connection, acting)
        return json_response(rendered(after))

    @blueprint.post("/v1/endpoints/<endpoint_id>/retry-now")
    @gate.scoped(Scope.WRITE)
    def retry_now(caller: Caller, endpoint_id: str) -> Response:
        """Bring an endpoint's waiting deliveries forward, retries too, at its rate; 202: a task of its own does it."""
        read_nothing()
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            if not locked(connection, acting).enabled:
                raise Problem(409, "endpoint_disabled", "The endpoint is disabled: enable it, which brings them back.")
            endpoint_changes.retry_now(connection, acting)
        shown: answers.Asked = {"id": str(acting.endpoint_id)}
        return json_response(shown, 202)

    @blueprint.post("/v1/endpoints/<endpoint_id>/cancel-pending")
    @gate.scoped(Scope.WRITE)
    def cancel_pending(caller: Caller, endpoint_id: str) -> Response:
        """Cancel an endpoint's pending deliveries; 202: a task of its own does it, and some may still go out before."""
        read_nothing()
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            locked(connection, acting)
            endpoint_changes.cancel_pending(connection, acting)
        shown: answers.Asked = {"id": str(acting.endpoint_id)}
        return json_response(shown, 202)

    return blueprint


def read_nothing() -> None:
    """Read the body of a call that takes none: it is absent, or an empty object. Raises Problem for anything else."""
    models.parse(NoFields, optional_object())


def optional_object() -> dict[str, Any]:
    """Read a body as `bodies.read_object` does, or {} where none is sent."""
    if not request.content_length and "HTTP_TRANSFER_ENCODING" not in request.environ:
        return {}
    return bodies.read_object()


def owned(endpoint: Endpoint) -> Endpoint:
    """Refuse an endpoint that jobs imply: it comes and goes with them."""
    if endpoint.kind == ORIGIN:
        raise Problem(
            409,
            "implicit_endpoint",
            "This endpoint is implied by jobs: it cannot be switched, ended or tested, and has no secret.",
        )
    return endpoint
