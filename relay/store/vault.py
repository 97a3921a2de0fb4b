"""Secrets at rest: AES-256-GCM, the owner's id as associated data, a key id in front.

A sealed value is `length of key id (1 byte), key id, nonce (12 bytes), ciphertext and tag`.
The associated data ties it to its row: moved to another endpoint it does not open.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.core.errors import SealedSecretUnreadable, Unavailable
from relay.core.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

#: NIST SP 800-38D: 96 random bits a message.
_NONCE_BYTES = 12


class Vault:
    """Seals with the first master key, opens with any."""

    __slots__ = ("_ciphers", "_first")

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """Take `keys`: ids and 32-byte keys, the one that seals first. Empty: nothing can be sealed or opened."""
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._first = next(iter(keys), None)

    def __repr__(self) -> str:
        return f"Vault(keys={list(self._ciphers)})"

    @property
    def key_ids(self) -> list[str]:
        """The ids of the keys held, the sealing one first."""
        return list(self._ciphers)

    def seal(self, secret: Secret, *, owner: UUID) -> bytes:
        """Encrypt `secret` for `owner`. Raises Unavailable where this process has no master key."""
        if self._first is None:
            raise Unavailable("this process has no RELAY_MASTER_KEYS, so it can make or change no secret")
        nonce = os.urandom(_NONCE_BYTES)
        key_id = self._first.encode()
        sealed = self._ciphers[self._first].encrypt(nonce, secret.reveal().encode(), owner.bytes)
        return bytes([len(key_id)]) + key_id + nonce + sealed

    def reseal(self, sealed: bytes, *, owner: UUID) -> bytes | None:
        """Seal anew with the first key what another sealed; None for what that one sealed, and opens.

        Raises as `open` and `seal` do.
        """
        secret = self.open(sealed, owner=owner)
        return None if key_id_of(sealed) == self._first else self.seal(secret, owner=owner)

    def open(self, sealed: bytes, *, owner: UUID) -> Secret:
        """Decrypt what `seal` made for `owner`. Raises SealedSecretUnreadable, which names the key and never the value."""
        length = sealed[0] if sealed else 0
        key_id = key_id_of(sealed)
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise SealedSecretUnreadable(f"master key {key_id!r} is not in this process's RELAY_MASTER_KEYS")
        nonce, data = sealed[1 + length : 1 + length + _NONCE_BYTES], sealed[1 + length + _NONCE_BYTES :]
        try:
            return Secret(cipher.decrypt(nonce, data, owner.bytes).decode())
        except (InvalidTag, ValueError) as error:
            raise SealedSecretUnreadable(
                f"a secret sealed with master key {key_id!r} does not open: that key has another value here"
            ) from error


def key_id_of(sealed: bytes) -> str:
    """Return the id of the master key that a sealed value names."""
    length = sealed[0] if sealed else 0
    return sealed[1 : 1 + length].decode("utf-8", "replace")
