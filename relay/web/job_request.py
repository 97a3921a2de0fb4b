"""What a job's request asks for: all of it is in its headers, since its body is the payload (B-110, B-112).

The names of headers tell no case, and a WSGI environment tells `_` from `-` no more. A server that has the lines as they
came puts them into the environment as `relay.headers`: a list of pairs, name and value. With one that does not, lines of
one name come joined by commas, which HTTP calls the same (RFC 9110 section 5.3), and are sent on as one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from relay.core import backoff
from relay.core.errors import InvalidInput
from relay.core.headers import check_headers
from relay.core.model import Signing
from relay.core.seconds import MAX_EXPIRES_IN, parse_expires_in, parse_seconds
from relay.web.endpoint_models import MASKED, check_destination
from relay.web.problems import FieldError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from relay.core.address import AddressPolicy
    from relay.core.url import Url, UrlPolicy

#: Milliseconds, as an endpoint's time-out.
MIN_TIMEOUT_MS: Final = 100
MAX_TIMEOUT_MS: Final = 30_000
#: Seconds that a job may be put off for: as long as it may take to expire.
MAX_DELAY: Final = MAX_EXPIRES_IN

#: Before the name of a header to send.
_HEADER: Final = "Relay-Header-"
_URL, _SIGN, _ATTEMPTS, _TIMEOUT = "Relay-Url", "Relay-Sign", "Relay-Max-Attempts", "Relay-Timeout-Ms"
_DELAY, _EXPIRES_IN = "Relay-Delay", "Relay-Expires-In"
#: Relay-Workspace is for the instance's key, and read by whoever lets callers in.
_OPTIONS: Final = {
    name.lower(): name for name in (_URL, _SIGN, _ATTEMPTS, _TIMEOUT, _DELAY, _EXPIRES_IN, "Relay-Workspace")
}
_SIGNINGS: Final = {one.value: one for one in (Signing.NONE, Signing.STANDARD, Signing.RELAY)}
_DIGITS: Final = re.compile(r"[0-9]{1,6}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as it was asked for, checked."""

    url: Url
    #: Name and value, in order, repeats among them.
    headers: tuple[tuple[str, str], ...]
    signing: Signing
    max_attempts: int
    #: None: the installation's.
    timeout_ms: int | None
    #: Seconds.
    delay: float
    expires_in: float | None
    #: As it came; empty where none did.
    content_type: str

    def parts(self) -> list[str]:
        """Return what makes two requests for a job the same, beside their bodies."""
        # Lines of different names have no order among them, those of one name do.
        lines = [f"{name}:{value}" for name, value in sorted(self.headers, key=lambda pair: pair[0].lower())]
        options = (self.signing.value, self.max_attempts, self.timeout_ms, self.delay, self.expires_in)
        return [self.url.text, self.content_type, *map(str, options), *lines]


def read_job(
    environ: Mapping[str, Any], *, url_policy: UrlPolicy, address_policy: AddressPolicy, longest_timeout_ms: int
) -> JobRequest:
    """Read a job from the request's headers. Raises the Problem of a 400 that names every header at fault."""
    given, headers, faults = _sorted_out(_lines(environ))

    def take(name: str, default: T, parse: Callable[[str], T]) -> T:
        try:
            return parse(given[name]) if name in given else default
        except InvalidInput as error:
            faults.append(FieldError(field=error.field or name, message=str(error), code=error.code))
            return default

    if _URL not in given:
        message = "The header is missing: name in it the URL that the body is to be sent to."
        faults.append(FieldError(field=_URL, message=message, code="required"))
    url = take(_URL, None, lambda text: check_destination(_ascii(text), url_policy, address_policy, _URL))
    signing = take(_SIGN, Signing.NONE, _signing)
    attempts = take(
        _ATTEMPTS,
        backoff.JOB_POLICY.max_attempts,
        lambda text: _whole(text, _ATTEMPTS, at_least=1, at_most=backoff.MAX_ATTEMPTS),
    )
    longest = min(MAX_TIMEOUT_MS, longest_timeout_ms)
    timeout_ms = take(_TIMEOUT, None, lambda text: _whole(text, _TIMEOUT, at_least=MIN_TIMEOUT_MS, at_most=longest))
    delay = take(_DELAY, 0.0, lambda text: parse_seconds(text, _DELAY, at_least=0, at_most=MAX_DELAY))
    expires_in = take(_EXPIRES_IN, None, lambda text: parse_expires_in(text, _EXPIRES_IN))
    if expires_in is not None and delay >= expires_in:
        message = "The job would expire before it is due: lower the delay, or let it live longer."
        faults.append(FieldError(field=_DELAY, message=message, code="expires_first"))
    content_type = str(environ.get("CONTENT_TYPE", "")).strip()
    faults += _faults_of([("Content-Type", content_type)], field="", unsigned=True)
    faults += _faults_of(headers, field=_HEADER, unsigned=signing is Signing.NONE)
    if faults or url is None:
        raise invalid(faults)
    return JobRequest(
        url=url,
        headers=tuple(headers),
        signing=signing,
        max_attempts=attempts,
        timeout_ms=timeout_ms,
        delay=delay,
        expires_in=expires_in,
        content_type=content_type,
    )


def _lines(environ: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return the request's header lines, names in lower case."""
    lines = environ.get("relay.headers")
    if lines is not None:
        return [(name.lower(), value) for name, value in lines]
    return [
        (name.removeprefix("HTTP_").replace("_", "-").lower(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_RELAY_")
    ]


def _sorted_out(
    lines: Iterable[tuple[str, str]],
) -> tuple[dict[str, str], list[tuple[str, str]], list[FieldError]]:
    """Tell options by their names, headers to send, and what is neither."""
    given: dict[str, str] = {}
    headers: list[tuple[str, str]] = []
    faults: list[FieldError] = []
    for name, value in lines:
        if name.startswith(_HEADER.lower()):
            headers.append((_titled(name[len(_HEADER) :]), value))
        elif (option := _OPTIONS.get(name)) is not None:
            if option in given:
                faults.append(FieldError(field=option, message="The header came twice: keep one.", code="duplicate"))
            given[option] = value
        elif name.startswith(("relay-", "relay_")):
            message = f"There is no such header: leave it out. There are {', '.join(_OPTIONS.values())} and {_HEADER}…."
            faults.append(FieldError(field=_titled(name)[:80], message=message, code="unknown_header"))
    return given, headers, faults


def _titled(name: str) -> str:
    """Spell a name as is usual: HTTP/1.1 tells no case, and what the caller wrote did not come."""
    return "-".join(part.capitalize() for part in name.split("-"))


def _faults_of(headers: list[tuple[str, str]], *, field: str, unsigned: bool) -> list[FieldError]:
    """Judge headers one by one, so that every one at fault is named, and then their number and size."""
    faults: list[FieldError] = []
    for name, value in headers:
        try:
            check_headers([(name, value)], unsigned_job=unsigned)
            if value == MASKED:
                message = "This is how a header's value reads back, not a value: send the value itself."
                faults.append(FieldError(field=field + name, message=message, code="masked_value"))
        except InvalidInput as error:
            faults.append(FieldError(field=(field + name)[:80], message=str(error), code=error.code))
    if not faults:
        try:
            check_headers(headers, unsigned_job=unsigned)
        except InvalidInput as error:
            faults.append(FieldError(field=f"{field}*", message=str(error), code=error.code))
    return faults


def _ascii(text: str) -> str:
    # In which encoding the bytes were meant a header does not say (RFC 9110 section 5.5): guessed, it is another host.
    if not text.isascii():
        raise InvalidInput(
            "The URL has a character outside ASCII, which a header cannot carry: write the host's name in its xn-- form "
            "(punycode), and escape the rest as %XX.",
            field=_URL,
            code="invalid_header_value",
        )
    return text


def _signing(text: str) -> Signing:
    if text not in _SIGNINGS:
        raise InvalidInput(
            f"A job is signed by one of {', '.join(_SIGNINGS)}: choose one.", field=_SIGN, code="not_a_choice"
        )
    return _SIGNINGS[text]


def _whole(text: str, field: str, *, at_least: int, at_most: int) -> int:
    if not text.isascii() or _DIGITS.fullmatch(text) is None or not at_least <= int(text) <= at_most:
        raise InvalidInput(
            f"The value is not a whole number from {at_least} to {at_most}: send one that is.",
            field=field,
            code="out_of_range",
        )
    return int(text)
