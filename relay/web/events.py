"""Ingest: the one call that producers make all day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flask import Blueprint, Response, request

from relay import failpoints
from relay.core import jsontext
from relay.core.errors import InvalidInput
from relay.core.event_types import check_event_type, is_reserved
from relay.core.fingerprint import check_key, fingerprint
from relay.core.headers import check_headers
from relay.core.jsontext import scan_event
from relay.core.model import Scope
from relay.core.seconds import parse_expires_in
from relay.store import events
from relay.store.events import NewEvent, Taken
from relay.store.idempotency import Claim, KeyReused
from relay.web import bodies, tracing
from relay.web.admission import Candidate
from relay.web.auth import request_id
from relay.web.parts import new_id
from relay.web.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.web.admission import Admission
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api
    from relay.web.together import Together

#: What an event's fingerprint begins with, whichever call brought it: one key, one event, by either.
ROUTE: Final = "event"

_TYPE_HEADER: Final = "Relay-Event-Type"
#: Characters of a Content-Type, which is stored and sent on.
_MAX_CONTENT_TYPE: Final = 255


def routes(api: Api, gate: Gate, admission: Admission, together: Together | None) -> Blueprint:
    """Make the routes of events."""
    blueprint = Blueprint("events", __name__)
    traced = api.tracing is not None

    def alone(event: NewEvent) -> Taken:
        failpoints.hit("ingest.before_commit")
        with api.hot.connect() as connection:
            try:
                taken = events.take(connection, [event], retention_secs=api.settings.idempotency_retention_secs)[0]
            except KeyReused:
                raise Problem(
                    409,
                    "idempotency_key_reused",
                    "The Idempotency-Key was used for an event of another type or with another body: send a new key.",
                ) from None
        failpoints.hit("ingest.after_commit")
        return taken

    @blueprint.post("/v1/events")
    @gate.scoped(Scope.INGEST)
    def post_event(caller: Caller) -> Response:
        """Take one event; 202 once it and its deliveries are committed.

        The payload is the body, byte for byte, and goes out under the Content-Type that it came with; one without is
        taken for application/json. The type is the header Relay-Event-Type, else the body's top-level `type`, which is
        only looked for in JSON: any other body needs the header. So does what curl sends when it is told no type
        (application/x-www-form-urlencoded): nothing is guessed from the body's looks. JSON is checked either way.

        With an Idempotency-Key the second such request gets the first one's answer, byte for byte, and
        Relay-Idempotent-Replay: true; another request under the key is 409.
        """
        event = draft(
            request.environ,
            caller,
            request_id(),
            read=lambda: bodies.read(payload_limit(api, caller)),
            admit=lambda one: admission.admit(caller.workspace, 1, lambda: [one]),
            traceparent=tracing.current() if traced else None,
        )
        answer = None if together is None else together.ingest(event)
        taken = Taken(answer, replayed=False) if answer is not None else alone(event)
        response = Response(taken.answer, 202, content_type="application/json")
        if taken.replayed:
            response.headers["Relay-Idempotent-Replay"] = "true"
        return response

    return blueprint


def draft(
    environ: dict[str, Any],
    caller: Caller,
    request_name: str,
    *,
    read: Callable[[], bytes],
    admit: Callable[[Candidate], None] | None = None,
    traceparent: str | None = None,
) -> NewEvent:
    """Judge a request for an event and return the event. `read` gives the body; `admit` lets the event in, or raises.

    Without `admit` the event is let in.

    Raises InvalidInput, InvalidJson and Problem, and what `read` and `admit` raise.
    """
    # Headers come from the environment itself here: it is several times faster, and this runs for every event.
    key: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    if key is not None:
        check_key(key)
    expires: str | None = environ.get("HTTP_RELAY_EXPIRES_IN")
    expires_in = None if expires is None else parse_expires_in(expires)
    content_type = _content_type(environ.get("CONTENT_TYPE", ""))
    named: str | None = environ.get("HTTP_RELAY_EVENT_TYPE")
    body = read()
    is_json = jsontext.is_json(content_type)
    event_type = _type_of(named, content_type, body, is_json=is_json, is_measured=bodies.is_measured(environ))
    if admit is not None:
        admit(Candidate(type=event_type, payload=body, is_json=is_json))
    claim = None
    if key is not None:
        claim = Claim(key=key, fingerprint=fingerprint((ROUTE, event_type), body, is_json=is_json))
    return NewEvent(
        id=new_id(),
        workspace_id=caller.workspace.id,
        type=event_type,
        content_type=content_type,
        payload=body,
        api_key_id=caller.key_id,
        request_id=request_name,
        expires_in=expires_in,
        claim=claim,
        traceparent=traceparent,
    )


def payload_limit(api: Api, caller: Caller) -> int:
    """Return the bytes that a payload of the caller's may have: the workspace's limit holds where it is the lower."""
    own = caller.workspace.max_payload_bytes
    limit = api.settings.max_payload_bytes
    return limit if own is None else min(limit, own)


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


def _type_of(named: str | None, content_type: str, body: bytes, *, is_json: bool, is_measured: bool) -> str:
    """Judge the body by its Content-Type and return the event's type. Raises InvalidInput, InvalidJson or Problem."""
    if not body:
        raise InvalidInput("The body is empty: send the payload in it.", field="body", code="empty_body")
    if not is_measured and not (is_json and bodies.shows_its_end(body)):
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
