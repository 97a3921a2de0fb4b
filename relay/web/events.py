"""Ingest: the one call that producers make all day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, request

from relay import failpoints
from relay.core.errors import InvalidInput
from relay.core.event_types import check_event_type, is_reserved
from relay.core.headers import check_headers
from relay.core.jsontext import scan_event
from relay.core.model import Scope
from relay.store import events
from relay.store.events import NewEvent
from relay.web import bodies
from relay.web.auth import request_id
from relay.web.parts import new_id
from relay.web.problems import FieldError, Problem, invalid
from relay.web.render import time_text

if TYPE_CHECKING:
    from relay.store.events import Ingested
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api

_TYPE_HEADER: Final = "Relay-Event-Type"
#: Characters of a Content-Type, which is stored and sent on.
_MAX_CONTENT_TYPE: Final = 255
#: What a producer may believe in and this release does not do yet. To take it and not act on it would be a lie.
_NOT_YET: Final = (("Idempotency-Key", "HTTP_IDEMPOTENCY_KEY"), ("Relay-Expires-In", "HTTP_RELAY_EXPIRES_IN"))
#: Bytes that the JSON values begin with whose end shows, so that a cut one is no JSON. A number's does not.
_BOUNDED_JSON: Final = b'{["tfn'


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the routes of events."""
    blueprint = Blueprint("events", __name__)

    @blueprint.post("/v1/events")
    @gate.scoped(Scope.INGEST)
    def post_event(caller: Caller) -> Response:
        """Take one event; 202 once it and its deliveries are committed.

        The payload is the body, byte for byte, and goes out under the Content-Type that it came with; one without is
        taken for application/json. The type is the header Relay-Event-Type, else the body's top-level `type`, which is
        only looked for in JSON: any other body needs the header. So does what curl sends when it is told no type
        (application/x-www-form-urlencoded): nothing is guessed from the body's looks. JSON is checked either way.
        """
        # Headers come from the environment itself here: it is several times faster, and this runs for every event.
        environ = request.environ
        for name, variable in _NOT_YET:
            if variable in environ:
                message = "This header is not supported here: leave it out."
                raise invalid([FieldError(field=name, message=message, code="unsupported_header")])
        content_type = _content_type(environ.get("CONTENT_TYPE", ""))
        named: str | None = environ.get("HTTP_RELAY_EVENT_TYPE")
        own_limit = caller.workspace.max_payload_bytes
        limit = api.settings.max_payload_bytes
        body = bodies.read(limit if own_limit is None else min(limit, own_limit))
        event_type = _type_of(named, content_type, body)
        event = NewEvent(
            id=new_id(),
            workspace_id=caller.workspace.id,
            type=event_type,
            content_type=content_type,
            payload=body,
            api_key_id=caller.key_id,
            request_id=request_id(),
        )
        failpoints.hit("ingest.before_commit")
        with api.hot.connect() as connection:
            stored = events.ingest(connection, [event])[0]
        failpoints.hit("ingest.after_commit")
        return Response(_render(stored, event_type), 202, content_type="application/json")

    return blueprint


def _content_type(given: str) -> str:
    value = given.strip()
    if value in {"", "application/json"}:
        return "application/json"
    if len(value) > _MAX_CONTENT_TYPE or "/" not in value:
        raise Problem(415, "invalid_content_type", "The Content-Type is not a media type: send one such as text/plain.")
    try:
        check_headers([("Content-Type", value)])
    except InvalidInput as error:
        raise InvalidInput(str(error), field="Content-Type", code=error.code) from None
    return value


def _type_of(named: str | None, content_type: str, body: bytes) -> str:
    """Judge the body by its Content-Type and return the event's type. Raises InvalidInput, InvalidJson or Problem."""
    if not body:
        raise InvalidInput("The body is empty: send the payload in it.", field="body", code="empty_body")
    is_json = bodies.is_json(content_type)
    if not bodies.is_measured() and not (is_json and body.lstrip()[:1] in _BOUNDED_JSON):
        # The server hands over what came before a broken connection as if it were all.
        raise Problem(
            411,
            "length_required",
            "A chunked body that breaks off cannot be told from a whole one, but for JSON: send a Content-Length.",
        )
    found: str | None = None
    if is_json:
        found = scan_event(body, read_type=named is None).type
    if named is not None:
        event_type = check_event_type(named, _TYPE_HEADER)
    elif found is not None:
        event_type = check_event_type(found)
    else:
        raise InvalidInput(
            'The event has no type: put "type" into the JSON object, or name it in the Relay-Event-Type header.'
            if is_json
            else f"The body is {content_type.partition(';')[0]}, in which no type is looked for: name it in the "
            "Relay-Event-Type header, or send JSON with Content-Type: application/json.",
            field="type" if is_json else _TYPE_HEADER,
            code="type_required",
        )
    if is_reserved(event_type):
        raise InvalidInput(
            "relay and types that begin with relay. are Relay's own: choose another.",
            field="type" if named is None else _TYPE_HEADER,
            code="reserved_type",
        )
    return event_type


def _render(stored: Ingested, event_type: str) -> str:
    # Ids and checked types hold nothing that JSON would escape, and this runs for every event.
    deliveries = ",".join(f'{{"id":"{one.id}","endpoint_id":"{one.endpoint_id}"}}' for one in stored.deliveries)
    return (
        f'{{"id":"{stored.id}","type":"{event_type}","created_at":"{time_text(stored.created_at)}",'
        f'"deliveries":[{deliveries}]}}\n'
    )
