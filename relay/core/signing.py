"""Signatures on requests: how they are made, and how a receiver checks them.

Every scheme signs the body's bytes as they are sent, with the time, so that a receiver
can tell a fresh request from a recorded one. With `standard-ed25519` the receiver needs
no secret: it verifies with a public key.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from typing import TYPE_CHECKING

from relay.core.errors import InvalidInput
from relay.core.model import Signing
from relay.core.secret import PREFIX, Secret, private_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Seconds that a signature's time may lie in the past or in the future.
TOLERANCE_SECS = 300

_TIMESTAMP = re.compile(r"[0-9]{1,12}")


def signing_key(scheme: Signing, secret: Secret | str) -> bytes:
    """Turn a secret into what the scheme signs with. Pure and worth caching: a secret's key never changes.

    `relay` takes the whole text, whatever it is, unless there is nothing in it; `standard`
    what the base64 after `whsec_` decodes to; `standard-ed25519` the 32 bytes of the seed
    in a `whsk_` secret. Raises InvalidInput where the secret is empty, which anybody could
    sign with, and the latter two where it is of another form.
    """
    text = secret.reveal() if isinstance(secret, Secret) else secret
    if scheme is Signing.RELAY:
        if text.strip() in {"", PREFIX}:
            raise InvalidInput(
                f"The secret is empty: copy it whole, {PREFIX} and what follows.", field="secret", code="invalid_secret"
            )
        return text.encode()
    if scheme is Signing.STANDARD:
        try:
            key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        except ValueError:
            key = b""
        if not key or not text.startswith(PREFIX):
            raise InvalidInput(
                f"The secret is not {PREFIX} followed by base64: copy it whole, as it was shown.",
                field="secret",
                code="invalid_secret",
            )
        return key
    if scheme is Signing.STANDARD_ED25519:
        return private_seed(text)
    raise ValueError(f"the scheme {scheme.value} has no key")


def public_key_of(secret: Secret) -> bytes:
    """Return the 32 raw bytes with which anybody verifies what a `whsk_` secret signs; InvalidInput for other forms."""
    from relay.core import ed25519  # noqa: PLC0415 - see there

    return ed25519.public_half(private_seed(secret.reveal()))


def signature_headers(
    scheme: Signing,
    *,
    secrets: Sequence[bytes],
    delivery_id: str,
    event_id: str | None,
    event_type: str | None,
    attempt: int,
    timestamp: int,
    body: bytes,
) -> list[str]:
    """Make the header lines (`Name: value`) that sign one attempt.

    `secrets` are keys from `signing_key` for this scheme, newest first; each signs.
    `timestamp` is Unix seconds, of this attempt and not of the first. `event_id` and
    `event_type` are None for a job, whose lines are then left out. The values are
    put in as they are: ids and types were checked when they were stored.
    """
    if scheme is Signing.RELAY:
        signed = b"%d.%b" % (timestamp, body)
        lines = [
            f"Relay-Timestamp: {timestamp}",
            "Relay-Signature: " + ",".join([_relay_signature(key, signed) for key in secrets]),
            f"Relay-Delivery-Id: {delivery_id}",
        ]
        if event_id is not None:
            lines.append(f"Relay-Event-Id: {event_id}")
        if event_type is not None:
            lines.append(f"Relay-Event-Type: {event_type}")
        lines.append(f"Relay-Attempt: {attempt}")
        return lines
    if scheme is Signing.NONE:
        return []
    signed = b"%b.%d.%b" % (delivery_id.encode(), timestamp, body)
    sign = _standard_signature if scheme is Signing.STANDARD else _ed25519_signature
    return [
        f"webhook-id: {delivery_id}",
        f"webhook-timestamp: {timestamp}",
        "webhook-signature: " + " ".join([sign(key, signed) for key in secrets]),
    ]


def verify(
    scheme: Signing,
    *,
    secrets: Sequence[bytes],
    headers: Mapping[str, str],
    body: bytes,
    now: int,
    tolerance: int = TOLERANCE_SECS,
) -> int:
    """Check a received request and return the time (Unix seconds) at which it was signed.

    `secrets` are keys from `signing_key`: one, or two while a secret is being
    replaced; for `standard-ed25519` public keys, 32 raw bytes each. `headers` are the
    request's, in any case; `body` its bytes as received, before any parsing. One good
    signature among those given is enough. Comparisons take constant time.

    Raises InvalidInput, with the code `missing_signature`, `bad_timestamp`, `stale`
    or `bad_signature`. A request that passes may still be a repeat within the
    tolerance: deliveries come at least once, so look at the delivery's id.
    """
    if not secrets or not all(secrets):
        raise ValueError("no secret to verify with")
    given = {name.lower(): value for name, value in headers.items()}
    if scheme is Signing.RELAY:
        name = "Relay-Signature"
        timestamp = _header(given, "Relay-Timestamp")
        signatures = _header(given, name).split(",")
        signed = b"%b.%b" % (_read_bytes(timestamp), body)
    elif scheme is Signing.NONE:
        raise ValueError(f"the scheme {scheme.value} has no signature to verify")
    else:
        name = "webhook-signature"
        message_id = _header(given, "webhook-id")
        timestamp = _header(given, "webhook-timestamp")
        signatures = _header(given, name).split(" ")
        signed = b"%b.%b.%b" % (_read_bytes(message_id), _read_bytes(timestamp), body)
    signed_at = _read_timestamp(timestamp)
    if scheme is Signing.STANDARD_ED25519:
        good = [_is_ed25519_signature(one, key, signed) for one in signatures for key in secrets]
    else:
        sign = _relay_signature if scheme is Signing.RELAY else _standard_signature
        expected = [sign(key, signed) for key in secrets]
        # Every pair is compared, so that the time tells nothing about which one fits.
        good = [
            hmac.compare_digest(_read_bytes(signature.strip()), one.encode())
            for signature in signatures
            for one in expected
        ]
    if not any(good):
        raise InvalidInput(
            "No signature fits: check that the secret is this endpoint's and that the body is the bytes as received.",
            field=name,
            code="bad_signature",
        )
    if abs(now - signed_at) > tolerance:
        raise InvalidInput(
            f"The signature is more than {tolerance} seconds from now: check this machine's clock; "
            "if it is right, refuse the request as a repeat of an old one.",
            field=name,
            code="stale",
        )
    return signed_at


def _relay_signature(key: bytes, signed: bytes) -> str:
    return "v1=" + hmac.digest(key, signed, "sha256").hex()


def _standard_signature(key: bytes, signed: bytes) -> str:
    return "v1," + binascii.b2a_base64(hmac.digest(key, signed, "sha256"), newline=False).decode()


def _ed25519_signature(seed: bytes, signed: bytes) -> str:
    from relay.core import ed25519  # noqa: PLC0415 - see there

    return "v1a," + binascii.b2a_base64(ed25519.sign(seed, signed), newline=False).decode()


def _is_ed25519_signature(text: str, public_key: bytes, signed: bytes) -> bool:
    from relay.core import ed25519  # noqa: PLC0415 - see there

    version, _, encoded = text.strip().partition(",")
    try:
        signature = base64.b64decode(_read_bytes(encoded), validate=True) if version == "v1a" else b""
    except binascii.Error:
        return False
    return ed25519.fits(public_key, signature, signed)


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name.lower(), "").strip()
    if not value:
        raise InvalidInput(
            f"The request has no {name} header: it is not signed, or something on the way dropped it.",
            field=name,
            code="missing_signature",
        )
    return value


def _read_timestamp(text: str) -> int:
    if _TIMESTAMP.fullmatch(text) is None:
        raise InvalidInput("The signature's time is not a number of seconds.", field="timestamp", code="bad_timestamp")
    return int(text)


def _read_bytes(text: str) -> bytes:
    # Whatever stands in a header of a request that may be anybody's; what is not ASCII fits no signature.
    return text.encode("utf-8", "replace")
