"""Which requests are sent again by themselves, and when: urllib3's Retry, told what is safe here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from urllib3.exceptions import ConnectTimeoutError, InvalidHeader, MaxRetryError, ResponseError
from urllib3.util.retry import Retry

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse

#: Answers after which a request that may be repeated is repeated. The first three a proxy's, too.
_STATUSES: Final = frozenset({502, 503, 504, 429})
#: Seconds: the waits after the second failure and on double from twice the first; each is lengthened by up to the second.
_BACKOFF_SECS: Final = 0.1
_JITTER_SECS: Final = 0.1
_LONGEST_BACKOFF_SECS: Final = 5.0
#: The longest Retry-After that is waited for here. A longer one is the caller's to plan with: `ApiError.retry_after`.
LONGEST_RETRY_AFTER_SECS: Final = 30.0


class Careful(Retry):
    """Repeats what may be repeated.

    A request that never reached the API (no connection) always may. One that may have been carried out only where that
    does no harm: `repeatable` says so.
    """

    RETRY_AFTER_STATUS_CODES = frozenset({429, 503})

    @classmethod
    def times(cls, count: int, *, repeatable: bool) -> Careful:
        """Make one that sends again `count` times at most."""
        return cls(
            total=count,
            redirect=0,
            # None is every method; none at all cannot be said otherwise than by one that nobody uses.
            allowed_methods=None if repeatable else {"NONE"},
            status_forcelist=_STATUSES,
            backoff_factor=_BACKOFF_SECS,
            backoff_jitter=_JITTER_SECS,
            backoff_max=_LONGEST_BACKOFF_SECS,
            # The last answer is handed on and read for what it says.
            raise_on_status=False,
        )

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: BaseHTTPResponse | None = None,
        error: Exception | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Careful:
        """Count one failure; raises where it was the last."""
        repeatable = self.allowed_methods is None
        if error is not None and not repeatable and not isinstance(error, ConnectTimeoutError):
            # urllib3 would repeat after what it has no name for, a broken TLS connection among it.
            raise error
        if response is not None and (self.get_retry_after(response) or 0.0) > LONGEST_RETRY_AFTER_SECS:
            raise MaxRetryError(kwargs.get("_pool"), url, ResponseError("the wait is too long"))  # type: ignore[arg-type]  # as urllib3 itself has it
        return super().increment(method, url, response, error, *args, **kwargs)

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        """Read Retry-After, in seconds; None where there is none, or nothing that can be read."""
        try:
            return super().get_retry_after(response)
        except InvalidHeader:
            return None
