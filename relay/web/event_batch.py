"""Events by the hundred: one body, one transaction, all of them or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, request

from relay import failpoints
from relay.core import jsontext
from relay.core.event_batch import BatchedEvent, parse_batch
from relay.core.fingerprint import fingerprint
from relay.core.model import Scope
from relay.store import events
from relay.store.engine import patiently
from relay.store.events import NewEvent
from relay.store.idempotency import Claim, KeyReused
from relay.web import bodies, tracing
from relay.web.admission import Candidate
from relay.web.auth import request_id
from relay.web.events import ROUTE, payload_limit
from relay.web.parts import new_id
from relay.web.problems import FieldError, Problem, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.web.admission import Admission
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api

_NDJSON: Final = frozenset({"application/x-ndjson", "application/ndjson"})
#: Headers of a single event, which each event of a batch has members for.
_NOT_HERE: Final = (
    ("Idempotency-Key", "HTTP_IDEMPOTENCY_KEY", "idempotency_key"),
    ("Relay-Event-Type", "HTTP_RELAY_EVENT_TYPE", "type"),
    ("Relay-Expires-In", "HTTP_RELAY_EXPIRES_IN", "expires_in"),
)


def routes(api: Api, gate: Gate, admission: Admission) -> Blueprint:
    """Make the route of batches."""
    blueprint = Blueprint("event_batch", __name__)
    retention_secs = api.settings.idempotency_retention_secs

    @blueprint.post("/v1/events/batch")
    @gate.scoped(Scope.INGEST)
    def post_batch(caller: Caller) -> Response:
        """Take up to 1,000 events, as a JSON array or one a line (NDJSON): 202 once all of them are committed.

        Where anything is wrong with any of them none is stored. A payload is JSON, and goes out as the very bytes that
        stand in the batch. Events whose idempotency keys were used before are answered as they were then, and
        `replayed` lists their indexes.
        """
        drafts = _read(api, caller)
        admission.admit(
            caller.workspace,
            len(drafts),
            lambda: (
                Candidate(type=one.type, payload=one.payload, is_json=True, field=f"[{index}].payload")
                for index, one in enumerate(drafts)
            ),
        )
        request_name = request_id()
        traceparent = tracing.current()
        batch = [_event(one, caller, request_name, traceparent) for one in drafts]
        failpoints.hit("ingest.before_commit")
        with api.hot.connect() as connection, patiently(connection):
            try:
                taken = events.take(connection, batch, retention_secs=retention_secs)
            except KeyReused as error:
                raise _reused(error.indexes) from None
        failpoints.hit("ingest.after_commit")
        answers = b",".join([one.answer.rstrip(b"\n") for one in taken])
        replayed = b",".join([b"%d" % index for index, one in enumerate(taken) if one.replayed])
        return Response(
            b'{"events":[' + answers + b'],"replayed":[' + replayed + b"]}\n", 202, content_type="application/json"
        )

    return blueprint


def _read(api: Api, caller: Caller) -> list[BatchedEvent]:
    """Read and judge the body. Raises Problem, InvalidInput and InvalidJson."""
    environ = request.environ
    misplaced = [
        FieldError(
            field=name,
            message=f'A batch takes no such header: leave it out, and give each event a "{member}" of its own.',
            code="unsupported_header",
        )
        for name, variable, member in _NOT_HERE
        if variable in environ
    ]
    if misplaced:
        raise invalid(misplaced)
    content_type: str = environ.get("CONTENT_TYPE", "").strip()
    lines = content_type.partition(";")[0].strip().lower() in _NDJSON
    if not lines and content_type and not jsontext.is_json(content_type):
        raise Problem(
            415, "unsupported_media_type", "A batch is application/json (an array) or application/x-ndjson (lines)."
        )
    if lines and not bodies.is_measured(environ):
        raise Problem(
            411,
            "length_required",
            "Lines in a chunked body that breaks off cannot be told from all of them: send a Content-Length, or an array.",
        )
    drafts, faults = parse_batch(bodies.read(api.settings.max_batch_bytes), lines=lines)
    if faults:
        raise invalid(
            [FieldError(field=fault.field or "body", message=str(fault), code=fault.code) for fault in faults]
        )
    limit = payload_limit(api, caller)
    large = [index for index, one in enumerate(drafts) if len(one.payload) > limit]
    if large:
        message = f"The payload is larger than {limit} bytes: send less."
        raise Problem(
            413,
            "payload_too_large",
            f"[{large[0]}].payload: {message}",
            errors=[FieldError(field=f"[{index}].payload", message=message, code="too_long") for index in large[:20]],
        )
    return drafts


def _event(one: BatchedEvent, caller: Caller, request_name: str, traceparent: str | None) -> NewEvent:
    claim = None
    if one.idempotency_key is not None:
        claim = Claim(key=one.idempotency_key, fingerprint=fingerprint((ROUTE, one.type), one.payload, is_json=True))
    return NewEvent(
        id=new_id(),
        workspace_id=caller.workspace.id,
        type=one.type,
        content_type="application/json",
        payload=one.payload,
        api_key_id=caller.key_id,
        request_id=request_name,
        expires_in=one.expires_in,
        claim=claim,
        traceparent=traceparent,
    )


def _reused(indexes: Sequence[int]) -> Problem:
    message = "The key was used for an event of another type or with another payload: send a new one."
    return Problem(
        409,
        "idempotency_key_reused",
        f"{len(indexes)} of the events have keys that were used for others: nothing of the batch is stored.",
        errors=[
            FieldError(field=f"[{index}].idempotency_key", message=message, code="idempotency_key_reused")
            for index in indexes
        ],
        members={"indexes": list(indexes)},
    )
