"""Deliveries: where each stands, and what every attempt came to; one by one, and in lists."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, request

from relay.core.filters import DELIVERY_FILTERS, parse_delivery_filter
from relay.core.ids import parse_id
from relay.core.model import Scope
from relay.core.observation import Fault
from relay.core.outcome import REFUSED_TEXT
from relay.store import deliveries, delivery_lists
from relay.web.parts import path_id
from relay.web.problems import unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from uuid import UUID

    from relay.store.deliveries import Attempt, Delivery
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes that read deliveries."""
    blueprint = Blueprint("deliveries", __name__)

    @blueprint.get("/v1/deliveries")
    @gate.scoped(Scope.READ)
    def list_deliveries(caller: Caller) -> Response:
        """List the workspace's deliveries, or one endpoint's, the newest first, without their attempts."""
        named = request.args.get("endpoint_id")
        endpoint_id = None if named is None else parse_id(named, "endpoint_id")
        return listed(caller, endpoint_id, "deliveries", ("endpoint_id", *DELIVERY_FILTERS))

    @blueprint.get("/v1/endpoints/<endpoint_id>/deliveries")
    @gate.scoped(Scope.READ)
    def list_endpoint_deliveries(caller: Caller, endpoint_id: str) -> Response:
        """List what an endpoint was sent, or is to be, the newest first; of a deleted endpoint too."""
        wanted = path_id(endpoint_id)
        if wanted is None:
            raise unknown("endpoint")
        return listed(caller, wanted, "endpoint-deliveries", DELIVERY_FILTERS)

    def listed(caller: Caller, endpoint_id: UUID | None, name: str, filters: tuple[str, ...]) -> Response:
        wanted = parse_delivery_filter(request.args)
        of = f"{name}:{caller.workspace.id}:{endpoint_id}:{wanted}"
        ids = 2 if delivery_lists.walks_events(wanted, endpoint_id) else 1
        after, limit = cursors.read(of, filters=filters, ids=ids)
        workspace_id = caller.workspace.id
        with api.engine.connect() as connection:
            if endpoint_id is not None and not delivery_lists.has_endpoint(
                connection, workspace_id=workspace_id, endpoint_id=endpoint_id
            ):
                raise unknown("endpoint")
            page = delivery_lists.list_page(
                connection, workspace_id=workspace_id, endpoint_id=endpoint_id, wanted=wanted, after=after, limit=limit
            )
        return json_response(cursors.render(page, of, summary))

    @blueprint.get("/v1/deliveries/<delivery_id>")
    @gate.scoped(Scope.READ)
    def get_delivery(caller: Caller, delivery_id: str) -> Response:
        """Read one delivery with its attempts, the oldest first."""
        wanted = path_id(delivery_id)
        with api.engine.connect() as connection:
            found = wanted and deliveries.get(connection, workspace_id=caller.workspace.id, delivery_id=wanted)
        if not found:
            raise unknown("delivery")
        return json_response(rendered(found))

    return blueprint


def rendered(delivery: Delivery) -> answers.Delivery:
    """Return a delivery as the API shows it, its attempts at the end."""
    last = delivery.last_attempt
    return {
        **summary(delivery),
        "last_attempt": None if last is None else _evidence(last),
        "attempts": [attempt_of(attempt) for attempt in delivery.attempts],
    }


def summary(delivery: Delivery) -> answers.DeliverySummary:
    """Return a delivery as lists show it: without its attempts."""
    deferred: answers.Deferred | None = None
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
    }


def attempt_of(attempt: Attempt) -> answers.Attempt:
    """Return one line of a delivery's log as the API shows it."""
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


def _evidence(last: dict[str, Any]) -> answers.LastAttempt:
    """Return what a dead delivery keeps of its last attempt, as store/results.py has it."""
    refused = last.get("code") == Fault.REFUSED
    return {
        "at": time_text(datetime.fromisoformat(last["at"])),
        "number": last.get("number"),
        "generation": last.get("generation"),
        "code": last.get("code"),
        "error": REFUSED_TEXT if refused else last.get("error"),
        "status": last.get("status"),
        "total": None if refused else _milliseconds(last.get("total_us")),
        "remote_address": None if refused else last.get("remote_address"),
        "reply_headers": [] if refused else _header_pairs(last.get("reply_headers")),
        "snippet": None if refused else last.get("snippet"),
    }


def _milliseconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1000


def _header_pairs(lines: str | None) -> list[list[str]]:
    pairs = (line.partition(":") for line in (lines or "").split("\n") if line)
    return [[name, value.strip()] for name, _, value in pairs]
