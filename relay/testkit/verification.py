"""Checks a webhook's signature as a customer would, written apart from the code that signs.

A second implementation is the point: a mistake in the signing code cannot cancel itself out here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

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
    """Judge the signature over `body` and the age of its timestamp.

    `secret` is that of the schemes `relay` and `standard`, or for `standard-ed25519` a public key (`whpk_` and base64) or
    the text of a JWK Set, one of whose keys must fit. What is public is never taken for a secret.

    `headers` are pairs as they came; `now` and `tolerance` are in seconds. A signing header that comes twice is refused,
    since receivers differ on which of the two they read. Where headers of `relay` and of Standard Webhooks come, `relay`
    is judged by a secret. Replays within the tolerance are not noticed.
    """
    wanted: dict[str, bytes] = {}
    for name, value in headers:
        key = name.lower()
        if key in _SIGNING_HEADERS:
            if key in wanted:
                return Verdict(valid=False, scheme=None, reason=f"{name} was sent twice")
            wanted[key] = value.encode("latin-1", "replace")
    if secret.startswith(("whpk_", "{")):
        if "webhook-signature" not in wanted:
            reason = "webhook-signature is missing, which is what a public key verifies"
            return Verdict(valid=False, scheme=None, reason=reason)
        return _judge("standard-ed25519", wanted, body, secret, now=now, tolerance=tolerance)
    if "relay-signature" in wanted:
        return _judge("relay", wanted, body, secret, now=now, tolerance=tolerance)
    if "webhook-signature" in wanted:
        return _judge("standard", wanted, body, secret, now=now, tolerance=tolerance)
    return Verdict(valid=False, scheme=None, reason="the request is not signed")


def has_signature(headers: Sequence[tuple[str, str]]) -> bool:
    """Say whether any header of a scheme came: a job, for one, is sent without, unless signing is asked for."""
    return any(name.lower() in _SIGNING_HEADERS for name, _ in headers)


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
        elif scheme == "standard-ed25519":
            if not _fits_a_key(secret, given, body):
                return Verdict(valid=False, scheme=scheme, reason="no signature matches")
            return Verdict(valid=True, scheme=scheme, reason="")
        else:
            expected = b"v1," + _standard_digest(secret, given["webhook-id"], timestamp, body).encode()
            offered = given["webhook-signature"].split(b" ")
    except ValueError:
        return Verdict(valid=False, scheme=scheme, reason="the receiver's secret does not fit the scheme")
    if not any(hmac.compare_digest(expected, one) for one in offered):
        reason = "no signature matches"
        if all(one.startswith(b"v1a,") for one in offered):
            reason = "it is signed with ed25519 (v1a): give the receiver the endpoint's public key, or its JWK Set"
        return Verdict(valid=False, scheme=scheme, reason=reason)
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


def _fits_a_key(given_keys: str, given: dict[str, bytes], body: bytes) -> bool:
    """Whether one of the `v1a` signatures is that of one of the keys (RFC 8032). Raises ValueError for what is no key."""
    signed = b".".join((given["webhook-id"], given["webhook-timestamp"], body))
    keys = [Ed25519PublicKey.from_public_bytes(raw) for raw in _raw_keys(given_keys)]
    for one in given["webhook-signature"].split(b" "):
        version, _, text = one.partition(b",")
        if version != b"v1a":
            continue
        for key in keys:
            try:
                key.verify(base64.b64decode(text, validate=True), signed)
            except (InvalidSignature, ValueError):
                continue
            return True
    return False


def _raw_keys(given: str) -> list[bytes]:
    """Return the keys' 32 raw bytes each: of `whpk_` and base64, or of a JWK Set's Ed25519 keys (RFC 8037 section 2)."""
    if not given.startswith("{"):
        return [base64.b64decode(given.removeprefix("whpk_"), validate=True)]
    try:
        texts = [str(key["x"]) for key in json.loads(given)["keys"] if key.get("crv") == "Ed25519"]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("the JSON is no JWK Set") from error
    if not texts:
        raise ValueError("the JWK Set has no key of Ed25519")
    return [base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)) for text in texts]
