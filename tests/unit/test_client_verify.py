"""`relay.client.verify`: takes what Relay signs, and says what is wrong with the rest."""

from __future__ import annotations

import base64
import hmac
import json
from datetime import UTC, datetime
from typing import Any

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from relay.client import ConfigurationError, NotVerified, verify
from relay.core.model import Signing
from relay.core.secret import new_secret
from relay.core.signing import public_key_of, signature_headers, signing_key

NOW = 1_800_000_000
BODY = b'{"type":"order.paid","note":"gr\xc3\xbc\xc3\x9fe"}'
SECRET, OTHER = (new_secret(bytes([n]) * 32).reveal() for n in (1, 2))
PRIVATE = new_secret(bytes([3]) * 32, Signing.STANDARD_ED25519)
PUBLIC = public_key_of(PRIVATE)


def signed(scheme: Signing, *secrets: str, body: bytes = BODY, at: int = NOW) -> dict[str, str]:
    """The headers of a request of Relay's."""
    lines = signature_headers(
        scheme,
        secrets=[signing_key(scheme, secret) for secret in secrets],
        delivery_id="d1",
        event_id="e1",
        event_type="order.paid",
        attempt=2,
        timestamp=at,
        body=body,
    )
    return dict(line.split(": ", 1) for line in lines)


def jwks(*keys: bytes) -> dict[str, Any]:
    """A JWK Set as an endpoint's address has it."""
    return {
        "keys": [
            {"crv": "Ed25519", "kty": "OKP", "x": base64.urlsafe_b64encode(key).decode().rstrip("=")} for key in keys
        ]
    }


def refused(*arguments: Any, **options: Any) -> tuple[str, str]:
    """The code and the text of a refusal."""
    with pytest.raises(NotVerified) as caught:
        verify(*arguments, **{"now": NOW, **options})
    return caught.value.code, str(caught.value)


def test_both_schemes_are_taken_with_what_their_headers_say() -> None:
    """The scheme is the one that the headers are of; a list of secrets needs one that fits, headers may be in any case."""
    found = verify(signed(Signing.RELAY, SECRET), BODY, SECRET, now=NOW)
    assert (found.scheme, found.delivery_id, found.event_id, found.event_type, found.attempt, found.signed_at) == (
        "relay", "d1", "e1", "order.paid", 2, NOW,
    )  # fmt: skip
    found = verify(signed(Signing.STANDARD, SECRET), BODY, SECRET, now=NOW)
    assert (found.scheme, found.delivery_id, found.event_type) == ("standard", "d1", None)
    for scheme in (Signing.RELAY, Signing.STANDARD):
        shouted = [(name.upper(), value) for name, value in signed(scheme, OTHER, SECRET).items()]
        assert verify(shouted, bytearray(BODY), [SECRET], now=NOW + 299, scheme=scheme.value).scheme == scheme.value
        verify(signed(scheme, SECRET), BODY, [OTHER, SECRET], now=NOW)


def test_public_keys_are_taken() -> None:
    """`standard-ed25519` by the endpoint's JWK Set, also one of two keys, or by a `whpk_` key."""
    headers = signed(Signing.STANDARD_ED25519, PRIVATE.reveal())
    for keys in (jwks(PUBLIC), jwks(bytes(32), PUBLIC), "whpk_" + base64.b64encode(PUBLIC).decode()):
        assert verify(headers, BODY, keys, now=NOW).scheme == "standard-ed25519"
    assert refused(headers, BODY + b" ", jwks(PUBLIC))[0] == "bad_signature"
    # Headers do not choose what a key is used for: a public key is no secret that anybody could sign with.
    text = "whpk_" + base64.b64encode(PUBLIC).decode()
    forged = signed(Signing.STANDARD, "whsec_" + base64.b64encode(PUBLIC).decode())
    assert refused(forged, BODY, text)[0] == "bad_signature"
    forged = signed(Signing.RELAY, text)
    assert refused(forged, BODY, text)[0] == "missing_signature"


def test_refusals_say_what_is_wrong() -> None:
    """No header, one twice, an odd or stale time, and another secret have codes and sentences of their own."""
    headers = signed(Signing.RELAY, SECRET)
    assert refused({}, BODY, SECRET)[0] == "missing_signature"
    assert refused([*headers.items(), ("relay-signature", "v1=00")], BODY, SECRET)[0] == "duplicate_header"
    assert refused(headers | {"Relay-Timestamp": "soon"}, BODY, SECRET)[0] == "bad_timestamp"
    assert refused(headers, BODY, OTHER)[0] == "bad_signature"
    for away in (-301, 301):
        code, said = refused(headers, BODY, SECRET, now=NOW + away)
        assert (code, "check this machine's clock" in said) == ("stale", True)
    assert verify(headers, BODY, SECRET, now=NOW + 301, tolerance=400).signed_at == NOW


@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value, separators=(",", ":")),
        lambda value: BODY.decode() + "\n",
    ],
)
def test_a_body_that_was_written_again_is_recognised(write: Any) -> None:
    """It is refused all the same, and the sentence says what the receiver does wrong."""
    for scheme in (Signing.RELAY, Signing.STANDARD):
        code, said = refused(signed(scheme, SECRET), write(json.loads(BODY)).encode(), SECRET)
        assert code == "bad_signature"
        assert "parsed and written again" in said


def test_other_mistakes_of_receivers_are_recognised() -> None:
    """A body that was read before, a secret with a line's end or without its prefix."""
    headers = signed(Signing.RELAY, SECRET)
    assert "empty body" in refused(headers, b"", SECRET)[1]
    assert "white space around it" in refused(headers, BODY, SECRET + "\n")[1]
    with pytest.raises(ConfigurationError, match="white space around it"):
        verify(signed(Signing.STANDARD, SECRET), BODY, SECRET + "\n", now=NOW)
    assert "cut" in refused(headers, BODY, SECRET.removeprefix("whsec_"))[1]


def test_the_receivers_own_faults_are_told_apart() -> None:
    """What no request can mend is no NotVerified: a wrong kind of secret, a scheme that there is not, a parsed body."""
    standard, relay = signed(Signing.STANDARD, SECRET), signed(Signing.RELAY, SECRET)
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((standard, BODY, "hunter2"), {}),
        ((standard, BODY, PRIVATE.reveal()), {}),
        ((standard, BODY, {"keys": []}), {}),
        ((standard, BODY, "whpk_AAAA"), {}),
        ((standard, BODY, []), {}),
        ((standard, BODY, [SECRET, jwks(PUBLIC)]), {}),
        ((relay, BODY, SECRET), {"scheme": "none"}),
        ((relay, BODY, SECRET), {"scheme": "standard-ed25519"}),
        ((relay, BODY, jwks(PUBLIC)), {"scheme": "relay"}),
        ((standard, BODY, {"keys": None}), {}),
        ((standard, BODY, {"keys": [None, {"crv": "Ed25519", "x": 5}]}), {}),
        ((relay, BODY, SECRET.encode()), {}),
        ((relay, BODY, "\ud800"), {}),
    ]
    for arguments, options in cases:
        with pytest.raises(ConfigurationError):
            verify(*arguments, now=NOW, **options)
    with pytest.raises(TypeError, match=r"request\.get_data"):
        verify(relay, BODY.decode(), SECRET)  # type: ignore[arg-type]  # what it must refuse


@pytest.mark.parametrize("nothing", ["", " ", "\n", "whsec_", " whsec_\n"])
def test_a_secret_that_is_none_verifies_nothing(nothing: str) -> None:
    """An empty setting is the receiver's fault: what anybody can sign with does not pass, alone or beside another."""
    at, given = str(NOW), f"{NOW}.".encode() + BODY
    for key in (nothing, nothing.strip()):
        digest = hmac.digest(key.encode(), given, "sha256").hex()
        forged = {"Relay-Timestamp": at, "Relay-Signature": f"v1={digest}", "Relay-Delivery-Id": "d1"}
        for secrets in (nothing, [nothing], [nothing, SECRET], [SECRET, nothing]):
            for headers in (forged, signed(Signing.RELAY, SECRET)):
                with pytest.raises(ConfigurationError):
                    verify(headers, BODY, secrets, now=NOW)


def test_no_secret_at_all_is_told() -> None:
    """None, where a setting was not there, is no secret, alone or in a list."""
    nothings: list[Any] = [None, [None], [SECRET, None], [], ()]
    for secrets in nothings:
        for scheme in (Signing.RELAY, Signing.STANDARD):
            with pytest.raises(ConfigurationError):
                verify(signed(scheme, SECRET), BODY, secrets, now=NOW)


def test_what_is_public_is_never_a_secret() -> None:
    """A public key's text, with white space or as JSON that was not decoded, is not what a signature is made with."""
    text = "whpk_" + base64.b64encode(PUBLIC).decode()
    for public in (f" {text}", f"{text}\n"):
        digest = hmac.digest(public.encode(), f"{NOW}.".encode() + BODY, "sha256").hex()
        forged = {"Relay-Timestamp": str(NOW), "Relay-Signature": f"v1={digest}"}
        assert refused(forged, BODY, public)[0] == "missing_signature"
        assert verify(signed(Signing.STANDARD_ED25519, PRIVATE.reveal()), BODY, public, now=NOW).delivery_id == "d1"
    for public in (json.dumps(jwks(PUBLIC)), json.dumps([jwks(PUBLIC)]), "-----BEGIN PUBLIC KEY-----\n"):
        with pytest.raises(ConfigurationError, match="decode the JWK Set"):
            verify(signed(Signing.RELAY, SECRET), BODY, public, now=NOW)


def test_a_malformed_key_stands_in_no_other_keys_way() -> None:
    """Of a JWK Set the keys that can be read are used."""
    keys = jwks(PUBLIC)
    keys["keys"][:0] = [None, {"crv": "Ed25519"}, {"crv": "Ed25519", "x": 5}, {"crv": "Ed25519", "x": "é"}]
    headers = signed(Signing.STANDARD_ED25519, PRIVATE.reveal())
    assert verify(headers, BODY, keys, now=NOW).scheme == "standard-ed25519"


def test_it_agrees_with_the_library_of_standard_webhooks() -> None:
    """What that one signs passes here."""
    at = datetime.fromtimestamp(NOW, UTC)
    signature = standardwebhooks.Webhook(SECRET).sign("msg_1", at, BODY.decode())
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(NOW), "webhook-signature": signature}
    assert verify(headers, BODY, SECRET, now=NOW).delivery_id == "msg_1"


@given(
    headers=st.dictionaries(
        st.sampled_from(["Relay-Signature", "Relay-Timestamp", "webhook-id", "webhook-signature", "webhook-timestamp"]),
        st.text(),
    ),
    body=st.binary(max_size=100),
)
def test_anything_is_refused_in_good_order(headers: dict[str, str], body: bytes) -> None:
    """Whatever somebody sends, it is NotVerified and no other error."""
    for keys in (SECRET, jwks(PUBLIC)):
        with pytest.raises(NotVerified):
            verify(headers, body, keys, now=NOW)
