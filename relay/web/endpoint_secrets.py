"""Replacing an endpoint's secret while the receivers still know the old one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flask import Blueprint, Response

from relay.core.model import Scope, Signing
from relay.core.secret import RANDOM_BYTES, new_secret
from relay.core.signing import public_key_of
from relay.core.transports import TRANSPORTS
from relay.store import endpoint_secrets
from relay.web import models
from relay.web.endpoint_life import optional_object, owned
from relay.web.endpoint_models import SecretRequest, check_own_secret
from relay.web.endpoints import by, locked, sealed
from relay.web.render import json_response, optional_time

if TYPE_CHECKING:
    from relay.web import answers
    from relay.web.auth import Caller, Gate
    from relay.web.parts import Api


def routes(api: Api, gate: Gate) -> Blueprint:
    """Make the route of rotation."""
    blueprint = Blueprint("endpoint_secrets", __name__)

    @blueprint.post("/v1/endpoints/<endpoint_id>/rotate-secret")
    @gate.scoped(Scope.WRITE)
    def rotate_secret(caller: Caller, endpoint_id: str) -> Response:
        """Replace an endpoint's secret; 200 with the new one, shown this once, and until when the old one signs too."""
        asked = models.parse(SecretRequest, optional_object())
        acting = by(caller, endpoint_id)
        with api.engine.begin() as connection:
            stored = owned(locked(connection, acting))
            is_pair = stored.public_key is not None
            signing = Signing.STANDARD_ED25519 if is_pair else Signing.RELAY
            own = check_own_secret(asked.secret, transport=stored.transport, signing=signing)
            key = new_secret(os.urandom(RANDOM_BYTES), signing) if own is None else own
            expires_at = endpoint_secrets.rotate(
                connection,
                acting,
                sealed=sealed(api.vault, key, acting.endpoint_id),
                public_key=public_key_of(key) if is_pair else None,
                # A platform knows one token at a time.
                overlap_secs=0 if stored.transport in TRANSPORTS else api.settings.secret_overlap_secs,
            )
        shown: answers.RotatedSecret = {
            "id": str(acting.endpoint_id),
            "secret": key.reveal(),
            "previous_secret_expires_at": optional_time(expires_at),
        }
        return json_response(shown)

    return blueprint
