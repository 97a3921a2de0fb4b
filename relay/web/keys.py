"""API keys of a workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Blueprint, Response

from relay.core.model import Scope
from relay.store import keys
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.parts import new_id, path_id
from relay.web.problems import unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from relay.store.keys import Key
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes of keys."""
    blueprint = Blueprint("keys", __name__)

    @blueprint.post("/v1/keys")
    @gate.scoped(Scope.ADMIN)
    def create_key(caller: Caller) -> Response:
        """Make a key; 201 with its text, which is shown this once."""
        asked = models.parse(models.KeyRequest, bodies.read_object())
        with api.engine.begin() as connection:
            made, text = keys.create(
                connection,
                key_id=new_id(),
                workspace_id=caller.workspace.id,
                name=asked.name,
                scopes=frozenset(Scope(name) for name in asked.scopes),
                actor=caller.actor,
                request_id=request_id(),
            )
        shown: answers.NewKey = {**_rendered(made), "key": text.reveal()}
        return json_response(shown, 201)

    @blueprint.get("/v1/keys")
    @gate.scoped(Scope.ADMIN)
    def list_keys(caller: Caller) -> Response:
        """List the workspace's keys, revoked ones included, the newest first."""
        of = f"keys:{caller.workspace.id}"
        after, limit = cursors.read(of)
        with api.engine.connect() as connection:
            page = keys.list_page(connection, workspace_id=caller.workspace.id, after=after, limit=limit)
        return json_response(cursors.render(page, of, _rendered))

    @blueprint.delete("/v1/keys/<key_id>")
    @gate.scoped(Scope.ADMIN)
    def revoke_key(caller: Caller, key_id: str) -> Response:
        """Revoke a key, the calling one included: 204, also where it was revoked before."""
        wanted = path_id(key_id)
        with api.engine.begin() as connection:
            known = wanted is not None and keys.revoke(
                connection,
                workspace_id=caller.workspace.id,
                key_id=wanted,
                actor=caller.actor,
                request_id=request_id(),
            )
        if not known:
            raise unknown("key")
        return Response(status=204)

    return blueprint


def _rendered(key: Key) -> answers.Key:
    return {
        "id": str(key.id),
        "workspace_id": str(key.workspace_id),
        "name": key.name,
        "prefix": f"rk_{key.lookup}",
        "scopes": [scope.value for scope in key.scopes],
        "created_at": time_text(key.created_at),
        "last_used_at": optional_time(key.last_used_at),
        "revoked_at": optional_time(key.revoked_at),
    }
