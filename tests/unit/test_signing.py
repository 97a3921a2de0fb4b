"""Signatures: known answers, a foreign verifier, and what the receiver's side refuses."""

from __future__ import annotations

import base64
import datetime
import json
import pathlib
import re
from typing import Any

import pytest
import standardwebhooks
import stripe
import svix.webhooks
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.model import Signing
from relay.core.secret import Secret, new_secret
from relay.core.signing import TOLERANCE_SECS, public_key_of, signature_headers, signing_key, verify

VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "vectors" / "signing.json").read_text())["vectors"]
SYMMETRIC = [vector for vector in VECTORS if vector["scheme"] in ("relay", "standard")]
ASYMMETRIC = [vector for vector in VECTORS if vector["scheme"] == "standard-ed25519"]
NOW = 1_700_000_000
SECRETS = [new_secret(bytes([n]) * 32).reveal() for n in range(3)]
PRIVATE = [new_secret(bytes([n]) * 32, Signing.STANDARD_ED25519) for n in range(3)]


def _sign(scheme: Signing, secrets: list[str], body: bytes, **changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "delivery_id": "dlv_01",
        "event_id": "evt_01",
        "event_type": "order.paid",
        "attempt": 3,
        "timestamp": NOW,
    }
    keys = [signing_key(scheme, secret) for secret in secrets]
    return signature_headers(scheme, secrets=keys, body=body, **values | changes)


def _parse(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("vector", SYMMETRIC, ids=lambda v: f"{v['scheme']}-{v['signature'][3:11]}")
def test_known_answers(vector: dict[str, Any]) -> None:
    """Every known answer is signed to the letter and verified (B-90, B-91)."""
    scheme = Signing(vector["scheme"])
    body = bytes.fromhex(vector["body_hex"])
    name = "Relay-Signature" if scheme is Signing.RELAY else "webhook-signature"
    lines = _sign(
        scheme, [vector["secret"]], body, timestamp=vector["timestamp"], delivery_id=vector.get("id", "dlv_01")
    )
    assert f"{name}: {vector['signature']}" in lines
    key = signing_key(scheme, vector["secret"])
    assert (
        verify(scheme, secrets=[key], headers=_parse(lines), body=body, now=vector["timestamp"]) == vector["timestamp"]
    )


def test_there_are_answers_for_both_schemes() -> None:
    """The file of known answers was found and holds every scheme that signs."""
    assert {vector["scheme"] for vector in SYMMETRIC} == {"relay", "standard"}
    assert len(ASYMMETRIC) >= 2


@pytest.mark.parametrize("vector", ASYMMETRIC, ids=lambda v: str(v["id"]))
def test_known_answers_of_ed25519(vector: dict[str, Any]) -> None:
    """Every known answer is signed to the letter, has the public key it should, and is verified with it (B-91)."""
    scheme, body = Signing.STANDARD_ED25519, bytes.fromhex(vector["body_hex"])
    lines = _sign(scheme, [vector["private_key"]], body, timestamp=vector["timestamp"], delivery_id=vector["id"])
    assert lines == [
        f"webhook-id: {vector['id']}",
        f"webhook-timestamp: {vector['timestamp']}",
        f"webhook-signature: {vector['signature']}",
    ]
    public_key = public_key_of(Secret(vector["private_key"]))
    assert "whpk_" + base64.b64encode(public_key).decode() == vector["public_key"]
    verify(scheme, secrets=[public_key], headers=_parse(lines), body=body, now=vector["timestamp"])


def test_the_lines_of_relay() -> None:
    """Scheme relay adds six headers, and a job's, which has no event, four."""
    lines = _sign(Signing.RELAY, SECRETS[:2], b"{}")
    names = ["Relay-Timestamp", "Relay-Signature", "Relay-Delivery-Id", "Relay-Event-Id", "Relay-Event-Type"]
    assert list(_parse(lines)) == [*names, "Relay-Attempt"]
    assert _parse(lines)["Relay-Attempt"] == "3"
    job = _parse(_sign(Signing.RELAY, SECRETS[:1], b"{}", event_id=None, event_type=None))
    assert list(job) == ["Relay-Timestamp", "Relay-Signature", "Relay-Delivery-Id", "Relay-Attempt"]


def test_the_newest_secret_signs_first() -> None:
    """With two secrets there are two signatures, in the secrets' order."""
    both = _parse(_sign(Signing.RELAY, SECRETS[:2], b"x"))["Relay-Signature"]
    each = [_parse(_sign(Signing.RELAY, [secret], b"x"))["Relay-Signature"] for secret in SECRETS[:2]]
    assert both == ",".join(each)
    both = _parse(_sign(Signing.STANDARD, SECRETS[:2], b"x"))["webhook-signature"]
    each = [_parse(_sign(Signing.STANDARD, [secret], b"x"))["webhook-signature"] for secret in SECRETS[:2]]
    assert both == " ".join(each)


def test_scheme_none_adds_nothing() -> None:
    """Without signing there is no header at all."""
    headers = signature_headers(
        Signing.NONE, secrets=[], delivery_id="d", event_id="e", event_type="t", attempt=1, timestamp=NOW, body=b""
    )
    assert headers == []


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 2))
def test_the_published_library_verifies_standard(text: str, count: int) -> None:
    """What scheme standard signs, the reference implementation accepts with each of the secrets (C-25)."""
    body = json.dumps({"v": text})
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    headers = _parse(_sign(Signing.STANDARD, SECRETS[:count], body.encode(), timestamp=now))
    for secret in SECRETS[:count]:
        assert standardwebhooks.Webhook(secret).verify(body, headers) == {"v": text}
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRETS[2]).verify(body, headers)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_what_the_published_library_signs_is_verified(text: str) -> None:
    """A request signed by the reference implementation passes."""
    now = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    headers = {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(NOW),
        "Webhook-Signature": standardwebhooks.Webhook(SECRETS[0]).sign("msg_1", now, text),
    }
    key = signing_key(Signing.STANDARD, SECRETS[0])
    assert verify(Signing.STANDARD, secrets=[key], headers=headers, body=text.encode(), now=NOW) == NOW


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 2))
def test_svix_verifies_standard(text: str, count: int) -> None:
    """What scheme standard signs, Svix's library accepts with each of the secrets, and with no other."""
    body = json.dumps({"v": text}, ensure_ascii=False)
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    headers = _parse(_sign(Signing.STANDARD, SECRETS[:count], body.encode(), timestamp=now))
    for secret in SECRETS[:count]:
        svix.webhooks.Webhook(secret).verify(body, headers)
    with pytest.raises(svix.webhooks.WebhookVerificationError):
        svix.webhooks.Webhook(SECRETS[2]).verify(body, headers)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 2))
def test_stripe_verifies_relay(text: str, count: int) -> None:
    """Scheme relay keys and signs as Stripe does: only the header's spelling differs (B-90)."""
    headers = _parse(_sign(Signing.RELAY, SECRETS[:count], text.encode()))
    as_stripe_spells_it = f"t={headers['Relay-Timestamp']},{headers['Relay-Signature']}"
    for secret in SECRETS[:count]:
        stripe.WebhookSignature.verify_header(text, as_stripe_spells_it, secret)
    with pytest.raises(stripe.SignatureVerificationError):
        stripe.WebhookSignature.verify_header(text, as_stripe_spells_it, SECRETS[2])


@given(st.binary(max_size=200), st.binary(min_size=32, max_size=32))
def test_the_public_key_is_enough(body: bytes, seed: bytes) -> None:
    """A receiver that holds the public key alone verifies v1a with any ed25519 library."""
    secret = new_secret(seed, Signing.STANDARD_ED25519)
    headers = _parse(_sign(Signing.STANDARD_ED25519, [secret.reveal()], body))
    version, _, signature = headers["webhook-signature"].partition(",")
    assert version == "v1a"
    public_key = Ed25519PublicKey.from_public_bytes(public_key_of(secret))
    public_key.verify(base64.b64decode(signature), b"dlv_01.%d.%b" % (NOW, body))
    with pytest.raises(InvalidSignature):
        public_key.verify(base64.b64decode(signature), b"dlv_02.%d.%b" % (NOW, body))


def test_the_manual_verifies_ed25519() -> None:
    """What receivers are told to run with the public keys accepts a fresh request, and no changed or old one."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "receiving.md").read_text("utf-8")
    (shown,) = [block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "Ed25519" in block]
    names: dict[str, Any] = {}
    exec(compile(shown, "docs/receiving.md", "exec"), names)
    keys = [
        {"kty": "OKP", "crv": "Ed25519", "x": base64.urlsafe_b64encode(public_key_of(secret)).decode().rstrip("=")}
        for secret in PRIVATE
    ]
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    headers = _parse(_sign(Signing.STANDARD_ED25519, [PRIVATE[0].reveal()], b"{}", timestamp=now))
    check = names["verify"]
    assert check({"keys": keys[:1]}, headers, b"{}")
    assert check({"keys": [keys[1], keys[0]]}, {name.upper(): value for name, value in headers.items()}, b"{}")
    assert not check({"keys": keys[1:]}, headers, b"{}")
    assert not check({"keys": keys}, headers, b"{ }")
    assert not check({"keys": keys}, {**headers, "webhook-id": "another"}, b"{}")
    assert not check({"keys": keys}, {**headers, "webhook-signature": "v1a,\xe9 v1,AAAA x"}, b"{}")
    assert not check({"keys": keys}, {}, b"{}")
    old = _parse(_sign(Signing.STANDARD_ED25519, [PRIVATE[0].reveal()], b"{}", timestamp=now - 400))
    assert not check({"keys": keys}, old, b"{}")


def test_a_receiver_of_standard_passes_v1a_over() -> None:
    """The reference implementation takes a v1a beside its v1 for another version, and needs the v1."""
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    headers = _parse(_sign(Signing.STANDARD_ED25519, [PRIVATE[0].reveal()], b"{}", timestamp=now))
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRETS[0]).verify("{}", headers)
    symmetric = _parse(_sign(Signing.STANDARD, SECRETS[:1], b"{}", timestamp=now))
    headers["webhook-signature"] += " " + symmetric["webhook-signature"]
    assert standardwebhooks.Webhook(SECRETS[0]).verify("{}", headers) == {}


def test_rotation_of_ed25519_overlaps() -> None:
    """Two private keys sign, the newest first, and either public key fits; a third does not (B-93, C-27)."""
    scheme, body = Signing.STANDARD_ED25519, b'{"a":1}'
    headers = _parse(_sign(scheme, [secret.reveal() for secret in PRIVATE[:2]], body))
    alone = _parse(_sign(scheme, [PRIVATE[0].reveal()], body))["webhook-signature"]
    assert headers["webhook-signature"].split(" ")[0] == alone
    public = [public_key_of(secret) for secret in PRIVATE]
    for known in ([public[0]], [public[1]], [public[2], public[1]]):
        verify(scheme, secrets=known, headers=headers, body=body, now=NOW)
    with pytest.raises(InvalidInput) as refused:
        verify(scheme, secrets=[public[2]], headers=headers, body=body, now=NOW)
    assert refused.value.code == "bad_signature"


@given(data=st.data())
def test_any_change_under_ed25519_is_noticed(data: st.DataObject) -> None:
    """Another body, time, id or signature does not pass, and nothing but InvalidInput is raised."""
    headers = _parse(_sign(Signing.STANDARD_ED25519, [PRIVATE[0].reveal()], b"body"))
    name = data.draw(st.sampled_from(["body", *headers]))
    body = b"body"
    if name == "body":
        body = data.draw(st.binary().filter(lambda other: other != body))
    else:
        original = headers[name]
        versions = st.sampled_from(["", "v1a,"])
        changed = st.tuples(versions, st.text(max_size=80)).map("".join)
        headers[name] = data.draw(changed.filter(lambda other: other.strip() != original))
    with pytest.raises(InvalidInput):
        verify(Signing.STANDARD_ED25519, secrets=[public_key_of(PRIVATE[0])], headers=headers, body=body, now=NOW + 5)


SCHEMES = pytest.mark.parametrize("scheme", [Signing.RELAY, Signing.STANDARD])


@SCHEMES
def test_rotation_overlaps(scheme: Signing) -> None:
    """While two secrets sign, a receiver with either passes; one with neither does not (C-27)."""
    body = b'{"a":1}'
    headers = _parse(_sign(scheme, SECRETS[:2], body))
    keys = [signing_key(scheme, secret) for secret in SECRETS]
    for known in ([keys[0]], [keys[1]], [keys[2], keys[1]]):
        verify(scheme, secrets=known, headers=headers, body=body, now=NOW)
    with pytest.raises(InvalidInput) as refused:
        verify(scheme, secrets=[keys[2]], headers=headers, body=body, now=NOW)
    assert refused.value.code == "bad_signature"


@SCHEMES
@pytest.mark.parametrize("age", [-TOLERANCE_SECS - 1, -TOLERANCE_SECS, 0, TOLERANCE_SECS, TOLERANCE_SECS + 1])
def test_freshness(scheme: Signing, age: int) -> None:
    """A signature holds for the tolerance, in the past and in the future, and not a second longer."""
    headers = _parse(_sign(scheme, SECRETS[:1], b"x"))
    keys = [signing_key(scheme, SECRETS[0])]
    if abs(age) <= TOLERANCE_SECS:
        verify(scheme, secrets=keys, headers=headers, body=b"x", now=NOW + age)
    else:
        with pytest.raises(InvalidInput) as refused:
            verify(scheme, secrets=keys, headers=headers, body=b"x", now=NOW + age)
        assert refused.value.code == "stale"


@SCHEMES
@given(data=st.data())
def test_any_change_is_noticed(scheme: Signing, data: st.DataObject) -> None:
    """Another body, time, id or signature does not pass, and nothing but InvalidInput is raised."""
    headers = _parse(_sign(scheme, SECRETS[:1], b"body"))
    signed: tuple[str, ...] = ("Relay-Timestamp", "Relay-Signature")
    if scheme is Signing.STANDARD:
        signed = ("webhook-id", "webhook-timestamp", "webhook-signature")
    name = data.draw(st.sampled_from(["body", *signed]))
    body = b"body"
    if name == "body":
        body = data.draw(st.binary().filter(lambda other: other != body))
    else:
        original = headers[name]
        headers[name] = data.draw(st.text(max_size=80).filter(lambda other: other.strip() != original))
        # The signature itself may be repeated among others.
        if name == signed[-1] and original in headers[name]:
            return
    with pytest.raises(InvalidInput):
        verify(scheme, secrets=[signing_key(scheme, SECRETS[0])], headers=headers, body=body, now=NOW)


@SCHEMES
def test_unknown_versions_are_passed_over(scheme: Signing) -> None:
    """Signatures of versions to come stand beside ours without harm."""
    headers = _parse(_sign(scheme, SECRETS[:1], b"x"))
    name = "Relay-Signature" if scheme is Signing.RELAY else "webhook-signature"
    headers[name] = f"v9=00,{headers[name]}" if scheme is Signing.RELAY else f"v1a,AAAA {headers[name]}"
    headers = {key.upper(): value for key, value in headers.items()}
    verify(scheme, secrets=[signing_key(scheme, SECRETS[0])], headers=headers, body=b"x", now=NOW)


@SCHEMES
def test_each_missing_header_is_named(scheme: Signing) -> None:
    """A request without one of the headers is refused, and the error says which."""
    complete = _parse(_sign(scheme, SECRETS[:1], b"x"))
    needed = list(complete)[:2] if scheme is Signing.RELAY else list(complete)
    for name in needed:
        headers = {key: value for key, value in complete.items() if key != name}
        with pytest.raises(InvalidInput) as refused:
            verify(scheme, secrets=[signing_key(scheme, SECRETS[0])], headers=headers, body=b"x", now=NOW)
        assert (refused.value.code, refused.value.field) == ("missing_signature", name)


def test_no_secret_is_a_mistake() -> None:
    """Verifying with no secret at all never passes: it raises as a mistake of the program."""
    for nothing in ([], [b""], [b"x", b""]):
        with pytest.raises(ValueError, match="no secret"):
            verify(Signing.RELAY, secrets=nothing, headers={}, body=b"", now=NOW)


@pytest.mark.parametrize("text", ["", " ", "\n", "whsec_", " whsec_\n"])
def test_an_empty_secret_has_no_key(text: str) -> None:
    """What holds nothing would sign as anybody can: no scheme has a key of it."""
    for scheme in (Signing.RELAY, Signing.STANDARD, Signing.STANDARD_ED25519):
        with pytest.raises(InvalidInput) as refused:
            signing_key(scheme, text)
        assert refused.value.code == "invalid_secret"


def test_keys() -> None:
    """The key is the whole text for relay, the decoded base64 for standard, from a str or a Secret."""
    text = "whsec_" + "QUJD" * 8
    assert signing_key(Signing.RELAY, Secret(text)) == text.encode()
    assert signing_key(Signing.STANDARD, Secret(text)) == b"ABC" * 8
    assert signing_key(Signing.RELAY, "whsec_demo") == b"whsec_demo"


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_demo!", "QUJD", "whsec_QUJ", "whsec_é"])
def test_secrets_that_have_no_key(text: str) -> None:
    """What is not whsec_ and base64 has no key under standard, and the error does not show it."""
    with pytest.raises(InvalidInput) as refused:
        signing_key(Signing.STANDARD, text)
    assert refused.value.code == "invalid_secret"


@pytest.mark.parametrize("text", ["", "whsk_", "whsk_" + "QUJD" * 10, SECRETS[0], "whsk_é"])
def test_secrets_that_hold_no_private_key(text: str) -> None:
    """What is not whsk_ and a key pair signs nothing under standard-ed25519 and has no public key."""
    with pytest.raises(InvalidInput) as refused:
        signing_key(Signing.STANDARD_ED25519, text)
    assert refused.value.code == "invalid_secret"
    with pytest.raises(InvalidInput):
        public_key_of(Secret(text))


def test_scheme_none_has_nothing_to_verify() -> None:
    """The scheme that does not sign has no key and no signature: to ask for either is a mistake of the program."""
    with pytest.raises(ValueError, match="none"):
        signing_key(Signing.NONE, SECRETS[0])
    with pytest.raises(ValueError, match="none"):
        verify(Signing.NONE, secrets=[b"x"], headers={}, body=b"", now=NOW)
