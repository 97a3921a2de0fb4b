"""The registry of event types: optional, and enforced where a type has a schema."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from flask import Blueprint, Response
from pydantic import Field

from relay.core.errors import InvalidInput
from relay.core.event_types import check_event_type, is_reserved
from relay.core.model import Scope
from relay.core.payload_schema import check_schema
from relay.store import event_types
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.openapi.formats import shown
from relay.web.problems import Problem, unknown
from relay.web.render import json_response, time_text

if TYPE_CHECKING:
    from relay.store.event_types import EventType
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api


class EventTypeRequest(models.Request):
    """PUT /v1/event-types/{name}."""

    description: Annotated[str, Field(max_length=1000)] = ""
    json_schema: Annotated[Any, shown({"type": ["object", "boolean", "null"]})] = None


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the routes of event types."""
    blueprint = Blueprint("event_types", __name__)

    @blueprint.get("/v1/event-types")
    @gate.scoped(Scope.WRITE)
    def list_event_types(caller: Caller) -> Response:
        """List the registered types by name, without their schemas."""
        with api.engine.connect() as connection:
            found = event_types.list_all(connection, workspace_id=caller.workspace.id)
        rows: list[answers.RegisteredTypeSummary] = [
            {
                "name": one.name,
                "description": one.description,
                "has_schema": one.has_schema,
                "created_at": time_text(one.created_at),
                "updated_at": time_text(one.updated_at),
            }
            for one in found
        ]
        return json_response({"data": rows, "next_cursor": None})

    @blueprint.get("/v1/event-types/<name>")
    @gate.scoped(Scope.WRITE)
    def get_event_type(caller: Caller, name: str) -> Response:
        """Read a registered type with its schema."""
        wanted = _path_type(name)
        with api.engine.connect() as connection:
            found = wanted and event_types.get(connection, workspace_id=caller.workspace.id, name=wanted)
        if not found:
            raise unknown("event_type")
        return json_response(_rendered(found))

    @blueprint.put("/v1/event-types/<name>")
    @gate.scoped(Scope.WRITE)
    def put_event_type(caller: Caller, name: str) -> Response:
        """Register a type, or replace what is registered of it: 201 or 200. Other processes follow within a second."""
        check_event_type(name, "name")
        if is_reserved(name):
            raise InvalidInput(
                "relay and types that begin with relay. are Relay's own: choose another.",
                field="name",
                code="reserved_type",
            )
        asked = models.parse(EventTypeRequest, bodies.read_object())
        if asked.json_schema is not None:
            check_schema(asked.json_schema, time.thread_time)
        with api.engine.begin() as connection:
            made = event_types.put(
                connection,
                workspace_id=caller.workspace.id,
                name=name,
                description=asked.description,
                json_schema=asked.json_schema,
                actor=caller.actor,
                request_id=request_id(),
            )
        if made is None:
            raise Problem(
                409,
                "event_type_limit",
                f"The workspace has {event_types.MAX_TYPES} registered types, which is all it may: delete one first.",
            )
        return json_response(_rendered(made[0]), 201 if made[1] else 200)

    @blueprint.delete("/v1/event-types/<name>")
    @gate.scoped(Scope.WRITE)
    def delete_event_type(caller: Caller, name: str) -> Response:
        """Take a type out of the registry: 204. Events of the type are taken as before, unchecked."""
        wanted = _path_type(name)
        with api.engine.begin() as connection:
            known = wanted is not None and event_types.remove(
                connection,
                workspace_id=caller.workspace.id,
                name=wanted,
                actor=caller.actor,
                request_id=request_id(),
            )
        if not known:
            raise unknown("event_type")
        return Response(status=204)

    return blueprint


def _path_type(name: str) -> str | None:
    """Read a type from a path; None for what is none, which is no other answer than a type that is not registered."""
    try:
        return check_event_type(name)
    except InvalidInput:
        return None


def _rendered(event_type: EventType) -> answers.RegisteredType:
    return {
        "name": event_type.name,
        "description": event_type.description,
        "json_schema": event_type.json_schema,
        "created_at": time_text(event_type.created_at),
        "updated_at": time_text(event_type.updated_at),
    }
