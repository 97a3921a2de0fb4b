"""Events read back: lists, each with what it fanned out to, and the payload's very bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, request

from relay.core.event_types import check_event_type
from relay.core.filters import TimeRange, parse_time_range
from relay.core.model import Scope
from relay.store import delivery_lists, event_reading
from relay.web.deliveries import summary
from relay.web.parts import path_id
from relay.web.problems import unknown
from relay.web.render import json_response, time_text

if TYPE_CHECKING:
    from relay.store.event_reading import Event
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

_FILTERS: Final = ("type", "since", "until")


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes that read events."""
    blueprint = Blueprint("event_reading", __name__)

    @blueprint.get("/v1/events")
    @gate.scoped(Scope.READ)
    def list_events(caller: Caller) -> Response:
        """List the workspace's events, the newest first, without payloads and deliveries."""
        named = request.args.get("type")
        event_type = None if named is None else check_event_type(named)
        made = parse_time_range(request.args)
        of = f"events:{caller.workspace.id}:{event_type}:{_spelled(made)}"
        after, limit = cursors.read(of, filters=_FILTERS)
        with api.engine.connect() as connection:
            page = event_reading.list_page(
                connection,
                workspace_id=caller.workspace.id,
                event_type=event_type,
                made=made,
                after=after,
                limit=limit,
            )
        return json_response(cursors.render(page, of, _rendered))

    @blueprint.get("/v1/events/<event_id>")
    @gate.scoped(Scope.READ)
    def get_event(caller: Caller, event_id: str) -> Response:
        """Read one event with its deliveries, without its payload."""
        wanted = path_id(event_id)
        workspace_id = caller.workspace.id
        with api.engine.connect() as connection:
            found = wanted and event_reading.get(connection, workspace_id=workspace_id, event_id=wanted)
            if not found:
                raise unknown("event")
            made = delivery_lists.by_ids(connection, workspace_id=workspace_id, ids=found.delivery_ids)
        shown: answers.EventWithDeliveries = {
            **_rendered(found),
            "deliveries": [summary(delivery) for delivery in made],
        }
        return json_response(shown)

    @blueprint.get("/v1/events/<event_id>/payload")
    @gate.scoped(Scope.READ)
    def get_payload(caller: Caller, event_id: str) -> Response:
        """Read an event's payload: the bytes as they came, for saving and not for showing."""
        wanted = path_id(event_id)
        if wanted is None:
            raise unknown("event")
        with api.engine.connect() as connection:
            found = event_reading.payload(connection, workspace_id=caller.workspace.id, event_id=wanted)
        if found is None:
            raise unknown("event")
        # They are somebody else's bytes on this origin: no browser may take them for a page of it. `nosniff` is on every
        # answer.
        response = Response(found, content_type="application/octet-stream")
        response.headers["Content-Disposition"] = f'attachment; filename="{wanted}.bin"'
        response.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"
        return response

    return blueprint


def _spelled(made: TimeRange) -> str:
    return f"{made.since}..{made.until}"


def _rendered(event: Event) -> answers.Event:
    return {
        "id": str(event.id),
        "type": event.type,
        "source": event.source.name.lower(),
        "content_type": event.content_type,
        "payload_bytes": event.payload_bytes,
        "idempotency_key": event.idempotency_key,
        "api_key_id": None if event.api_key_id is None else str(event.api_key_id),
        "request_id": event.request_id,
        "delivery_count": len(event.delivery_ids),
        "created_at": time_text(event.created_at),
    }
