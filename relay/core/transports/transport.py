"""What a chat transport is: a stored address and a platform's token in, one request out.

It builds the request and reads the platform's own way of answering, and nothing else: retries,
breaker, rate and log do not know that it is there. Plain HTTP has no transport here: its request
is the event as it came.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from relay.core import retry_after
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from relay.core.secret import Secret

#: What stands for the credential wherever a URL or a text is shown.
TOKEN = "<token>"  # noqa: S105  # it stands where one was


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One request to a chat platform, all but the headers that every request has."""

    #: Where it goes. Holds the credential: for sending only, never stored, logged or part of an error.
    url: str = field(repr=False)
    #: The same with `<token>` for the credential: for logs, spans and errors.
    display_url: str
    body: bytes
    content_type: str = "application/json"


class Transport(Protocol):
    """One platform. Everything here is pure."""

    @property
    def name(self) -> str:
        """The word for it in the API and the database, also the scheme of its addresses."""

    def check_address(self, text: object, field: str = "url") -> str:
        """Return an endpoint's address in its stored form, which comes out of a second check unchanged.

        Raises InvalidInput, code `invalid_address`, without the text: it may be a URL with a token in it.
        """

    def check_secret(self, text: object, field: str = "secret") -> Secret:
        """Take the platform's token. Raises InvalidInput, code `invalid_secret`, without the text."""

    def build(
        self, *, event_type: str, payload: bytes, content_type: str, address: str, secret: Secret, base_url: str
    ) -> Built:
        """Make the request for an event. `payload` may be anything; `address` and `secret` were checked.

        `base_url` is the platform's, as its setting has it: without a slash at its end. The caller judges the built
        URL by the policy for URLs, as it does every other.
        """

    def retry_after(self, *, headers: Iterable[tuple[str, str]], snippet: bytes, now: float) -> float | None:
        """Seconds from `now` (epoch seconds) that a reply asks to wait; None where it asks for nothing.

        `headers` have their names lower-cased, `snippet` is the beginning of the body. Which statuses may ask is the
        caller's to say.
        """

    def status(self, *, status: int, snippet: bytes) -> int:
        """The status to judge a reply by: another than it came with where the body says that a 2xx is none."""


def seconds(value: object) -> float | None:
    """A wait that a body gives as a number of seconds; None for what is no number, or not one that can be waited."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value < 0 or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(min(value, retry_after.LONGEST_S))


def object_in(snippet: bytes) -> Mapping[str, Any]:
    """The JSON object that a reply's body is; an empty one where it is none, or was cut."""
    try:
        value = json.loads(snippet)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def refuse_address(message: str, field: str) -> NoReturn:
    """Raise InvalidInput for an address."""
    raise InvalidInput(message, field=field, code="invalid_address")


def refuse_secret(message: str, field: str) -> NoReturn:
    """Raise InvalidInput for a platform's token."""
    raise InvalidInput(message, field=field, code="invalid_secret")
