"""The Flask application, put together from its parts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flask import Flask, Response, g, request

from relay.web import deliveries, endpoints, events, health, keys, problems, workspaces
from relay.web.auth import Gate
from relay.web.paging import Cursors
from relay.web.parts import new_id
from relay.web.turnstile import Turnstile

if TYPE_CHECKING:
    from relay.web.parts import Api

#: A caller's own request id: visible ASCII, since it goes into logs and headers.
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(api: Api) -> Flask:
    """Make the API's WSGI application. Opens nothing: the first request does."""
    app = Flask("relay.web", static_folder=None)
    # An answer that redirects, or that nobody wrote, is none that a client of this API expects.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    problems.install(app)
    turnstile = Turnstile(api.settings.api_threads)
    app.before_request(_begin)
    app.before_request(turnstile.enter)
    app.teardown_request(turnstile.leave)
    app.after_request(_finish)

    gate = Gate(api)
    cursors = Cursors(api.settings)
    for blueprint in (
        events.routes(api, gate),
        endpoints.routes(api, gate, cursors),
        deliveries.routes(api, gate),
        workspaces.routes(api, gate, cursors),
        keys.routes(api, gate, cursors),
        health.routes(api),
    ):
        app.register_blueprint(blueprint)
    return app


def _begin() -> None:
    given = request.environ.get("HTTP_X_REQUEST_ID", "")
    g.request_id = given if _REQUEST_ID.fullmatch(given) else str(new_id())


def _finish(response: Response) -> Response:
    headers = response.headers
    headers.add("X-Request-Id", g.request_id)
    # Keys and secrets are in some answers; none is worth a cache.
    headers.add("Cache-Control", "no-store")
    headers.add("X-Content-Type-Options", "nosniff")
    return response
