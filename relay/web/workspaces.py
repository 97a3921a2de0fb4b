"""Workspaces: made, listed and limited with the instance's key alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response

from relay.store import workspaces
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.parts import new_id, path_id
from relay.web.problems import Problem
from relay.web.render import json_response, time_text

if TYPE_CHECKING:
    from relay.store.workspaces import Workspace
    from relay.web import answers
    from relay.web.auth import Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

_LIST: Final = "workspaces"


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes of workspaces."""
    blueprint = Blueprint("workspaces", __name__)

    @blueprint.post("/v1/workspaces")
    @gate.instance_only
    def create_workspace() -> Response:
        """Make a workspace; 409 where its name is taken."""
        asked = models.parse(models.WorkspaceRequest, bodies.read_object())
        with api.engine.begin() as connection:
            made = workspaces.create(
                connection,
                workspace_id=new_id(),
                name=asked.name,
                max_endpoints=asked.max_endpoints,
                ingest_rate=asked.ingest_rate,
                max_payload_bytes=asked.max_payload_bytes,
                actor="instance",
                request_id=request_id(),
            )
        if made is None:
            raise Problem(409, "name_taken", "There is a workspace of this name already: choose another name.")
        return json_response(_rendered(made), 201)

    @blueprint.get("/v1/workspaces")
    @gate.instance_only
    def list_workspaces() -> Response:
        """List all workspaces, the newest first."""
        after, limit = cursors.read(_LIST)
        with api.engine.connect() as connection:
            page = workspaces.list_page(connection, after=after, limit=limit)
        return json_response(cursors.render(page, _LIST, _rendered))

    @blueprint.patch("/v1/workspaces/<workspace_id>")
    @gate.instance_only
    def change_workspace(workspace_id: str) -> Response:
        """Change some of a workspace's limits; null makes one the installation's again."""
        wanted = path_id(workspace_id)
        asked = models.parse(models.WorkspaceChange, bodies.read_object())
        with api.engine.begin() as connection:
            changed = wanted and workspaces.change(
                connection,
                workspace_id=wanted,
                limits=asked.model_dump(exclude_unset=True),
                actor="instance",
                request_id=request_id(),
            )
        if not changed:
            raise Problem(404, "unknown_workspace", "There is no such workspace: check the id.")
        return json_response(_rendered(changed))

    return blueprint


def _rendered(workspace: Workspace) -> answers.Workspace:
    return {
        "id": str(workspace.id),
        "name": workspace.name,
        "max_endpoints": workspace.max_endpoints,
        "ingest_rate": workspace.ingest_rate,
        "max_payload_bytes": workspace.max_payload_bytes,
        "created_at": time_text(workspace.created_at),
    }
