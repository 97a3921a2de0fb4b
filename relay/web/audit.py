"""The audit log: of a workspace, or of the instance, whose records belong to no workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, request

from relay.core.filters import parse_time_range
from relay.core.model import Scope
from relay.store import audit
from relay.web.render import json_response, time_text

if TYPE_CHECKING:
    from relay.store.audit import Record
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

_FILTERS: Final = ("since", "until")


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the route of the audit log."""
    blueprint = Blueprint("audit", __name__)

    @blueprint.get("/v1/audit")
    @gate.scoped_or_instance(Scope.ADMIN)
    def list_audit(caller: Caller | None) -> Response:
        """List what was changed in the workspace, and by whom, the newest first.

        To the instance's key without `Relay-Workspace`: what was changed outside of workspaces, which is that they were
        made, and their limits.
        """
        made = parse_time_range(request.args)
        owner = None if caller is None else caller.workspace.id
        of = f"audit:{owner}:{made.since}..{made.until}"
        after, limit = cursors.read(of, filters=_FILTERS)
        with api.engine.connect() as connection:
            page = audit.list_page(connection, workspace_id=owner, made=made, after=after, limit=limit)
        return json_response(cursors.render(page, of, _rendered))

    return blueprint


def _rendered(record: Record) -> answers.AuditRecord:
    return {
        "id": str(record.id),
        "at": time_text(record.created_at),
        "actor": record.actor,
        "action": record.action,
        "target": record.target,
        "before": record.before,
        "after": record.after,
        "request_id": record.request_id,
    }
