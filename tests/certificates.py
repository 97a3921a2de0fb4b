"""Client certificates for tests."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization import KeySerializationEncryption

    Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey


def self_signed(key: Key | None = None) -> tuple[str, str]:
    """Return a certificate that signs itself and its key, both PEM; by default of a new EC key."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client.test")])
    now = dt.datetime.now(dt.UTC)
    algorithm = None if isinstance(key, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)) else hashes.SHA256()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, algorithm)
    )
    return certificate.public_bytes(Encoding.PEM).decode(), key_pem(key)


def key_pem(
    key: Key, form: PrivateFormat = PrivateFormat.PKCS8, encryption: KeySerializationEncryption | None = None
) -> str:
    """Write a private key as PEM."""
    return key.private_bytes(Encoding.PEM, form, encryption or NoEncryption()).decode()
