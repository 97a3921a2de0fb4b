"""A span for each ingest call, under the caller's own `traceparent` where it sends one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Response, g, request

from relay import tracing
from relay.web.metrics import INGEST

if TYPE_CHECKING:
    from flask import Flask

    from relay.tracing import Tracing


def install(app: Flask, traced: Tracing) -> None:
    """Have `app` trace its ingest calls."""

    def begin() -> None:
        if request.endpoint in INGEST:
            parent = request.environ.get("HTTP_TRACEPARENT")
            g.span = traced.begin("relay.ingest", parent, {"relay.request_id": g.request_id}, kind="server")

    def finish(response: Response) -> Response:
        span = g.pop("span", None)
        if span is not None:
            span.set_attribute("http.response.status_code", response.status_code)
            span.end()
        return response

    app.before_request(begin)
    app.after_request(finish)


def current() -> str | None:
    """Return the `traceparent` of this call's span; None where it has none, or none that is sampled."""
    span = g.get("span")
    return tracing.traceparent(span) if span is not None and span.is_recording() else None
