"""Ed25519 (RFC 8032), apart from the rest of signing: who verifies HMACs alone needs no package `cryptography`.

The modules that sign and verify load this one when it comes to it.
"""

from __future__ import annotations

import functools

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

#: Keys kept ready to sign: to make one of its seed costs as much as a signature.
_KEYS_KEPT = 4096


def public_half(seed: bytes) -> bytes:
    """Return the 32 raw bytes of the public key that belongs to a seed of 32 bytes."""
    return _private_key(seed).public_key().public_bytes_raw()


def sign(seed: bytes, signed: bytes) -> bytes:
    """Return the signature, 64 bytes."""
    return _private_key(seed).sign(signed)


def fits(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    """Whether a signature is that of a public key (32 raw bytes, else ValueError) over these bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


@functools.lru_cache(maxsize=_KEYS_KEPT)
def _private_key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)
