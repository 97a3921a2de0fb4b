"""Every error as one shape: RFC 9457 problem details, with a stable `code` and what to do about it.

`type` is always about:blank, so `title` is the status's phrase and `code` tells problems apart. `errors` names each
field at fault. What an answer says is written here or by whoever raised it for the caller: no exception's own text,
and never a traceback, gets out.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa
from flask import Response, g, request
from werkzeug.exceptions import HTTPException

from relay.core.errors import InvalidInput, InvalidJson, RelayError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flask import Flask

MEDIA_TYPE: Final = "application/problem+json"
#: Seconds after which a caller should try again what failed because a part of ours is away.
RETRY_AFTER_SECS = 5

_log = logging.getLogger(__name__)

#: For what Flask and Werkzeug refuse by themselves: status to code and remedy.
_USUAL: dict[int, tuple[str, str]] = {
    400: ("bad_request", "The request cannot be read as HTTP has it: mend how it is sent."),
    404: ("not_found", "There is nothing at this address: check the path."),
    405: ("method_not_allowed", "This address does not take the method: use one that the Allow header names."),
    408: ("request_timeout", "The request did not come in time: send it again."),
    413: ("payload_too_large", "The body is larger than allowed: send less."),
    414: ("uri_too_long", "The address is too long: shorten it."),
    415: ("unsupported_media_type", "The body is of a kind that is not taken here: send JSON."),
    431: ("headers_too_large", "The headers are larger than allowed: send less."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One field at fault, by its path, such as `event_types[2]`."""

    field: str
    message: str
    code: str


class Problem(RelayError):
    """The request is refused: the answer's `code` and `detail` say why, and what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        #: Further members of the object (RFC 9457 section 3.2).
        self.members = dict(members or {})


def invalid(errors: Sequence[FieldError]) -> Problem:
    """Make the problem of a request with these fields at fault; there is at least one."""
    more = f" ({len(errors) - 1} more in errors)" if len(errors) > 1 else ""
    return Problem(400, "invalid_request", f"{errors[0].field}: {errors[0].message}{more}", errors=errors)


def unknown(noun: str) -> Problem:
    """Make the problem of an id that the caller's workspace does not have, whether or not another one has it."""
    return Problem(404, f"unknown_{noun}", f"There is no such {noun} in this workspace: check the id.")


def install(app: Flask) -> None:
    """Have every error of the app answered as a problem."""
    app.register_error_handler(Exception, _answer)


def usual(status: int) -> Problem:
    """Make the problem that a server's own refusal with this status is."""
    code, detail = _USUAL[status]
    return Problem(status, code, detail)


def passing(code: str, detail: str) -> Problem:
    """Make the problem of what would go well a little later."""
    return Problem(503, code, detail, headers={"Retry-After": str(RETRY_AFTER_SECS)})


def respond(problem: Problem) -> Response:
    """Render a problem."""
    response = Response(text_of(problem), problem.status, content_type=MEDIA_TYPE)
    response.headers.extend(problem.headers)
    return response


def text_of(problem: Problem) -> str:
    """Return a problem's JSON, with a line's end."""
    value: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "code": problem.code,
        "detail": problem.detail,
        **problem.members,
    }
    if problem.errors:
        value["errors"] = [
            {"field": error.field, "message": error.message, "code": error.code} for error in problem.errors
        ]
    return json.dumps(value) + "\n"


def _answer(error: Exception) -> Response:
    return respond(problem_of(error, request_id=g.get("request_id"), method=request.method, path=request.path))


def problem_of(error: BaseException, *, request_id: str | None, method: str, path: str) -> Problem:
    """Return the problem that an error is to whoever asked, and log what is no fault of theirs."""
    match error:
        case Problem():
            return error
        case InvalidJson():
            place = {"position": error.position, "line": error.line, "column": error.column}
            fault = FieldError(field="body", message=str(error), code=error.code)
            return Problem(400, "invalid_json", str(error), errors=[fault], members=place)
        case InvalidInput():
            return invalid([FieldError(field=error.field or "body", message=str(error), code=error.code)])
        case HTTPException():
            found = _of_http(error)
            return _fault(error, request_id, method, path) if found is None else found
        case Unavailable():
            return passing("unavailable", str(error))
        case sa.exc.TimeoutError():
            return _database_away(error, "no connection was free in time", request_id)
        case sa.exc.DBAPIError() | psycopg.Error() if _is_passing(error):
            return _database_away(error, "it does not answer or takes no writes", request_id)
        case _:
            return _fault(error, request_id, method, path)


def _of_http(error: HTTPException) -> Problem | None:
    """None for a server's own fault."""
    status = error.code or 500
    if status >= 500:
        return None
    code, detail = _USUAL.get(status, ("bad_request", "The request is not one that can be answered: correct it."))
    kept = {name: value for name, value in error.get_headers() if name.lower() in {"allow", "retry-after"}}
    return Problem(status, code, detail, headers=kept)


def _is_passing(error: sa.exc.DBAPIError | psycopg.Error) -> bool:
    """Whether the fault is the database's state just now, not the statement: gone, locked, full, or read-only."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction))


def _database_away(error: Exception, what: str, request_id: str | None) -> Problem:
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    _log.warning(
        "a request failed for want of the database",
        # The text too: only it tells a database that is down from one that has no connection left.
        extra={
            "request_id": request_id,
            "error": f"{type(cause).__name__}: {str(cause).strip()[:200]}",
            "sqlstate": _sqlstate(cause),
        },
    )
    return passing("database_unavailable", f"The database cannot serve this just now ({what}): try again.")


def _sqlstate(cause: object) -> str | None:
    return cause.sqlstate if isinstance(cause, psycopg.Error) else None


def _fault(error: BaseException, request_id: str | None, method: str, path: str) -> Problem:
    _log.error(
        "a request failed",
        exc_info=error,
        extra={"request_id": request_id, "method": method, "path": path},
    )
    return Problem(
        500,
        "internal_error",
        f"Relay failed at this, through no fault of the request: its log says why, under request id {request_id}.",
    )
