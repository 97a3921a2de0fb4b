"""The secret that a workspace's jobs are signed with: made by its first rotation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flask import Blueprint, Response

from relay.core.model import Scope, Signing
from relay.core.secret import RANDOM_BYTES, new_secret
from relay.store import jobs
from relay.web import models
from relay.web.auth import request_id
from relay.web.endpoint_life import optional_object
from relay.web.endpoint_models import SecretRequest, check_own_secret
from relay.web.endpoints import sealed
from relay.web.render import json_response, optional_time

if TYPE_CHECKING:
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the route of the job secret."""
    blueprint = Blueprint("job_secret", __name__)

    @blueprint.post("/v1/job-secret/rotate")
    @gate.scoped(Scope.WRITE)
    def rotate_job_secret(caller: Caller) -> Response:
        """Make or replace the secret that signs the workspace's jobs; 200 with it, shown this once.

        The old one signs too until `previous_secret_expires_at`. 503 where this process can seal none.
        """
        asked = models.parse(SecretRequest, optional_object())
        own = check_own_secret(asked.secret, transport="http", signing=Signing.RELAY)
        key = new_secret(os.urandom(RANDOM_BYTES), Signing.RELAY) if own is None else own
        workspace_id = caller.workspace.id
        with api.engine.begin() as connection:
            expires_at = jobs.rotate_secret(
                connection,
                workspace_id=workspace_id,
                sealed=sealed(api.vault, key, workspace_id),
                overlap_secs=api.settings.secret_overlap_secs,
                actor=caller.actor,
                request_id=request_id(),
            )
        shown: answers.RotatedSecret = {
            "id": str(workspace_id),
            "secret": key.reveal(),
            "previous_secret_expires_at": optional_time(expires_at),
        }
        return json_response(shown)

    return blueprint
