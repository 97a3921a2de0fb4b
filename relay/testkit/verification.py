"""Checks a webhook's signature as a customer would, written apart from the code that signs.

A second implementation is the point: a mistake in the signing code cannot cancel itself out here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE_SECS = 300
_RELAY_HEADERS = ("relay-timestamp", "relay-signature")
_STANDARD_HEADERS = ("webhook-id", "webhook-timestamp", "webhook-signature")
_SIGNING_HEADERS = frozenset(_RELAY_HEADERS + _STANDARD_HEADERS)
_MAX_TIMESTAMP_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`valid`, and where it is not, a `reason` fit for the answer's body. `scheme` is None where no signature came."""

    valid: bool
    scheme: str | None
    reason: str


def verify(
    headers: Sequence[tuple[str, str]], body: bytes, secret: str, *, now: float, tolerance: int = TOLERANCE_SECS
) -> Verdict:
    """Judge the signature (schemes `relay` and `standard`) over `body` and the age of its timestamp.

    `headers` are pairs as they came; `now` and `tolerance` are in seconds. A signing header that
    comes twice is refused, since receivers differ on which of the two they read. Where headers of
    both schemes come, `relay` is judged. Replays within the tolerance are not noticed.
    """
    wanted: dict[str, bytes] = {}
    for name, value in headers:
        key = name.lower()
        if key in _SIGNING_HEADERS:
            if key in wanted:
                return Verdict(valid=False, scheme=None, reason=f"{name} was sent twice")
            wanted[key] = value.encode("latin-1", "replace")
    if "relay-signature" in wanted:
        return _judge("relay", wanted, body, secret, now=now, tolerance=tolerance)
    if "webhook-signature" in wanted:
        return _judge("standard", wanted, body, secret, now=now, tolerance=tolerance)
    return Verdict(valid=False, scheme=None, reason="the request is not signed")


def sign_relay(secret: str, timestamp: int, body: bytes) -> str:
    """One `v1=...` of scheme `relay`, for tests that play the sender."""
    return "v1=" + _relay_digest(secret, b"%d" % timestamp, body)


def sign_standard(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """One `v1,...` of scheme `standard`; raises ValueError if the secret is not `whsec_` and base64."""
    return "v1," + _standard_digest(secret, message_id.encode("latin-1"), b"%d" % timestamp, body)


def _judge(scheme: str, given: dict[str, bytes], body: bytes, secret: str, *, now: float, tolerance: int) -> Verdict:
    required = _RELAY_HEADERS if scheme == "relay" else _STANDARD_HEADERS
    missing = next((name for name in required if name not in given), None)
    if missing is not None:
        return Verdict(valid=False, scheme=scheme, reason=f"{missing} is missing")
    timestamp = given["relay-timestamp" if scheme == "relay" else "webhook-timestamp"]
    if not timestamp.isdigit() or len(timestamp) > _MAX_TIMESTAMP_DIGITS:
        return Verdict(valid=False, scheme=scheme, reason="the timestamp is not a count of seconds")
    if abs(now - int(timestamp)) > tolerance:
        age = "old" if int(timestamp) < now else "new"
        return Verdict(valid=False, scheme=scheme, reason=f"the timestamp is too {age}")
    try:
        if scheme == "relay":
            expected = b"v1=" + _relay_digest(secret, timestamp, body).encode()
            offered = given["relay-signature"].split(b",")
        else:
            expected = b"v1," + _standard_digest(secret, given["webhook-id"], timestamp, body).encode()
            offered = given["webhook-signature"].split(b" ")
    except ValueError:
        return Verdict(valid=False, scheme=scheme, reason="the receiver's secret does not fit the scheme")
    if not any(hmac.compare_digest(expected, one) for one in offered):
        return Verdict(valid=False, scheme=scheme, reason="no signature matches")
    return Verdict(valid=True, scheme=scheme, reason="")


def _relay_digest(secret: str, timestamp: bytes, body: bytes) -> str:
    return hmac.digest(secret.encode(), timestamp + b"." + body, "sha256").hex()


def _standard_digest(secret: str, message_id: bytes, timestamp: bytes, body: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error as error:
        raise ValueError("the secret is not base64") from error
    signed = b".".join((message_id, timestamp, body))
    return base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
