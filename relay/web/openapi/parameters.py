"""Parameters, as the routes read them. Those in paths follow from the paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.core import backoff
from relay.core.fingerprint import MAX_KEY_LENGTH
from relay.core.model import DeadReason, Status
from relay.core.seconds import MAX_EXPIRES_IN
from relay.store import replays
from relay.web.job_request import MAX_DELAY, MAX_TIMEOUT_MS, MIN_TIMEOUT_MS
from relay.web.openapi.formats import EVENT_TYPE, GIVEN_TIME, ID, choice
from relay.web.openapi.operation import Parameter
from relay.web.paging import DEFAULT_LIMIT, MAX_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping


def _query(name: str, schema: Mapping[str, Any], says: str) -> Parameter:
    return Parameter(name=name, where="query", schema=schema, says=says)


def _time(name: str, example: str, says: str) -> Parameter:
    return _query(name, {**GIVEN_TIME, "examples": [example]}, says)


def _header(name: str, schema: Mapping[str, Any], says: str, *, required: bool = False) -> Parameter:
    return Parameter(name=name, where="header", schema=schema, says=says, required=required)


PAGING: Final = (
    _query(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "Rows of the page, at most.",
    ),
    _query("cursor", {"type": "string"}, "The `next_cursor` of the page before. It is good for its own list alone."),
)
SINCE: Final = _time("since", "2026-01-31T12:00:00Z", "The first moment wanted, with its offset.")
UNTIL: Final = _time("until", "2026-02-01T12:00:00Z", "The first moment not wanted any more; after `since`.")
EVENT_TYPE_FILTER: Final = _query("event_type", EVENT_TYPE, "This type, exactly.")
TYPE_FILTER: Final = _query("type", EVENT_TYPE, "This type, exactly.")
STATUS: Final = _query("status", choice(one.label for one in Status), "In this status.")
REASON: Final = _query("reason", choice(DeadReason), "Dead for this reason.")
REPLAY_STATE: Final = _query("state", choice(replays.STATES), "In this state.")
ENDPOINT_ID: Final = _query("endpoint_id", ID, "Of this endpoint.")
DELIVERY_FILTERS: Final = (STATUS, EVENT_TYPE_FILTER, REASON, SINCE, UNTIL)
READY_FOR: Final = _query("for", choice(["ingest"]), "Whether events are taken: that needs the database alone.")

IDEMPOTENCY_KEY: Final = _header(
    "Idempotency-Key",
    {"type": "string", "pattern": "^[!-~]+$", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    "The caller's name for this request: under it one is made at most, and later ones are answered as the first was.",
)
EVENT_TYPE_HEADER: Final = _header(
    "Relay-Event-Type",
    EVENT_TYPE,
    "The event's type; without it the body's top-level `type` is. `relay` and types that begin with `relay.` are taken.",
)
_SECONDS: Final = r"^[0-9]{1,9}(\.[0-9]{1,6})?$"
EXPIRES_IN: Final = _header(
    "Relay-Expires-In",
    {"type": "string", "pattern": _SECONDS, "examples": ["3600"]},
    f"Seconds from 1 to {MAX_EXPIRES_IN}: what is not delivered by then is given up. Without it: never for its age.",
)
JOB_HEADERS: Final = (
    _header(
        "Relay-Url",
        {"type": "string", "maxLength": 2048, "examples": ["https://example.com/thumbnails"]},
        "Where the body goes.",
        required=True,
    ),
    _header("Relay-Sign", {**choice(["none", "standard", "relay"]), "default": "none"}, "How it is signed."),
    _header(
        "Relay-Max-Attempts",
        {"type": "integer", "minimum": 1, "maximum": backoff.MAX_ATTEMPTS, "default": backoff.JOB_POLICY.max_attempts},
        "How often it is tried.",
    ),
    _header(
        "Relay-Timeout-Ms",
        {"type": "integer", "minimum": MIN_TIMEOUT_MS, "maximum": MAX_TIMEOUT_MS},
        "Milliseconds for the whole exchange. Without it: what the installation has (RELAY_TOTAL_TIMEOUT_MS).",
    ),
    _header(
        "Relay-Delay",
        {"type": "string", "pattern": _SECONDS, "examples": ["30"]},
        f"Seconds until it is due, up to {MAX_DELAY}. Without it: due at once.",
    ),
    EXPIRES_IN,
)
WORKSPACE: Final = _header(
    "Relay-Workspace",
    {"type": "string", "examples": ["billing"]},
    "The name or id of the workspace to act in: needed with the instance's key, and with no other.",
)
REQUEST_ID: Final = _header(
    "X-Request-Id",
    {"type": "string"},
    "The caller's own name for the request, echoed and written down: 1 to 128 visible ASCII characters. Any other is "
    "passed over.",
)
