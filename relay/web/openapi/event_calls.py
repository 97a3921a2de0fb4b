"""Calls about events and their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.core.event_batch import MAX_EVENTS
from relay.core.fingerprint import MAX_KEY_LENGTH
from relay.core.seconds import MAX_EXPIRES_IN
from relay.web import answers
from relay.web.event_types import EventTypeRequest
from relay.web.openapi import parameters
from relay.web.openapi.formats import EVENT_TYPE
from relay.web.openapi.operation import JSON, Answer, Body, Operation, Page, takes

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVENTS: Final = "Events"
_TYPES: Final = "Event types"
_BYTES: Final[Mapping[str, Any]] = {"type": "string", "format": "binary"}
#: What refuses any event.
_REFUSED: Final[Mapping[int, tuple[str, ...]]] = {
    409: ("idempotency_key_reused",),
    411: ("length_required",),
    422: ("schema_mismatch",),
    429: ("ingest_rate",),
}
_BATCHED: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "type": EVENT_TYPE,
        "payload": {"description": "Any JSON value: it is delivered as the bytes that stand here."},
        "idempotency_key": {"type": ["string", "null"], "pattern": "^[!-~]+$", "maxLength": MAX_KEY_LENGTH},
        "expires_in": {"type": ["number", "null"], "minimum": 1, "maximum": MAX_EXPIRES_IN},
    },
    "required": ["type", "payload"],
    "additionalProperties": False,
}

OPERATIONS: Final[Mapping[str, Operation]] = {
    "events.post_event": Operation(
        tag=_EVENTS,
        parameters=(parameters.EVENT_TYPE_HEADER, parameters.IDEMPOTENCY_KEY, parameters.EXPIRES_IN),
        body=Body(
            content={JSON: {"description": "Any JSON value."}, "*/*": _BYTES},
            examples={JSON: {"type": "order.paid", "amount": 4999}},
        ),
        answers={
            202: Answer(
                says="It is committed, and so are its deliveries.",
                shape=answers.TakenEvent,
                headers=("Relay-Idempotent-Replay",),
            )
        },
        problems={**_REFUSED, 415: ("invalid_content_type",)},
    ),
    "event_batch.post_batch": Operation(
        tag=_EVENTS,
        body=Body(
            content={
                JSON: {"type": "array", "items": _BATCHED, "minItems": 1, "maxItems": MAX_EVENTS},
                "application/x-ndjson": {"type": "string", "description": "Such an object a line."},
            },
            examples={
                JSON: [{"type": "order.paid", "payload": {"amount": 4999}, "idempotency_key": "order-4711-paid"}],
                "application/x-ndjson": '{"type": "order.paid", "payload": {"amount": 4999}}\n',
            },
        ),
        answers={202: Answer(says="All of them are committed.", shape=answers.TakenBatch)},
        problems=_REFUSED,
    ),
    "event_reading.list_events": Operation(
        tag=_EVENTS,
        parameters=(parameters.TYPE_FILTER, parameters.SINCE, parameters.UNTIL, *parameters.PAGING),
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.Event))},
    ),
    "event_reading.get_event": Operation(
        tag=_EVENTS,
        answers={200: Answer(says="The event.", shape=answers.EventWithDeliveries)},
        problems={404: ("unknown_event",)},
    ),
    "event_reading.get_payload": Operation(
        tag=_EVENTS,
        answers={
            200: Answer(
                says="The bytes.",
                media_type="application/octet-stream",
                schema=_BYTES,
                headers=("Content-Disposition", "Content-Security-Policy"),
            )
        },
        problems={404: ("unknown_event",)},
    ),
    "event_types.list_event_types": Operation(
        tag=_TYPES,
        answers={200: Answer(says="All of them, by name.", shape=Page(of=answers.RegisteredTypeSummary))},
    ),
    "event_types.get_event_type": Operation(
        tag=_TYPES,
        answers={200: Answer(says="The type.", shape=answers.RegisteredType)},
        problems={404: ("unknown_event_type",)},
    ),
    "event_types.put_event_type": Operation(
        tag=_TYPES,
        body=takes(
            EventTypeRequest,
            {
                "description": "An order was paid in full.",
                "json_schema": {
                    "type": "object",
                    "required": ["amount"],
                    "properties": {"amount": {"type": "integer"}},
                },
            },
        ),
        answers={
            200: Answer(says="It was registered before, and is replaced.", shape=answers.RegisteredType),
            201: Answer(says="It is registered.", shape=answers.RegisteredType),
        },
        problems={409: ("event_type_limit",)},
    ),
    "event_types.delete_event_type": Operation(
        tag=_TYPES,
        answers={204: Answer(says="It is registered no more.")},
        problems={404: ("unknown_event_type",)},
    ),
}
