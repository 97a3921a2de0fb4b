"""The headers that a caller may add to a request, judged before they are stored.

libcurl sends what it is given: a line break in a value would be a second request
on the wire, and a framing header would be sent next to its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from relay.core.errors import InvalidInput

#: Headers on one request.
MAX_HEADERS = 32
#: Characters in one name; no name in use is half as long.
MAX_NAME_LENGTH = 256
#: Bytes in one value.
MAX_VALUE_BYTES = 4096
#: Bytes of all header lines together, their ends and separators included.
MAX_TOTAL_BYTES = 16 * 1024

# RFC 9110 section 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
#: `Name: value` and the line's end.
_LINE_OVERHEAD = 4

#: Relay or libcurl sets these, or they concern one connection only (RFC 9110 section 7.6.1).
_FORBIDDEN = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_FORBIDDEN_PREFIXES = ("proxy-",)
#: What a signature is made of: free only where Relay adds none.
_SIGNING_PREFIXES = ("relay-", "webhook-")


def check_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    unsigned_job: bool = False,
    field: str = "headers",
) -> tuple[tuple[str, str], ...]:
    """Return the headers as pairs, in order, spelled as given, repeats and empty values included.

    Refuses with InvalidInput: names that are not tokens; values with anything but
    printable ASCII, space and tab, or with white space at an end (it would not
    survive the transport); what Relay sets itself; more than the bounds above.
    `unsigned_job` opens `Relay-*` and `webhook-*`, which an unsigned job may use.
    Content-Type, User-Agent, Accept and Cookie are the caller's to set: whoever
    builds the request lets them replace its own. Values are never part of an error.
    """
    pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    if len(pairs) > MAX_HEADERS:
        raise InvalidInput(f"There are more than {MAX_HEADERS} headers: drop some.", field=field, code="headers_limit")
    total = 0
    for name, value in pairs:
        _check_name(name, field, unsigned_job=unsigned_job)
        _check_value(name, value, field)
        total += len(name) + len(value) + _LINE_OVERHEAD
    if total > MAX_TOTAL_BYTES:
        raise InvalidInput(
            f"The headers are more than {MAX_TOTAL_BYTES} bytes in all: shorten them.",
            field=field,
            code="headers_limit",
        )
    return pairs


def curl_header(name: str, value: str) -> str:
    """Spell one checked header for libcurl, which drops `Name:` silently and wants `Name;` for an empty value."""
    return f"{name}: {value}" if value else f"{name};"


def _check_name(name: object, field: str, *, unsigned_job: bool) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or _TOKEN.fullmatch(name) is None:
        raise InvalidInput(
            f"The header name {ascii(name)[:80]} is not valid: use letters, digits and hyphens (RFC 9110 tokens).",
            field=field,
            code="invalid_header_name",
        )
    # Receivers behind CGI or WSGI cannot tell `_` from `-` in a name, so Relay_Signature would pass for ours there.
    folded = name.lower().replace("_", "-")
    if (
        folded in _FORBIDDEN
        or folded.startswith(_FORBIDDEN_PREFIXES)
        or (folded.startswith(_SIGNING_PREFIXES) and not unsigned_job)
    ):
        raise InvalidInput(
            f"The header {name} is set by Relay or belongs to the connection: leave it out.",
            field=f"{field}.{name}",
            code="forbidden_header",
        )


def _check_value(name: str, value: object, field: str) -> None:
    if not isinstance(value, str):
        reason = "is not a string: write it as one"
    elif _VALUE.fullmatch(value) is None:
        reason = "has a line break, a control character or a character outside ASCII: remove or encode it"
    elif value != value.strip(" \t"):
        reason = "begins or ends with white space, which HTTP does not transport: trim it"
    elif len(value) > MAX_VALUE_BYTES:
        reason = f"is longer than {MAX_VALUE_BYTES} bytes: shorten it"
    else:
        return
    raise InvalidInput(
        f"The value of the header {name} {reason}.",
        field=f"{field}.{name}",
        code="invalid_header_value",
    )
