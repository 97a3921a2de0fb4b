"""Client certificates (B-86): what is taken, how it is stored, and what is refused before a send could fail on it."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from relay.core.certificate import MAX_CHAIN, check_client_certificate
from relay.core.errors import InvalidInput
from relay.core.secret import Secret
from tests.certificates import key_pem, self_signed

EC = ec.generate_private_key(ec.SECP256R1())
CERTIFICATE, KEY = self_signed(EC)
OTHER_CERTIFICATE, OTHER_KEY = self_signed()


@pytest.mark.parametrize(
    "key",
    [EC, ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(public_exponent=65537, key_size=2048)],
    ids=["ec", "ed25519", "rsa"],
)
def test_fitting_pairs_are_taken(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey,
) -> None:
    """A key of a usual kind that is the certificate's own is taken, and comes out as it went in."""
    certificate, pem = self_signed(key)
    assert check_client_certificate(certificate, Secret(pem)) == (certificate, Secret(pem))


def test_only_certificates_and_key_are_stored() -> None:
    """Text around the PEM goes, the key comes out as PKCS #8, and the chain stays in its order."""
    chain, key = check_client_certificate(
        f"subject=client\n{CERTIFICATE}issuer=other\n{OTHER_CERTIFICATE}",
        Secret("Bag Attributes\n" + key_pem(EC, PrivateFormat.TraditionalOpenSSL)),
    )
    assert chain == CERTIFICATE + OTHER_CERTIFICATE
    assert key == Secret(KEY)


@pytest.mark.parametrize(
    ("certificate", "key", "field", "code"),
    [
        ("", KEY, "c.certificate", "invalid_certificate"),
        ("nonsense é", KEY, "c.certificate", "invalid_certificate"),
        (KEY, KEY, "c.certificate", "invalid_certificate"),
        (CERTIFICATE[:200], KEY, "c.certificate", "invalid_certificate"),
        (CERTIFICATE * (MAX_CHAIN + 1), KEY, "c.certificate", "invalid_certificate"),
        (CERTIFICATE, "", "c.private_key", "invalid_key"),
        (CERTIFICATE, CERTIFICATE, "c.private_key", "invalid_key"),
        (CERTIFICATE, OTHER_KEY, "c.private_key", "key_mismatch"),
        (OTHER_CERTIFICATE + CERTIFICATE, KEY, "c.private_key", "key_mismatch"),
        (CERTIFICATE, key_pem(EC, encryption=BestAvailableEncryption(b"x")), "c.private_key", "encrypted_key"),
    ],
)
def test_what_would_fail_at_every_send_is_refused(certificate: str, key: str, field: str, code: str) -> None:
    """What is no PEM, an encrypted key, and a key that is not the first certificate's are refused by their field."""
    with pytest.raises(InvalidInput) as caught:
        check_client_certificate(certificate, Secret(key), "c")
    assert (caught.value.field, caught.value.code) == (field, code)
    assert caught.value.__cause__ is None
    assert not key.strip() or key.strip() not in str(caught.value)


def test_keys_that_tls_does_not_take_are_refused() -> None:
    """A short RSA key and a DSA key are refused."""
    short, dsa_key = rsa.generate_private_key(public_exponent=65537, key_size=1024), dsa.generate_private_key(2048)
    unusual = dsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    for pem in (key_pem(short), unusual):
        with pytest.raises(InvalidInput, match="key") as caught:
            check_client_certificate(CERTIFICATE, Secret(pem))
        assert caught.value.code == "invalid_key"
