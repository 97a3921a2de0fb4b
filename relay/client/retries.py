"""Which requests are sent again by themselves, and when."""

from __future__ import annotations

import random
import re
from typing import Final

import requests
from urllib3.exceptions import ConnectTimeoutError, InvalidHeader
from urllib3.util.retry import Retry

#: Answers after which a request that may be repeated is repeated. The first three a proxy's, too.
_STATUSES: Final = frozenset({502, 503, 504, 429})
#: What becomes of a request that comes to no whole answer, and might with the next try.
_PASSING: Final = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
)
#: Seconds: the first wait, which doubles with every failure; each is lengthened by up to the second.
_BACKOFF_SECS: Final = 0.1
_JITTER_SECS: Final = 0.1
_LONGEST_BACKOFF_SECS: Final = 5.0
#: The longest Retry-After that is waited for here. A longer one is the caller's to plan with: `ApiError.retry_after`.
LONGEST_RETRY_AFTER_SECS: Final = 30.0


class Tries:
    """The tries of one request, which repeat what may be repeated.

    A request that never reached the API (no connection) always may. One that may have been carried out only where that
    does no harm: `repeatable` says so.
    """

    def __init__(self, count: int, *, repeatable: bool) -> None:
        """Allow sending again `count` times at most."""
        self._left = count
        self._repeatable = repeatable
        self._failed = 0
        #: Whether a try before the last one may have been carried out.
        self.may_be_done = False

    def after_error(self, error: requests.RequestException) -> float | None:
        """Count a try without a whole answer: the seconds to wait before the next, None where there is none."""
        never_arrived = isinstance(reason_of(error), ConnectTimeoutError)
        if not isinstance(error, _PASSING) or not (self._repeatable or never_arrived):
            return None
        return self._next(None, may_be_done=not never_arrived)

    def after_answer(self, status: int, retry_after: float | None) -> float | None:
        """Count a try with an answer, the same way: None where the answer stands. `retry_after` is seconds."""
        if not self._repeatable or status not in _STATUSES or (retry_after or 0.0) > LONGEST_RETRY_AFTER_SECS:
            return None
        return self._next(retry_after, may_be_done=True)

    def _next(self, wait: float | None, *, may_be_done: bool) -> float | None:
        if self._left <= 0:
            return None
        self._left -= 1
        self.may_be_done = self.may_be_done or may_be_done
        backoff = min(_LONGEST_BACKOFF_SECS, _BACKOFF_SECS * 2**self._failed)
        self._failed += 1
        return wait if wait is not None else backoff + random.uniform(0, _JITTER_SECS)


def retry_after_of(answer: requests.Response) -> float | None:
    """Read Retry-After, in seconds; None where there is none, or nothing that can be read."""
    text = answer.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        # urllib3 reads dates as well, and cuts what it takes for too long.
        return float(Retry().parse_retry_after(text)) if text else None
    except (InvalidHeader, ValueError, OverflowError):
        return None


def reason_of(error: requests.RequestException) -> object:
    """What lies under an error of `requests`: urllib3's own, where there is one."""
    inner = error.args[0] if error.args else None
    return getattr(inner, "reason", inner)
