"""The API's description: as OpenAPI for programs, and as a page for people that needs nothing from anywhere else.

Neither takes a key: it tells what every installation of this version tells. The page is plain HTML, made here: it runs
no script, and loads nothing but its style sheet.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flask import Blueprint, Response, current_app, render_template, request

from relay.web.openapi.document import build
from relay.web.openapi.page import Page, bounds, schema_name

if TYPE_CHECKING:
    from relay.web.auth import Gate

#: For so many seconds a browser or proxy keeps these.
_CACHED: Final = "public, max-age=300"
_POLICY: Final = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def routes(gate: Gate) -> Blueprint:
    """Make the routes of the description. It is made when it is first asked for, and kept."""
    blueprint = Blueprint("docs_page", __name__)

    @functools.cache
    def document() -> dict[str, Any]:
        return build(current_app, gate)

    @functools.cache
    def text() -> tuple[str, str]:
        written = json.dumps(document(), separators=(",", ":")) + "\n"
        return written, hashlib.sha256(written.encode()).hexdigest()[:32]

    @functools.cache
    def page() -> str:
        return render_template("docs.html", page=Page(document()), bounds=bounds, schema_name=schema_name)

    @functools.cache
    def sheet() -> bytes:
        return (Path(__file__).parent / "static" / "docs.css").read_bytes()

    @blueprint.get("/openapi.json")
    def openapi() -> Response:
        """Describe the API in OpenAPI 3.1: this text. With If-None-Match it is 304 where nothing has changed."""
        written, tag = text()
        response = Response(written, content_type="application/json")
        response.set_etag(tag)
        response.make_conditional(request)
        return _kept(response)

    @blueprint.get("/docs")
    def docs() -> Response:
        """Show the description as a page, which works offline."""
        response = Response(page(), content_type="text/html; charset=utf-8")
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        return _kept(response)

    @blueprint.get("/docs/style.css")
    def style() -> Response:
        """Give the page its looks."""
        return _kept(Response(sheet(), content_type="text/css; charset=utf-8"))

    @blueprint.get("/")
    def begin() -> Response:
        """Lead to the description, which is all that there is for a browser."""
        return _elsewhere()

    @blueprint.get("/docs/")
    def slashed() -> Response:
        """Lead to the page, whose path has no slash at the end."""
        return _elsewhere()

    return blueprint


def _elsewhere() -> Response:
    response = Response(status=302, headers={"Location": "/docs"})
    response.headers.remove("Content-Type")
    return _kept(response)


def _kept(response: Response) -> Response:
    response.headers["Cache-Control"] = _CACHED
    return response
