"""Answers: JSON, with times as RFC 3339 in UTC to the microsecond."""

from __future__ import annotations

import json
from datetime import UTC
from typing import TYPE_CHECKING

from flask import Response

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


def json_response(value: Mapping[str, object], status: int = 200) -> Response:
    """Make a JSON answer; `value` holds JSON's own types only."""
    return Response(json.dumps(value, separators=(",", ":")) + "\n", status, content_type="application/json")


def time_text(value: datetime) -> str:
    """Write a time as `2026-01-31T12:00:00.000000Z`."""
    return value.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def optional_time(value: datetime | None) -> str | None:
    """Write a time that may be absent."""
    return None if value is None else time_text(value)
