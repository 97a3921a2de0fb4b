"""Endpoints: making them, with their secrets sealed, and reading them, without."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response

from relay.core import backoff, secret
from relay.core.model import Scope
from relay.core.secret import Secret
from relay.store import endpoints
from relay.store.endpoints import Endpoint, NewEndpoint
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.parts import new_id, path_id
from relay.web.problems import Problem, unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from uuid import UUID

    from relay.store.vault import Vault
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

#: What a header's value reads back as.
MASKED: Final = "********"


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes of endpoints."""
    blueprint = Blueprint("endpoints", __name__)
    limits = models.Limits(
        url_policy=api.url_policy,
        address_policy=api.address_policy,
        longest_timeout_ms=api.settings.longest_timeout_ms,
    )

    @blueprint.post("/v1/endpoints")
    @gate.scoped(Scope.WRITE)
    def create_endpoint(caller: Caller) -> Response:
        """Make an endpoint; 201 with its secret, which is shown this once. 503 where this process can seal none."""
        asked = models.parse(models.EndpointRequest, bodies.read_object(), limits)
        endpoint_id = new_id()
        key = secret.new_secret(os.urandom(secret.RANDOM_BYTES)) if asked.secret is None else Secret(asked.secret)
        new = NewEndpoint(
            id=endpoint_id,
            workspace_id=caller.workspace.id,
            url=asked.url,
            description=asked.description,
            event_types=list(dict.fromkeys(asked.event_types)),
            signing=asked.signing,
            sealed_headers=_sealed(asked.headers, api.vault, endpoint_id),
            sealed_secret=api.vault.seal(key, owner=endpoint_id),
            max_in_flight=asked.max_in_flight,
            timeout_ms=asked.timeout_ms,
            retry=asked.retry,
            metadata=asked.metadata,
            enabled=asked.enabled,
        )
        with api.engine.begin() as connection:
            made = endpoints.create(
                connection,
                new,
                default_limit=api.settings.workspace_max_endpoints,
                actor=caller.actor,
                request_id=request_id(),
            )
        if made is None:
            # A limit of the workspace's own was set when it was made, and no setting moves it.
            own = caller.workspace.max_endpoints is not None
            remedy = "use another workspace" + ("" if own else ", or have RELAY_WORKSPACE_MAX_ENDPOINTS raised")
            raise Problem(409, "endpoint_limit", f"The workspace has as many endpoints as it may: {remedy}.")
        response = json_response({**_rendered(made), "secret": key.reveal()}, 201)
        response.headers["Location"] = f"/v1/endpoints/{endpoint_id}"
        return response

    @blueprint.get("/v1/endpoints")
    @gate.scoped(Scope.READ)
    def list_endpoints(caller: Caller) -> Response:
        """List the workspace's endpoints, the newest first."""
        of = f"endpoints:{caller.workspace.id}"
        after, limit = cursors.read(of)
        with api.engine.connect() as connection:
            page = endpoints.list_page(connection, workspace_id=caller.workspace.id, after=after, limit=limit)
        return json_response(cursors.render(page, of, _rendered))

    @blueprint.get("/v1/endpoints/<endpoint_id>")
    @gate.scoped(Scope.READ)
    def get_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Read one endpoint."""
        wanted = path_id(endpoint_id)
        with api.engine.connect() as connection:
            found = wanted and endpoints.get(connection, workspace_id=caller.workspace.id, endpoint_id=wanted)
        if not found:
            raise unknown("endpoint")
        return json_response(_rendered(found))

    return blueprint


def _sealed(headers: dict[str, str], vault: Vault, endpoint_id: UUID) -> dict[str, str]:
    return {
        name: base64.b64encode(vault.seal(Secret(value), owner=endpoint_id)).decode() for name, value in headers.items()
    }


def _rendered(endpoint: Endpoint) -> dict[str, object]:
    return {
        "id": str(endpoint.id),
        "url": endpoint.url,
        "description": endpoint.description,
        "event_types": endpoint.event_types,
        "signing": endpoint.signing,
        "headers": dict.fromkeys(endpoint.header_names, MASKED),
        "max_in_flight": endpoint.max_in_flight,
        "timeout_ms": endpoint.timeout_ms,
        "retry": backoff.to_json(backoff.parse_retry(endpoint.retry)),
        "metadata": endpoint.metadata,
        "enabled": endpoint.enabled,
        "disabled_at": optional_time(endpoint.disabled_at),
        "disabled_reason": endpoint.disabled_reason,
        "created_at": time_text(endpoint.created_at),
        "updated_at": time_text(endpoint.updated_at),
    }
