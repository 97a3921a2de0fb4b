"""A client's certificate and key for mutual TLS, judged before they are stored.

libcurl would take a key of another certificate, or an encrypted one, and fail at every send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from relay.core.errors import InvalidInput
from relay.core.secret import Secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

#: Certificates in a chain, the client's own among them.
MAX_CHAIN: Final = 10
#: Bits: OpenSSL's default security level takes no shorter RSA key.
MIN_RSA_BITS: Final = 2048

_PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey


def check_client_certificate(
    certificate: str, private_key: Secret, field: str = "client_certificate"
) -> tuple[str, Secret]:
    """Return a PEM chain and its PEM key (PKCS #8), written anew, so that nothing but them is stored.

    The chain begins with the client's own certificate (RFC 8446 section 4.4.2). Whether it is still in force is not
    looked at: receivers judge that. Raises InvalidInput, without the key, for what is no PEM, an encrypted key, a kind
    of key that TLS clients do not use, and a key that is not the first certificate's.
    """
    key = _load_key(private_key, f"{field}.private_key")
    chain = _load_chain(certificate, f"{field}.certificate")
    try:
        fits = [_spelled(one.public_key()) == _spelled(key.public_key()) for one in chain]
    except (ValueError, UnsupportedAlgorithm):
        _refuse("invalid_certificate", "A certificate's key cannot be read: give another.", f"{field}.certificate")
    if not fits[0]:
        remedy = "put its certificate first" if any(fits) else "give the key that belongs to it"
        _refuse("key_mismatch", f"The key is not that of the first certificate: {remedy}.", f"{field}.private_key")
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return "".join(one.public_bytes(Encoding.PEM).decode() for one in chain), Secret(text)


def _load_chain(text: str, field: str) -> list[x509.Certificate]:
    try:
        chain = x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        _refuse("invalid_certificate", "This is no certificate in PEM: begin with -----BEGIN CERTIFICATE-----", field)
    if len(chain) > MAX_CHAIN:
        _refuse("invalid_certificate", f"There are more than {MAX_CHAIN} certificates: leave out the root.", field)
    return chain


def _load_key(text: Secret, field: str) -> _PrivateKey:
    try:
        key = load_pem_private_key(text.reveal().encode(), password=None)
    except TypeError:
        _refuse("encrypted_key", "The key is encrypted: give it without its passphrase; it is stored sealed.", field)
    except (ValueError, UnsupportedAlgorithm):
        _refuse("invalid_key", "This is no private key in PEM: begin with -----BEGIN PRIVATE KEY-----", field)
    if not isinstance(key, _PrivateKey):
        _refuse("invalid_key", "The key is of a kind that TLS clients do not use: take RSA, EC or Ed25519.", field)
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < MIN_RSA_BITS:
        _refuse("invalid_key", f"The RSA key is too short: it needs {MIN_RSA_BITS} bits at least.", field)
    return key


def _spelled(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _refuse(code: str, message: str, field: str) -> NoReturn:
    # From None: the library's own error may quote what it read.
    raise InvalidInput(message, field=field, code=code) from None
