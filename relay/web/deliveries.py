"""Deliveries: where each stands, and what every attempt came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from relay.core.model import Scope
from relay.core.observation import Fault
from relay.core.outcome import REFUSED_TEXT
from relay.store import deliveries
from relay.web.parts import path_id
from relay.web.problems import unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from relay.store.deliveries import Attempt, Delivery
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the routes of deliveries."""
    blueprint = Blueprint("deliveries", __name__)

    @blueprint.get("/v1/deliveries/<delivery_id>")
    @gate.scoped(Scope.READ)
    def get_delivery(caller: Caller, delivery_id: str) -> Response:
        """Read one delivery with its attempts, the oldest first."""
        wanted = path_id(delivery_id)
        with api.engine.connect() as connection:
            found = wanted and deliveries.get(connection, workspace_id=caller.workspace.id, delivery_id=wanted)
        if not found:
            raise unknown("delivery")
        return json_response(_rendered(found))

    return blueprint


def _rendered(delivery: Delivery) -> dict[str, object]:
    deferred = None
    if delivery.deferred_reason is not None:
        deferred = {
            "reason": delivery.deferred_reason,
            "since": optional_time(delivery.deferred_since),
            "count": delivery.deferred_count,
        }
    return {
        "id": str(delivery.id),
        "event_id": str(delivery.event_id),
        "endpoint_id": str(delivery.endpoint_id),
        "event_type": delivery.event_type,
        "status": delivery.status.label,
        "reason": delivery.reason,
        "attempt_count": delivery.attempt_count,
        "generation": delivery.generation,
        # A finished row keeps its last due time, which says nothing to anybody.
        "due_at": optional_time(delivery.due_at if delivery.finished_at is None else None),
        "created_at": time_text(delivery.created_at),
        "finished_at": optional_time(delivery.finished_at),
        "deferred": deferred,
        "attempts": [_attempt(attempt) for attempt in delivery.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, object]:
    # Of an address that policy refuses nothing is told: neither what it is nor how it behaves.
    refused = attempt.code == Fault.REFUSED
    return {
        "at": time_text(attempt.at),
        "number": attempt.number,
        "generation": attempt.generation,
        "class": attempt.attempt_class.label,
        "code": attempt.code,
        "error": REFUSED_TEXT if refused else attempt.error,
        "status": attempt.http_status,
        "body_incomplete": attempt.body_incomplete,
        "sends": attempt.sends,
        "durations": {
            "dns": None if refused else _milliseconds(attempt.dns_us),
            "connect": None if refused else _milliseconds(attempt.connect_us),
            "tls": None if refused else _milliseconds(attempt.tls_us),
            "first_byte": None if refused else _milliseconds(attempt.first_byte_us),
            "total": None if refused else _milliseconds(attempt.total_us),
        },
        "bytes_sent": attempt.bytes_sent,
        "bytes_received": attempt.bytes_received,
        "remote_address": None if refused else attempt.remote_address,
        "worker": attempt.worker,
        "reply_headers": [] if refused else _header_pairs(attempt.reply_headers),
        "snippet": None if refused else attempt.snippet,
    }


def _milliseconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1000


def _header_pairs(lines: str | None) -> list[list[str]]:
    pairs = (line.partition(":") for line in (lines or "").split("\n") if line)
    return [[name, value.strip()] for name, _, value in pairs]
