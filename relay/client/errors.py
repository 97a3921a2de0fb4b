"""What can go wrong between a program and Relay, each by what the program must do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relay.core.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One field that the API found at fault, by its path, such as `event_types[2]`, `body` or a header's name."""

    field: str
    message: str
    code: str


class ApiError(RelayError):
    """The API refused the request. `code` is a stable word for programs; `detail` says what to do.

    Caught as itself it stands for every refusal; the classes below tell them apart by status. `errors` names the fields
    at fault, `retry_after` (seconds, None where it was not said) when to ask again, `request_id` what Relay's log has
    the request under; `members` holds what else the answer told, such as `replay_id`. `idempotency_key` is the one
    the request had. `was_repeated`: it was sent more than once by itself, and an earlier try may have been carried out.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
        members: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        was_repeated: bool = False,
    ) -> None:
        # The detail tells the first of the fields already.
        told = "; ".join(f"{one.field}: {one.message}" for one in errors) if len(errors) > 1 else detail
        super().__init__(f"{status} {told}")
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.request_id = request_id
        self.retry_after = retry_after
        self.members = dict(members or {})
        self.idempotency_key = idempotency_key
        self.was_repeated = was_repeated


class InvalidRequest(ApiError):
    """400, 411, 413, 415, 422 and other 4xx: correct the request; it will be refused again as it is."""


class Unauthorized(ApiError):
    """401: there is no API key, or it is not valid any more."""


class Forbidden(ApiError):
    """403: the key may not do this; `members` has the scope that it lacks."""


class NotFound(ApiError):
    """404: the workspace has no such thing."""


class Conflict(ApiError):
    """409: what is there does not allow it; `code` says why."""


class TooManyRequests(ApiError):
    """429: the workspace sends more than it may; ask again after `retry_after` seconds."""


class ServerFault(ApiError):
    """5xx: the fault is on Relay's side; ask again later, with the same idempotency key where it had one."""


class _Unsure(RelayError):
    """No answer that can be relied on: the key says what to send the request again under."""

    def __init__(
        self, message: str | None = None, *, request_id: str | None = None, idempotency_key: str | None = None
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.idempotency_key = idempotency_key

    def __str__(self) -> str:
        """Say the key, too: where the client made it, nobody else knows it."""
        said = super().__str__()
        return said if self.idempotency_key is None else f"{said} (idempotency key: {self.idempotency_key})"


class Unreachable(_Unsure):
    """No answer came, or not all of one. Whether the request was carried out is not known, unless nothing could be
    connected to.

    Send it again with the same `idempotency_key` where the request had one: then it counts once.
    """


class UnexpectedAnswer(_Unsure):
    """What answered is not Relay's API, or of a release that this client does not know: check the URL.

    `idempotency_key` is the one that the request had.
    """


class WaitedTooLong(RelayError):
    """What was waited for did not come in time. It goes on by itself."""


class NotVerified(RelayError):
    """A request's signature does not prove that it came from Relay: answer 401, and do nothing with it.

    `code` is a stable word: `missing_signature`, `duplicate_header`, `bad_timestamp`, `stale` or `bad_signature`.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


_BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: TooManyRequests,
}


def class_of(status: int) -> type[ApiError]:
    """Return the class of a refusal with this status."""
    return _BY_STATUS.get(status, ServerFault if status >= 500 else InvalidRequest)
