"""The Flask application, put together from its parts."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from flask import Flask, Response, g, request

from relay.web import (
    audit,
    deliveries,
    delivery_changes,
    docs_page,
    endpoint_life,
    endpoint_secrets,
    endpoint_testing,
    endpoints,
    event_batch,
    event_reading,
    event_types,
    events,
    health,
    job_secret,
    jobs,
    keys,
    metrics,
    problems,
    replays,
    tracing,
    webhook_keys,
    workspaces,
)
from relay.web.admission import Admission
from relay.web.auth import Gate, request_id_of
from relay.web.express import Express
from relay.web.gateway import EVERYWHERE
from relay.web.paging import Cursors
from relay.web.together import Together

if TYPE_CHECKING:
    from relay.web.parts import Api

#: Where the application's extensions have its `Express`, if it has one, for a server that can use it.
EXPRESS: Final = "relay.express"


def create_app(api: Api) -> Flask:
    """Make the API's WSGI application. Opens nothing: the first request does."""
    app = Flask("relay.web", static_folder=None)
    # An answer that redirects, or that nobody wrote, is none that a client of this API expects.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    problems.install(app)
    app.before_request(_begin)
    app.after_request(_finish)
    metrics.count(app, api.figures)
    if api.tracing is not None:
        tracing.install(app, api.tracing)

    gate = Gate(api)
    admission = Admission(api)
    cursors = Cursors(api.settings)
    together = None if api.grouped is None else Together(api.grouped)
    if together is not None and api.tracing is None:
        app.extensions[EXPRESS] = Express(api, gate, admission, together)
    for blueprint in (
        events.routes(api, gate, admission, together),
        event_batch.routes(api, gate, admission),
        event_reading.routes(api, gate, cursors),
        event_types.routes(api, gate),
        jobs.routes(api, gate, admission),
        job_secret.routes(api, gate),
        endpoints.routes(api, gate, cursors),
        endpoint_life.routes(api, gate),
        endpoint_secrets.routes(api, gate),
        endpoint_testing.routes(api, gate),
        deliveries.routes(api, gate, cursors),
        delivery_changes.routes(api, gate),
        replays.routes(api, gate, cursors),
        workspaces.routes(api, gate, cursors),
        keys.routes(api, gate, cursors),
        audit.routes(api, gate, cursors),
        webhook_keys.routes(api),
        health.routes(api),
        metrics.routes(api.figures),
        docs_page.routes(gate),
    ):
        app.register_blueprint(blueprint)
    return app


def _begin() -> None:
    g.request_id = request_id_of(request.environ)


def _finish(response: Response) -> Response:
    headers = response.headers
    if response.status_code == HTTPStatus.NO_CONTENT:
        # The framework names a type for any answer; this one has nothing that could be of it.
        headers.remove("Content-Type")
    headers.add("X-Request-Id", g.request_id)
    # Keys and secrets are in some answers, and few are worth a cache: those say so themselves.
    for name, value in EVERYWHERE:
        headers.setdefault(name, value)
    return response
