"""Liveness and readiness, for supervisors and load balancers. Neither needs a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response, request

from relay.web.problems import RETRY_AFTER_SECS, FieldError, Problem, invalid
from relay.web.readiness import Readiness
from relay.web.render import json_response

if TYPE_CHECKING:
    from relay.web import answers
    from relay.web.parts import Api


def routes(api: Api) -> Blueprint:
    """Make the routes of health."""
    blueprint = Blueprint("health", __name__)
    readiness = Readiness(api.settings)

    @blueprint.get("/healthz")
    def healthz() -> Response:
        """Say that this process runs, and nothing of what it depends on: a restart of it would mend none of that."""
        alive: answers.Alive = {"status": "ok"}
        return json_response(alive)

    @blueprint.get("/readyz")
    def readyz() -> Response:
        """Say whether events are taken and delivered: 200, or 503 naming what fails; within 2 s.

        With `for=ingest` whether events are taken: that needs the database alone.
        """
        purpose = request.args.get("for")
        if purpose not in {None, "ingest"}:
            message = "It can only be ingest: write it so, or leave it out."
            raise invalid([FieldError(field="for", message=message, code="not_a_choice")])
        checks = readiness.check(ingest_only=purpose is not None)
        shown = {check.name: check.text for check in checks}
        failing = [check for check in checks if check.fault is not None]
        if failing:
            raise Problem(
                503,
                "not_ready",
                "; ".join(f"{check.name}: {check.fault}" for check in failing),
                headers={"Retry-After": str(RETRY_AFTER_SECS)},
                members={"checks": shown},
            )
        ready: answers.Ready = {"status": "ready", "checks": shown}
        return json_response(ready)

    return blueprint
