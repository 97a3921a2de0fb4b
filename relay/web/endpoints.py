"""Endpoints: making them, with their secrets sealed, reading them, without, and changing them."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from flask import Blueprint, Response

from relay.bootstrap.policies import make_platform_urls
from relay.core import backoff
from relay.core.errors import InvalidInput
from relay.core.model import Scope, Signing
from relay.core.secret import RANDOM_BYTES, Secret, new_secret
from relay.core.signing import public_key_of
from relay.store import endpoint_changes, endpoints
from relay.store.endpoint_changes import By
from relay.store.endpoints import ORIGIN, Endpoint
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.endpoint_models import MASKED, ClientCertificate, EndpointPatch, EndpointRequest
from relay.web.parts import new_id, path_id
from relay.web.problems import RETRY_AFTER_SECS, FieldError, Problem, invalid, unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import sqlalchemy as sa

    from relay.store.endpoints import Fields
    from relay.store.vault import Vault
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

#: What can be changed of an endpoint that jobs imply: the rest follows from their origin.
_ORIGIN_FIELDS = frozenset({"rate_per_second", "burst", "max_in_flight"})


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes of endpoints, but for those of their life (see `endpoint_life`)."""
    blueprint = Blueprint("endpoints", __name__)
    limits = models.Limits(
        url_policy=api.url_policy,
        address_policy=api.address_policy,
        longest_timeout_ms=api.settings.longest_timeout_ms,
        platform_urls=make_platform_urls(api.settings),
    )

    @blueprint.post("/v1/endpoints")
    @gate.scoped(Scope.WRITE)
    def create_endpoint(caller: Caller) -> Response:
        """Make an endpoint; 201 with its secret, which is shown this once. 503 where this process can seal none."""
        asked = models.parse(EndpointRequest, bodies.read_object(), limits).filled()
        endpoint_id = new_id()
        own_secret = asked.pop("secret")
        signing = Signing(asked["signing"])
        key = new_secret(os.urandom(RANDOM_BYTES), signing) if own_secret is None else Secret(own_secret)
        fields = _columns(asked, api.vault, endpoint_id)
        fields["secret"] = sealed(api.vault, key, endpoint_id)
        fields["public_key"] = public_key_of(key) if signing is Signing.STANDARD_ED25519 else None
        with api.engine.begin() as connection:
            made = endpoints.create(
                connection,
                fields,
                endpoint_id=endpoint_id,
                workspace_id=caller.workspace.id,
                default_limit=api.settings.workspace_max_endpoints,
                actor=caller.actor,
                request_id=request_id(),
            )
        if made is None:
            # A limit of the workspace's own is the workspace's; the other is the installation's setting.
            own = caller.workspace.max_endpoints is not None
            remedy = "use another workspace" + ("" if own else ", or have RELAY_WORKSPACE_MAX_ENDPOINTS raised")
            raise Problem(409, "endpoint_limit", f"The workspace has as many endpoints as it may: {remedy}.")
        shown: answers.NewEndpoint = {**rendered(made), "secret": key.reveal()}
        response = json_response(shown, 201)
        response.headers["Location"] = f"/v1/endpoints/{endpoint_id}"
        return response

    @blueprint.get("/v1/endpoints")
    @gate.scoped(Scope.READ)
    def list_endpoints(caller: Caller) -> Response:
        """List the workspace's endpoints, those that jobs imply too, the newest first."""
        of = f"endpoints:{caller.workspace.id}"
        after, limit = cursors.read(of)
        with api.engine.connect() as connection:
            page = endpoints.list_page(connection, workspace_id=caller.workspace.id, after=after, limit=limit)
        return json_response(cursors.render(page, of, rendered))

    @blueprint.get("/v1/endpoints/<endpoint_id>")
    @gate.scoped(Scope.READ)
    def get_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Read one endpoint."""
        with api.engine.connect() as connection:
            return json_response(rendered(found(connection, by(caller, endpoint_id))))

    @blueprint.patch("/v1/endpoints/<endpoint_id>")
    @gate.scoped(Scope.WRITE)
    def change_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Change the fields that are given; 200 with the endpoint. Null sets a field to its default."""
        acting = by(caller, endpoint_id)
        with api.engine.connect() as connection:
            stored = found(connection, acting)
        body = bodies.read_object()
        if "secret" in body:
            message = "A secret is not changed here: POST to the endpoint's rotate-secret."
            raise invalid([FieldError(field="secret", message=message, code="not_here")])
        asked = models.parse(EndpointPatch, body, replace(limits, transport=stored.transport))
        given = asked.given(transport=stored.transport)
        _check_change(stored, given)
        fields = _columns(given, api.vault, acting.endpoint_id)
        with api.engine.begin() as connection:
            before = locked(connection, acting)
            endpoint_changes.change(connection, acting, before, fields)
            after = found(connection, acting)
        return json_response(rendered(after))

    return blueprint


def by(caller: Caller, endpoint_id: str) -> By:
    """Return who acts on the endpoint of a path; 404 for what is no id."""
    wanted = path_id(endpoint_id)
    if wanted is None:
        raise unknown("endpoint")
    return By(workspace_id=caller.workspace.id, endpoint_id=wanted, actor=caller.actor, request_id=request_id())


def found(connection: sa.Connection, acting: By) -> Endpoint:
    """Read the endpoint; 404 where the workspace has no such one."""
    endpoint = endpoints.get(connection, workspace_id=acting.workspace_id, endpoint_id=acting.endpoint_id)
    if endpoint is None:
        raise unknown("endpoint")
    return endpoint


def locked(connection: sa.Connection, acting: By) -> Endpoint:
    """Lock the endpoint until the transaction ends; 404 where the workspace has no such one."""
    endpoint = endpoint_changes.lock(connection, acting)
    if endpoint is None:
        raise unknown("endpoint")
    return endpoint


def sealed(vault: Vault, secret: Secret, endpoint_id: UUID) -> bytes:
    """Seal a secret for its endpoint; a 503 that names the setting where this process has no master key."""
    if not vault.key_ids:
        raise Problem(
            503,
            "no_master_keys",
            "This API process has no RELAY_MASTER_KEYS, so it can make or change no secret: have them set.",
            headers={"Retry-After": str(RETRY_AFTER_SECS)},
        )
    return vault.seal(secret, owner=endpoint_id)


def rendered(endpoint: Endpoint) -> answers.Endpoint:
    """Return an endpoint as the API shows it: secrets masked, its breaker and what it answered lately beside."""
    activity = endpoint.activity
    return {
        "id": str(endpoint.id),
        "kind": "origin" if endpoint.kind == ORIGIN else "endpoint",
        "transport": endpoint.transport,
        "url": endpoint.url,
        "description": endpoint.description,
        "event_types": endpoint.event_types,
        "signing": endpoint.signing,
        "headers": dict.fromkeys(endpoint.header_names, MASKED),
        "client_certificate": None
        if endpoint.certificate is None
        else {"certificate": endpoint.certificate, "private_key": MASKED},
        "rate_per_second": endpoint.rate_per_second,
        "burst": endpoint.burst,
        "max_in_flight": endpoint.max_in_flight,
        "timeout_ms": endpoint.timeout_ms,
        "retry": cast("answers.Retry", backoff.to_json(backoff.parse_retry(endpoint.retry))),
        "metadata": endpoint.metadata,
        "enabled": endpoint.enabled,
        "disabled_at": optional_time(endpoint.disabled_at),
        "disabled_reason": endpoint.disabled_reason,
        "previous_secret_expires_at": optional_time(endpoint.previous_secret_expires_at),
        "breaker": {
            "state": endpoint.breaker_state.name.lower(),
            "failures": endpoint.breaker_failures,
            "trips": endpoint.breaker_trips,
            "open_until": optional_time(endpoint.breaker_open_until),
        },
        "held_until": optional_time(endpoint.held_until),
        "last_success_at": optional_time(activity.last_success_at if activity else None),
        "last_failure_at": optional_time(activity.last_failure_at if activity else None),
        "last_day": {
            "success": activity.successes if activity else 0,
            "retryable_failure": activity.retryable_failures if activity else 0,
            "permanent_failure": activity.permanent_failures if activity else 0,
            "deferred": activity.deferrals if activity else 0,
        },
        "created_at": time_text(endpoint.created_at),
        "updated_at": time_text(endpoint.updated_at),
    }


def _check_change(stored: Endpoint, asked: Mapping[str, Any]) -> None:
    """Refuse what cannot become of this endpoint. Looks only at what nothing changes."""
    if stored.kind == ORIGIN and (others := sorted(set(asked) - _ORIGIN_FIELDS)):
        message = f"Of an endpoint that jobs imply only {', '.join(sorted(_ORIGIN_FIELDS))} can be changed."
        raise invalid([FieldError(field=name, message=message, code="not_of_an_origin") for name in others])
    signing = asked.get("signing", stored.signing)
    if signing != Signing.NONE and (signing == Signing.STANDARD_ED25519) != (stored.public_key is not None):
        raise InvalidInput(
            "The endpoint's secret is of another kind than this scheme signs with: make another endpoint.",
            field="signing",
            code="other_secret",
        )


def _columns(asked: Mapping[str, Any], vault: Vault, endpoint_id: UUID) -> Fields:
    """Return checked fields as they are stored, secrets sealed."""
    fields: dict[str, Any] = dict(asked)
    if "event_types" in fields:
        fields["event_types"] = list(dict.fromkeys(fields["event_types"]))
    if "headers" in fields:
        fields["headers"] = {
            name: base64.b64encode(sealed(vault, Secret(value), endpoint_id)).decode()
            for name, value in fields["headers"].items()
        }
    if "client_certificate" in fields:
        given: ClientCertificate | None = fields.pop("client_certificate")
        fields["certificate"] = given and given.certificate
        fields["certificate_key"] = given and sealed(vault, Secret(given.private_key), endpoint_id)
    return cast("Fields", fields)
