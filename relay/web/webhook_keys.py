"""Public keys of endpoints that sign with ed25519, for receivers: a JWK Set (RFC 7517) that anybody may read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Final

from flask import Blueprint, Response

from relay.store import webhook_keys
from relay.web.parts import path_id
from relay.web.problems import Problem
from relay.web.render import json_response

if TYPE_CHECKING:
    from relay.web import answers
    from relay.web.parts import Api

#: Seconds for which an answer may be kept; less where a key's time ends before, or two keys sign together for less:
#: what was kept from before a rotation must be gone when the old key is.
MAX_AGE_SECS: Final = 300


def routes(api: Api) -> Blueprint:
    """Make the route of public keys. It takes no API key."""
    blueprint = Blueprint("webhook_keys", __name__)
    longest = min(MAX_AGE_SECS, api.settings.secret_overlap_secs)

    @blueprint.get("/.well-known/webhook-keys/<endpoint_id>")
    def get_webhook_keys(endpoint_id: str) -> Response:
        """List the keys that sign now: the current one, then the one before it while both do."""
        wanted = path_id(endpoint_id)
        # Not the hot pool: whoever asks without a key must not stand in the way of ingest.
        with api.engine.connect() as connection:
            found = wanted and webhook_keys.find(connection, wanted)
        if not found:
            raise Problem(
                404,
                "unknown_endpoint",
                "There are no public keys of such an endpoint: check the id, and that the endpoint's signing is "
                "standard-ed25519.",
            )
        keys = [found.current] if found.previous is None else [found.current, found.previous]
        shown: answers.PublicKeys = {"keys": [_jwk(key) for key in keys]}
        response = json_response(shown)
        age = longest if found.previous_ends_in is None else min(longest, int(found.previous_ends_in))
        response.headers["Cache-Control"] = f"public, max-age={age}"
        return response

    return blueprint


def _jwk(key: bytes) -> answers.PublicKey:
    """A key as RFC 8037 section 2 has it; its id is its thumbprint (RFC 7638), so it stays the same everywhere."""
    required = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(key)}
    thumbprint = hashlib.sha256(json.dumps(required, separators=(",", ":")).encode()).digest()
    return {
        "crv": required["crv"],
        "kty": required["kty"],
        "x": required["x"],
        "kid": _base64url(thumbprint),
        "use": "sig",
        "alg": "EdDSA",
    }


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
