"""Jobs: a body for any URL, without an endpoint; taken, read, called off and sent again."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response, request

from relay import failpoints
from relay.core import jsontext
from relay.core.errors import InvalidInput
from relay.core.fingerprint import check_key, fingerprint
from relay.core.model import Scope, Signing, Status
from relay.core.secret import Secret
from relay.store import deliveries, delivery_changes, jobs
from relay.store.delivery_changes import By
from relay.store.idempotency import Claim, KeyReused
from relay.store.jobs import NewJob
from relay.web import bodies, models
from relay.web.auth import request_id
from relay.web.deliveries import rendered
from relay.web.delivery_changes import ReplayDelivery, changed
from relay.web.endpoint_life import optional_object, read_nothing
from relay.web.endpoint_models import MASKED
from relay.web.events import payload_limit
from relay.web.job_request import read_job
from relay.web.parts import new_id, path_id
from relay.web.problems import Problem, unknown
from relay.web.render import json_response, optional_time

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

    from relay.store.deliveries import Delivery
    from relay.store.events import Taken
    from relay.store.jobs import Job
    from relay.store.vault import Vault
    from relay.web import answers
    from relay.web.admission import Admission
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api

#: What a job's fingerprint begins with: under one key a job is never an event.
_ROUTE: Final = "job"


def routes(api: Api, gate: Gate, admission: Admission) -> Blueprint:
    """Make the routes of jobs."""
    blueprint = Blueprint("jobs", __name__)
    settings = api.settings

    @blueprint.post("/enqueue")
    @gate.scoped(Scope.INGEST)
    def enqueue(caller: Caller) -> Response:
        """Take a job; 202 once it is committed.

        The body is the payload, whatever it is, also an empty one. Relay-Url says where it goes, Relay-Header-<name>
        with which headers; Relay-Sign, Relay-Max-Attempts, Relay-Timeout-Ms, Relay-Delay and Relay-Expires-In how. An
        Idempotency-Key is for the whole of it: with another destination, header or option it is 409.
        """
        environ = request.environ
        key: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
        if key is not None:
            check_key(key)
        asked = read_job(
            environ,
            url_policy=api.url_policy,
            address_policy=api.address_policy,
            longest_timeout_ms=settings.longest_timeout_ms,
        )
        workspace_id = caller.workspace.id
        body = bodies.read(payload_limit(api, caller))
        is_json = _is_json(asked.content_type, body)
        _require_whole(body, is_json=is_json)
        admission.charge(caller.workspace, 1)
        claim = None
        if key is not None:
            claim = Claim(key=key, fingerprint=fingerprint((_ROUTE, *asked.parts()), body, is_json=is_json))
        job_id = new_id()
        headers, headers_sealed = _sealed(api.vault, asked.headers, job_id)
        job = NewJob(
            id=job_id,
            event_id=new_id(),
            workspace_id=workspace_id,
            url=asked.url.text,
            origin=asked.url.origin,
            headers=headers,
            headers_sealed=headers_sealed,
            signing=asked.signing.value,
            max_attempts=asked.max_attempts,
            timeout_ms=asked.timeout_ms,
            content_type=asked.content_type,
            payload=body,
            api_key_id=caller.key_id,
            request_id=request_id(),
            delay=asked.delay,
            expires_in=asked.expires_in,
            claim=claim,
        )
        failpoints.hit("ingest.before_commit")
        taken = _stored(api, job)
        failpoints.hit("ingest.after_commit")
        response = Response(taken.answer, 202, content_type="application/json")
        if taken.replayed:
            response.headers["Relay-Idempotent-Replay"] = "true"
        return response

    @blueprint.get("/jobs/<job_id>")
    @gate.scoped(Scope.INGEST, Scope.READ)
    def get_job(caller: Caller, job_id: str) -> Response:
        """Read a job with its attempts, the oldest first."""
        with api.engine.connect() as connection:
            return json_response(_rendered(*_found(connection, caller, job_id)))

    @blueprint.delete("/jobs/<job_id>")
    @gate.scoped(Scope.INGEST)
    def cancel_job(caller: Caller, job_id: str) -> Response:
        """Call a waiting job off; 200 with it, also where it was before. 409 where it is in flight or finished."""
        read_nothing()
        with api.engine.begin() as connection:
            delivery, _ = _found(connection, caller, job_id)
            outcome = delivery_changes.cancel(connection, _by(caller, delivery))
            changed(outcome, noun="job", finished="nothing can be called off any more")
            after = _found(connection, caller, job_id)
        return json_response(_rendered(*after))

    @blueprint.post("/jobs/<job_id>/replay")
    @gate.scoped(Scope.WRITE)
    def replay_job(caller: Caller, job_id: str) -> Response:
        """Send a dead or canceled job again, with a fresh budget; 202 with it. `force` takes a delivered one, too."""
        asked = models.parse(ReplayDelivery, optional_object())
        with api.engine.begin() as connection:
            delivery, _ = _found(connection, caller, job_id)
            by = _by(caller, delivery)
            outcome = delivery_changes.replay(connection, by, max_replays=settings.max_replays, force=asked.force)
            changed(outcome, noun="job")
            after = _found(connection, caller, job_id)
        return json_response(_rendered(*after), 202)

    return blueprint


def _stored(api: Api, job: NewJob) -> Taken:
    """Store a job; the Problem of a 409 where there is no secret to sign it with, or its key is another request's."""
    with api.hot.connect() as connection:
        if job.signing != Signing.NONE and not jobs.has_secret(connection, workspace_id=job.workspace_id):
            raise Problem(
                409,
                "no_job_secret",
                "The workspace has no secret to sign jobs with: POST to /v1/job-secret/rotate makes it.",
            )
        try:
            return jobs.enqueue(connection, job, retention_secs=api.settings.idempotency_retention_secs)
        except KeyReused:
            raise Problem(
                409,
                "idempotency_key_reused",
                "The Idempotency-Key was used for another request, by its URL, headers, options or body: send a new key.",
            ) from None


def _is_json(content_type: str, body: bytes) -> bool:
    """Whether a body is called JSON and is it: nothing is refused for not being it, a job's body is anything."""
    if not jsontext.is_json(content_type):
        return False
    try:
        jsontext.scan_event(body, read_type=False)
    except InvalidInput:
        return False
    return True


def _require_whole(body: bytes, *, is_json: bool) -> None:
    """Raise the Problem of a 411 for a body whose end may be that of a broken connection."""
    if bodies.is_measured(request.environ) or "HTTP_TRANSFER_ENCODING" not in request.environ:
        return
    if not (is_json and bodies.shows_its_end(body)):
        raise Problem(
            411,
            "length_required",
            "A chunked body that breaks off cannot be told from a whole one, but for JSON: send a Content-Length.",
        )


def _sealed(vault: Vault, headers: tuple[tuple[str, str], ...], job_id: UUID) -> tuple[list[tuple[str, str]], bool]:
    """Return headers as they are stored, and whether their values are sealed: a process without a key takes jobs too."""
    if not vault.key_ids:
        return list(headers), False
    return [(name, base64.b64encode(vault.seal(Secret(value), owner=job_id)).decode()) for name, value in headers], True


def _found(connection: sa.Connection, caller: Caller, job_id: str) -> tuple[Delivery, Job]:
    """Read a job; 404 where the workspace has no such one, or it is a delivery of another kind."""
    wanted = path_id(job_id)
    if wanted is None:
        raise unknown("job")
    job = jobs.get(connection, workspace_id=caller.workspace.id, job_id=wanted)
    delivery = deliveries.get(connection, workspace_id=caller.workspace.id, delivery_id=wanted)
    if job is None or delivery is None:
        raise unknown("job")
    return delivery, job


def _by(caller: Caller, delivery: Delivery) -> By:
    return By(workspace_id=caller.workspace.id, delivery_id=delivery.id, actor=caller.actor, request_id=request_id())


def _rendered(delivery: Delivery, job: Job) -> answers.Job:
    """Return a job as the API shows it: its delivery, with a state in the status's place, and what it was asked as."""
    shown = rendered(delivery)
    return {
        "id": shown["id"],
        "state": _state(delivery, job),
        "url": job.url,
        "headers": [[name, MASKED] for name in job.header_names],
        "content_type": job.content_type or None,
        "signing": job.signing,
        "max_attempts": job.max_attempts,
        "timeout_ms": job.timeout_ms,
        "expires_at": optional_time(job.expires_at),
        "event_id": shown["event_id"],
        "endpoint_id": shown["endpoint_id"],
        "event_type": shown["event_type"],
        "reason": shown["reason"],
        "attempt_count": shown["attempt_count"],
        "generation": shown["generation"],
        "due_at": shown["due_at"],
        "created_at": shown["created_at"],
        "finished_at": shown["finished_at"],
        "deferred": shown["deferred"],
        "last_attempt": shown["last_attempt"],
        "attempts": shown["attempts"],
    }


def _state(delivery: Delivery, job: Job) -> str:
    match delivery.status:
        case Status.PENDING:
            return "retrying" if job.is_tried else "queued"
        case Status.IN_FLIGHT:
            return "delivering"
        case _:
            return delivery.status.label
