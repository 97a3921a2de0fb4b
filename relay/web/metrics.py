"""`GET /metrics`: the API's figures for Prometheus, and where they are counted.

It takes no key, as a scraper has none. It shows counts and no names; a proxy in front need not pass it on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, g, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

if TYPE_CHECKING:
    from flask import Flask

    from relay.process.metrics_api import ApiFigures

#: The views of ingest calls.
INGEST: Final = frozenset({"events.post_event", "event_batch.post_batch", "jobs.enqueue"})
#: Not counted: what watches would outnumber what is watched.
_WATCHING: Final = frozenset({"health.healthz", "health.readyz", "metrics.metrics"})


def routes(figures: ApiFigures) -> Blueprint:
    """Make the route of the metrics."""
    blueprint = Blueprint("metrics", __name__)
    registry = CollectorRegistry()
    registry.register(figures)

    @blueprint.get("/metrics")
    def metrics() -> Response:
        """Show the figures of all processes that serve the API here, in Prometheus's text format."""
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return blueprint


def count(app: Flask, figures: ApiFigures) -> None:
    """Have `app` count each answer of its own."""

    def begin() -> None:
        g.began = time.perf_counter()

    def finish(response: Response) -> Response:
        endpoint = request.endpoint
        if endpoint not in _WATCHING:
            ingest_secs = time.perf_counter() - g.began if endpoint in INGEST else None
            figures.answered(response.status_code, ingest_secs=ingest_secs)
        return response

    app.before_request(begin)
    app.after_request(finish)
