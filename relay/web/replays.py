"""Sending many deliveries again by filter: a job that workers carry out, with its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from flask import Blueprint, Response, request

from relay.core.filters import parse_choice, parse_delivery_filter, parse_time_range
from relay.core.ids import parse_id
from relay.core.model import DeadReason, Scope, Status
from relay.store import delivery_lists, replays
from relay.web import models
from relay.web.auth import request_id
from relay.web.endpoint_life import optional_object, read_nothing
from relay.web.openapi.formats import EVENT_TYPE, GIVEN_TIME, choice, nullable
from relay.web.parts import new_id, path_id
from relay.web.problems import Problem, unknown
from relay.web.render import json_response, optional_time, time_text

if TYPE_CHECKING:
    from uuid import UUID

    from relay.core.filters import TimeRange
    from relay.store.replays import Replay
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.paging import Cursors
    from relay.web.parts import Api

#: What a replay by filter can ask for; dead ones where it does not say.
_STATUSES: Final = (Status.DEAD, Status.CANCELED, Status.DELIVERED)
#: What their list can be filtered by.
_FILTERS: Final = ("endpoint_id", "state", "since", "until")


class ReplayEndpoint(models.Request):
    """POST /v1/endpoints/{id}/replay. What the texts must be is the filter's to say."""

    status: Annotated[str | None, nullable(choice(one.label for one in _STATUSES))] = None
    event_type: Annotated[str | None, nullable(EVENT_TYPE)] = None
    reason: Annotated[str | None, nullable(choice(DeadReason))] = None
    since: Annotated[str | None, nullable(GIVEN_TIME)] = None
    until: Annotated[str | None, nullable(GIVEN_TIME)] = None
    #: Of no effect: `status` says it, where delivered ones are meant.
    force: bool = False


def routes(api: Api, gate: Gate, cursors: Cursors) -> Blueprint:
    """Make the routes of replays by filter."""
    blueprint = Blueprint("replays", __name__)

    @blueprint.post("/v1/endpoints/<endpoint_id>/replay")
    @gate.scoped(Scope.WRITE)
    def replay_endpoint(caller: Caller, endpoint_id: str) -> Response:
        """Send an endpoint's deliveries again by filter, as a job; 202 with it. One at a time an endpoint."""
        asked = models.parse(ReplayEndpoint, optional_object())
        wanted = parse_delivery_filter(asked.model_dump(), statuses=_STATUSES, default=Status.DEAD)
        known = path_id(endpoint_id)
        if known is None:
            raise unknown("endpoint")
        by = replays.By(workspace_id=caller.workspace.id, actor=caller.actor, request_id=request_id())
        try:
            with api.engine.begin() as connection:
                made = replays.create(connection, by, replay_id=new_id(), endpoint_id=known, wanted=wanted)
        except replays.EndpointDeleted:
            raise Problem(409, "endpoint_deleted", "The endpoint is deleted: nothing can be sent to it.") from None
        except replays.Unfinished as other:
            raise Problem(
                409,
                "replay_unfinished",
                "A replay of this endpoint is under way: wait until it is done, or cancel it.",
                members={"replay_id": str(other.replay_id)},
            ) from None
        if made is None:
            raise unknown("endpoint")
        response = json_response(_rendered(made), 202)
        response.headers["Location"] = f"/v1/replays/{made.id}"
        return response

    @blueprint.get("/v1/replays")
    @gate.scoped(Scope.READ)
    def list_replays(caller: Caller) -> Response:
        """List the workspace's replays, or one endpoint's, the newest first."""
        endpoint_id, state, made = _asked_list()
        workspace_id = caller.workspace.id
        of = f"replays:{workspace_id}:{endpoint_id}:{state}:{made.since}..{made.until}"
        after, limit = cursors.read(of, filters=_FILTERS)
        with api.engine.connect() as connection:
            if endpoint_id is not None and not delivery_lists.has_endpoint(
                connection, workspace_id=workspace_id, endpoint_id=endpoint_id
            ):
                raise unknown("endpoint")
            page = replays.list_page(
                connection,
                workspace_id=workspace_id,
                endpoint_id=endpoint_id,
                state=state,
                made=made,
                after=after,
                limit=limit,
            )
        return json_response(cursors.render(page, of, _rendered))

    @blueprint.get("/v1/replays/<replay_id>")
    @gate.scoped(Scope.READ)
    def get_replay(caller: Caller, replay_id: str) -> Response:
        """Read how far a replay is."""
        wanted = path_id(replay_id)
        with api.engine.connect() as connection:
            found = wanted and replays.get(connection, workspace_id=caller.workspace.id, replay_id=wanted)
        if not found:
            raise unknown("replay")
        return json_response(_rendered(found))

    @blueprint.post("/v1/replays/<replay_id>/cancel")
    @gate.scoped(Scope.WRITE)
    def cancel_replay(caller: Caller, replay_id: str) -> Response:
        """Stop a replay; 200 with it, also where it was canceled before. What it has sent again stays so."""
        read_nothing()
        wanted = path_id(replay_id)
        by = replays.By(workspace_id=caller.workspace.id, actor=caller.actor, request_id=request_id())
        with api.engine.begin() as connection:
            after = wanted and replays.cancel(connection, by, replay_id=wanted)
        if not after:
            raise unknown("replay")
        if after.state != replays.CANCELED:
            raise Problem(409, "replay_finished", f"The replay is {after.state} already: there is nothing to stop.")
        return json_response(_rendered(after))

    return blueprint


def _asked_list() -> tuple[UUID | None, str | None, TimeRange]:
    """Read the list's filters from the query: endpoint, state, and when it was made."""
    named, state = request.args.get("endpoint_id"), request.args.get("state")
    return (
        None if named is None else parse_id(named, "endpoint_id"),
        None if state is None else parse_choice(state, "state", replays.STATES),
        parse_time_range(request.args),
    )


def _rendered(replay: Replay) -> answers.Replay:
    wanted = replay.wanted
    return {
        "id": str(replay.id),
        "endpoint_id": str(replay.endpoint_id),
        "state": replay.state,
        "status": None if wanted.status is None else wanted.status.label,
        "event_type": wanted.event_type,
        "reason": wanted.reason,
        "since": optional_time(wanted.made.since),
        "until": optional_time(wanted.made.until),
        "matched": replay.matched,
        "replayed": replay.replayed,
        "skipped": replay.skipped,
        "created_at": time_text(replay.created_at),
        "finished_at": optional_time(replay.finished_at),
    }
