"""Public keys for receivers: read without an API key, right to the second, and kept by caches no longer than they hold."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from relay.core.model import Signing
from relay.core.secret import new_secret
from relay.core.signing import public_key_of, signature_headers, signing_key, verify
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRETS = [new_secret(bytes([n]) * 32, Signing.STANDARD_ED25519) for n in range(2)]


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_public_keys(relay: Instance) -> None:
    """B-91: the keys that sign now, as a JWK Set, to whoever asks; what a worker signs is verified with them."""
    endpoint_id = relay.endpoint(relay.key())["id"]
    public = [public_key_of(secret) for secret in SECRETS]
    relay.query(
        "update relay.endpoints set signing = 'standard-ed25519', public_key = %s, previous_public_key = %s, "
        "previous_secret_expires_at = now() + interval '1 hour' where id = %s",
        *public,
        endpoint_id,
    )
    path = f"/.well-known/webhook-keys/{endpoint_id}"

    answer = relay.client.get(path)
    assert answer.status_code == 200
    assert answer.headers.getlist("Cache-Control") == ["public, max-age=300"]
    keys = answer.get_json()["keys"]
    assert [_decode(key["x"]) for key in keys] == public
    for key in keys:
        assert (key["kty"], key["crv"], key["use"], key["alg"]) == ("OKP", "Ed25519", "sig", "EdDSA")
        canonical = json.dumps({name: key[name] for name in ("crv", "kty", "x")}, separators=(",", ":"))
        assert _decode(key["kid"]) == hashlib.sha256(canonical.encode()).digest()
    lines = signature_headers(
        Signing.STANDARD_ED25519,
        secrets=[signing_key(Signing.STANDARD_ED25519, secret) for secret in SECRETS],
        delivery_id="d",
        event_id=None,
        event_type=None,
        attempt=1,
        timestamp=1_700_000_000,
        body=b"{}",
    )
    headers = dict(line.split(": ", 1) for line in lines)
    for key in keys:
        verify(Signing.STANDARD_ED25519, secrets=[_decode(key["x"])], headers=headers, body=b"{}", now=1_700_000_000)

    # Soon over, then over: caches must not outlive it, and the previous key goes without any sweep (B-93).
    moved = "update relay.endpoints set previous_secret_expires_at = now() + make_interval(secs => %s) where id = %s"
    relay.query(moved, 60, endpoint_id)
    age = int(relay.client.get(path).headers["Cache-Control"].removeprefix("public, max-age="))
    assert 30 <= age <= 60
    relay.query(moved, 0, endpoint_id)
    answer = relay.client.get(path)
    assert [_decode(key["x"]) for key in answer.get_json()["keys"]] == public[:1]
    assert answer.headers["Cache-Control"] == "public, max-age=300"


def test_nothing_is_kept_for_longer_than_two_keys_sign(database: str) -> None:
    """B-93: a cache that was filled just before a rotation is stale by the time the old key signs no more."""
    with instance(database, RELAY_SECRET_OVERLAP_SECS="25") as relay:
        relay.workspace()
        id_ = relay.endpoint(relay.key())["id"]
        changed = "update relay.endpoints set signing = 'standard-ed25519', public_key = %s where id = %s"
        relay.query(changed, public_key_of(SECRETS[0]), id_)
        answer = relay.client.get(f"/.well-known/webhook-keys/{id_}")
        assert answer.headers["Cache-Control"] == "public, max-age=25"


def test_who_has_none(relay: Instance) -> None:
    """Another scheme, a deleted endpoint, an unknown id and no id at all are one and the same 404, not to be kept."""
    key = relay.key()
    others = relay.endpoint(key, signing="standard")["id"]
    deleted = relay.endpoint(key)["id"]
    relay.query(
        "update relay.endpoints set signing = 'standard-ed25519', public_key = %s, deleted_at = now() where id = %s",
        public_key_of(SECRETS[0]),
        deleted,
    )
    said = set()
    for wanted in (others, deleted, str(uuid4()), "x"):
        answer = relay.client.get(f"/.well-known/webhook-keys/{wanted}")
        assert (answer.status_code, answer.mimetype) == (404, "application/problem+json")
        assert answer.headers["Cache-Control"] == "no-store"
        said.add(answer.text)
    assert len(said) == 1
