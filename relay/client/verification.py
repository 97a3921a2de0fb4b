"""`verify`: for receivers. It tells a request of Relay's from anybody else's, and what is wrong where it cannot."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from relay.client.errors import NotVerified
from relay.core import signing
from relay.core.errors import ConfigurationError, InvalidInput
from relay.core.model import Signing
from relay.core.secret import PREFIX, PRIVATE_PREFIX

#: Seconds that a signature's time may lie in the past or in the future.
TOLERANCE_SECS: Final = signing.TOLERANCE_SECS
#: In front of a public key, as Standard Webhooks has it.
PUBLIC_PREFIX: Final = "whpk_"

#: Bytes of a body up to which it is looked into for why it does not fit.
_LOOKED_INTO: Final = 262_144
_RELAY_HEADERS: Final = ("relay-signature", "relay-timestamp")
_STANDARD_HEADERS: Final = ("webhook-signature", "webhook-timestamp", "webhook-id")
_AT_FAULT: Final = frozenset({"missing_signature", "duplicate_header", "bad_timestamp", "stale", "bad_signature"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A request that came from Relay. `delivery_id` is the same at every attempt: do each thing once by it.

    `event_id`, `event_type` and `attempt` come with the scheme `relay` alone, and are not part of what is signed.
    """

    scheme: str
    delivery_id: str
    #: Unix seconds.
    signed_at: int
    event_id: str | None = None
    event_type: str | None = None
    attempt: int | None = None


def verify(
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    body: bytes | bytearray | memoryview,
    secrets: str | Sequence[str] | Mapping[str, Any],
    *,
    tolerance: int = TOLERANCE_SECS,
    now: float | None = None,
    scheme: str | None = None,
) -> Verified:
    """Check that a request came from Relay, just now, and return what its headers say.

    `headers` are the request's, names in any case; `body` its bytes as they came, before anything parsed them.
    `secrets` is the endpoint's secret (`whsec_…`), or several of which one must fit; for `standard-ed25519` the JWK Set
    of the endpoint as it was decoded, or public keys (`whpk_…`). `tolerance` and `now` are seconds; `scheme` is
    `relay`, `standard` or `standard-ed25519`, and None takes the one that the headers are of, as far as the kind of
    secret goes with it: no header decides what a secret is used for. Signatures are compared in constant time.

    Raises NotVerified for a request to refuse; ConfigurationError where the receiver's own side is wrong: a secret of
    another kind, or no package `cryptography` for ed25519; TypeError where `body` is not bytes.

    A request can pass more than once within the tolerance: look at the delivery's id.
    """
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(
            f"the body is {type(body).__name__}, not bytes: give it as it came, such as Flask's request.get_data(), "
            "Django's request.body or FastAPI's await request.body()"
        )
    raw = bytes(body)
    keys = _keys(secrets)
    given = _lowered(headers)
    kind = _scheme(given, keys, scheme)
    material = [key for one in keys for key in _material(kind, one)]
    try:
        signed_at = signing.verify(
            kind,
            secrets=material,
            headers=given,
            body=raw,
            now=int(time.time() if now is None else now),
            tolerance=tolerance,
        )
    except ImportError as error:
        raise ConfigurationError("standard-ed25519 needs the package cryptography: pip install cryptography") from error
    except InvalidInput as error:
        said = str(error)
        if error.code == "bad_signature":
            said = _why(kind, given, raw, keys) or said
        raise NotVerified(said, code=error.code if error.code in _AT_FAULT else "bad_signature") from None
    attempt = given.get("relay-attempt", "")
    return Verified(
        scheme=kind.value,
        delivery_id=given.get("relay-delivery-id" if kind is Signing.RELAY else "webhook-id", ""),
        signed_at=signed_at,
        event_id=given.get("relay-event-id") if kind is Signing.RELAY else None,
        event_type=given.get("relay-event-type") if kind is Signing.RELAY else None,
        attempt=int(attempt) if kind is Signing.RELAY and attempt.isdecimal() and len(attempt) < 10 else None,
    )


def _keys(secrets: object) -> list[str | Mapping[str, Any]]:
    """Take one key or several; ConfigurationError where there is none, or one of a type that no key has."""
    several = isinstance(secrets, Iterable) and not isinstance(secrets, str | bytes | Mapping)
    keys: list[str | Mapping[str, Any]] = []
    for key in secrets if several else (secrets,):  # type: ignore[attr-defined]  # several are iterable
        if not isinstance(key, str | Mapping):
            kind = type(key).__name__
            raise ConfigurationError(f"a secret is not {kind}: give it as a str, or a JWK Set as it was decoded")
        if isinstance(key, str) and key.strip().startswith(("{", "[", "-----BEGIN")):
            # Public, so that anybody could sign with its text.
            raise ConfigurationError("this is no secret but the text of a key: decode the JWK Set and give that")
        keys.append(key)
    if not keys:
        raise ConfigurationError("there is no secret to verify with: give the one that the endpoint was made with")
    return keys


def _lowered(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> dict[str, str]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        if key in found and key in _RELAY_HEADERS + _STANDARD_HEADERS:
            # Another part of the receiver may read the other one.
            raise NotVerified(f"The header {name} came twice: refuse the request.", code="duplicate_header")
        found[key] = value
    return found


def _scheme(given: Mapping[str, str], keys: Sequence[object], wanted: str | None) -> Signing:
    """Choose the scheme: the keys say whether it is a public key's, the headers which of the others."""
    public = [isinstance(key, Mapping) or str(key).strip().startswith(PUBLIC_PREFIX) for key in keys]
    if any(public) and not all(public):
        raise ConfigurationError("some of the secrets are public keys and some are not: give one kind")
    if wanted is not None:
        try:
            scheme = Signing(wanted)
        except ValueError:
            scheme = Signing.NONE
        if scheme is Signing.NONE:
            raise ConfigurationError(f"{wanted!r} is no scheme to verify: use relay, standard or standard-ed25519")
        if (scheme is Signing.STANDARD_ED25519) != public[0]:
            needs = "the endpoint's JWK Set" if not public[0] else f"the endpoint's secret, {PREFIX}…"
            raise ConfigurationError(f"the scheme {scheme.value} is verified with {needs}")
        return scheme
    if public[0]:
        return Signing.STANDARD_ED25519
    if "relay-signature" not in given and "webhook-signature" in given:
        return Signing.STANDARD
    return Signing.RELAY


def _material(scheme: Signing, key: str | Mapping[str, Any]) -> list[bytes]:
    """Turn what a receiver was given into what the scheme verifies with."""
    if isinstance(key, Mapping):
        return _public_set(key)
    text = key.strip()
    if text.startswith(PRIVATE_PREFIX):
        raise ConfigurationError(
            f"{PRIVATE_PREFIX}… is the private key, which stays with Relay: verify with the endpoint's JWK Set"
        )
    if text.startswith(PUBLIC_PREFIX):
        return [_public(text.removeprefix(PUBLIC_PREFIX))]
    try:
        return [signing.signing_key(scheme, key)]
    except UnicodeEncodeError:
        raise ConfigurationError("the secret has half of a surrogate pair: copy it whole, as it was shown") from None
    except InvalidInput as error:
        said = "the secret has white space around it: strip it" if text and text != key else str(error)
        raise ConfigurationError(said) from None


def _public_set(key: Mapping[str, Any]) -> list[bytes]:
    """The Ed25519 keys of a JWK Set (RFC 8037 section 2). One that cannot be read is passed over beside one that can."""
    listed = key.get("keys")
    found: list[bytes] = []
    fault: ConfigurationError | None = None
    for one in listed if isinstance(listed, Sequence) else ():
        if not isinstance(one, Mapping) or one.get("crv") != "Ed25519":
            continue
        try:
            found.append(_public(one.get("x")))
        except ConfigurationError as error:
            fault = error
    if not found:
        raise fault or ConfigurationError(
            'the JWK Set has no Ed25519 key: give {"keys": […]} as the endpoint\'s address has it'
        )
    return found


def _public(text: object) -> bytes:
    try:
        spelled = text if isinstance(text, str) else ""
        key = base64.urlsafe_b64decode(spelled.rstrip("=").replace("+", "-").replace("/", "_") + "=")
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigurationError("a public key is the base64 of 32 bytes: copy it whole")
    return key


def _why(scheme: Signing, given: Mapping[str, str], body: bytes, keys: Sequence[Any]) -> str | None:
    """Say why no signature fits, where that can be found out by trying what people commonly get wrong."""

    def fits(text: bytes, secrets: Sequence[Any] = keys) -> bool:
        try:
            material = [key for one in secrets for key in _material(scheme, one)]
            # Whether it is fresh is not the question: any time will do.
            signing.verify(scheme, secrets=material, headers=given, body=text, now=0, tolerance=10**12)
        except (InvalidInput, ConfigurationError):
            return False
        return True

    if not body:
        return "No signature fits the empty body: something read it before. Verify the bytes as they came."
    if all(isinstance(key, str) for key in keys):
        trimmed = [key.strip() for key in keys]
        if trimmed != list(keys) and fits(body, trimmed):
            return "No signature fits: the secret has white space around it. Strip it."
        prefixed = [key if key.startswith(PREFIX) else PREFIX + key for key in keys]
        if prefixed != list(keys) and fits(body, prefixed):
            return f"No signature fits: the secret was cut. It is used whole, {PREFIX} included."
    if any(fits(one) for one in _other_spellings(body)):
        return (
            "No signature fits these bytes, but one fits the same JSON spelled otherwise: the body was parsed and "
            "written again. Verify the bytes as they came."
        )
    return None


def _other_spellings(body: bytes) -> Iterable[bytes]:
    """The same JSON as common programs write it, and the body without white space around it."""
    if len(body) > _LOOKED_INTO:
        return
    yield from {body.strip(), body.strip() + b"\n", body.replace(b"\r\n", b"\n")} - {body}
    try:
        value = json.loads(body)
        for ascii_only in (False, True):
            for separators in ((",", ":"), (", ", ": ")):
                yield json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    except (ValueError, RecursionError):
        return
