"""TLS: which certificates are taken, which faults are the receiver's, and whose client certificate goes where."""

from __future__ import annotations

import datetime as dt
import ipaddress
import itertools
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from relay.core.observation import Fault, Observation
from tests.hostile import Peer, Receiver, Sender, keep_answering

if TYPE_CHECKING:
    from pathlib import Path

NAME = "good.test"
NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


@dataclass
class Identity:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def issue(
    name: str, issuer: Identity | None = None, *, start: dt.datetime = NOW - DAY, end: dt.datetime = NOW + DAY
) -> Identity:
    """A certificate for `name` and 127.0.0.1; without an issuer a self-signed authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    authority_key = issuer.key if issuer else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if issuer is not None:
        builder = builder.add_extension(usage, critical=False)
    return Identity(builder.sign(authority_key, hashes.SHA256()), key)


AUTHORITY = issue("Test authority")


@pytest.fixture(scope="module")
def ca_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    path.write_bytes(AUTHORITY.certificate_pem)
    return str(path)


def context(identity: Identity, folder: Path, *, ask: bool = False) -> ssl.SSLContext:
    """A server's context; with `ask` it requires a client certificate of the authority's."""
    path = folder / f"{identity.certificate.serial_number}.pem"
    path.write_bytes(identity.certificate_pem + identity.key_pem)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(path)
    if ask:
        made.load_verify_locations(cadata=AUTHORITY.certificate_pem.decode())
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def observe(url: str, ca_file: str, **changes: Any) -> Observation:
    with Sender(ca_file=ca_file) as sender:
        seen = sender.send(url, addresses=("127.0.0.1",), **changes).observation
    assert seen is not None
    return seen


def test_good_certificate_is_taken(ca_file: str, tmp_path: Path) -> None:
    """A certificate of a known authority for the right name makes a delivery, its handshake timed."""
    with Receiver(keep_answering(), tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file)

    assert (seen.status, seen.fault, seen.sends) == (200, None, 1)
    assert 0 < seen.tls_us < 5_000_000


def test_certificate_for_an_address_is_taken(ca_file: str, tmp_path: Path) -> None:
    """A literal address is matched against the certificate's addresses."""
    with Receiver(keep_answering(), tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        assert observe(receiver.url(), ca_file).status == 200


BAD: dict[str, tuple[Identity, str]] = {
    "wrong name": (issue("other.test", AUTHORITY), "name"),
    "expired": (issue(NAME, AUTHORITY, start=NOW - 2 * DAY, end=NOW - DAY), "expired"),
    "not yet valid": (issue(NAME, AUTHORITY, start=NOW + DAY, end=NOW + 2 * DAY), "not yet valid"),
    "self-signed": (issue(NAME), "self-signed"),
    "unknown authority": (issue(NAME, issue("Another authority")), "issuer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_certificate_is_a_tls_fault(ca_file: str, tmp_path: Path, name: str) -> None:
    """Nothing is sent to a receiver that cannot prove who it is; the text says what to mend."""
    identity, word = BAD[name]

    with Receiver(keep_answering(), tls=context(identity, tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file)

    assert (seen.fault, seen.status, seen.sends) == (Fault.TLS, None, 0)
    assert word in (seen.text or "")
    assert receiver.requests == []


def test_own_authorities_are_not_in_force_by_default(tmp_path: Path) -> None:
    """Without `ca_file` the public authorities decide, and a local one is unknown."""
    with Receiver(keep_answering(), tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver, Sender() as sender:
        seen = sender.send(receiver.url(host=NAME), addresses=("127.0.0.1",)).observation

    assert seen is not None
    assert seen.fault is Fault.TLS


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad\r\n\r\n", b"SSH-2.0-x\r\n", b""])
def test_no_tls_on_the_port_is_a_tls_fault(ca_file: str, banner: bytes) -> None:
    """A receiver that answers the handshake with something else, or hangs up, is a TLS fault."""

    def script(peer: Peer) -> None:
        peer.socket.recv(65536)
        peer.send(banner)

    with Receiver(script) as receiver:
        seen = observe(receiver.url(host=NAME).replace("http:", "https:"), ca_file)

    assert (seen.fault, seen.sends) == (Fault.TLS, 0)


def test_silence_in_the_handshake_is_a_time_out(ca_file: str) -> None:
    """A handshake that does not come is bounded by the connect time-out."""
    with Receiver(lambda peer: peer.hold()) as receiver:
        seen = observe(receiver.url(host=NAME).replace("http:", "https:"), ca_file, connect_timeout_ms=300)

    assert (seen.fault, seen.text) == (Fault.TIMEOUT, "timed out in the TLS handshake")
    assert 290_000 <= seen.total_us <= 600_000


def test_session_ticket_does_not_begin_the_reply(ca_file: str, tmp_path: Path) -> None:
    """Over TLS, too, a receiver may think longer than the idle time-out."""

    def script(peer: Peer) -> None:
        peer.read()
        peer._receiver.ending.wait(0.6)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with Receiver(script, tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file, idle_timeout_ms=100)

    assert seen.status == 200


def test_close_without_notify_after_the_answer_is_an_answer(ca_file: str, tmp_path: Path) -> None:
    """A body that ends with the bare connection is flagged, the status stands."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nok")

    with Receiver(script, tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file)

    assert (seen.status, seen.body_incomplete) == (200, True)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_client_certificate_that_is_wanted_and_missing_is_a_tls_fault(
    ca_file: str, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """With TLS 1.3 the refusal comes only after the request went out: a TLS fault all the same."""
    tls = context(issue(NAME, AUTHORITY), tmp_path, ask=True)
    tls.minimum_version = tls.maximum_version = version

    with Receiver(keep_answering(), tls=tls) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file)

    assert (seen.fault, seen.status) == (Fault.TLS, None)


CLIENTS = {"none": None, "one": issue("one.client", AUTHORITY), "two": issue("two.client", AUTHORITY)}


def test_client_certificate_is_shown_by_its_own_requests_alone(ca_file: str, tmp_path: Path) -> None:
    """On reused handles and kept connections, each request shows its own certificate or none (B-85, B-86)."""
    tls = context(issue(NAME, AUTHORITY), tmp_path, ask=True)
    tls.verify_mode = ssl.CERT_OPTIONAL
    shown: list[str] = []

    def script(peer: Peer) -> None:
        while True:
            peer.read()
            assert isinstance(peer.socket, ssl.SSLSocket)
            certificate = peer.socket.getpeercert()
            shown.append(certificate["subject"][0][0][1].partition(".")[0] if certificate else "none")
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    wanted = [name for pair in itertools.product(CLIENTS, CLIENTS) for name in pair]
    with Receiver(script, tls=tls) as receiver, Sender(ca_file=ca_file) as sender:
        for name in wanted:
            identity = CLIENTS[name]
            completed = sender.send(
                receiver.url(host=NAME),
                addresses=("127.0.0.1",),
                certificate=identity.certificate_pem if identity else None,
                private_key=identity.key_pem if identity else None,
            )
            assert completed.observation is not None
            assert completed.observation.status == 200

    assert shown == wanted


@pytest.mark.parametrize(("certificate", "key"), [(b"nonsense", b"nonsense"), ("one", "two")])
def test_client_certificate_that_does_not_work_is_a_fault_of_ours(
    ca_file: str, tmp_path: Path, certificate: Any, key: Any
) -> None:
    """An unusable certificate or a key that does not fit it is internal, and nothing is sent."""
    if isinstance(certificate, str):
        certificate, key = CLIENTS[certificate].certificate_pem, CLIENTS[key].key_pem  # type: ignore[union-attr]  # both are set

    with Receiver(keep_answering(), tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), ca_file, certificate=certificate, private_key=key)

    assert (seen.fault, seen.sends) == (Fault.INTERNAL, 0)


def test_missing_authorities_file_is_a_fault_of_ours(tmp_path: Path) -> None:
    """Without its authorities the engine trusts nobody, and blames nobody."""
    with Receiver(keep_answering(), tls=context(issue(NAME, AUTHORITY), tmp_path)) as receiver:
        seen = observe(receiver.url(host=NAME), str(tmp_path / "absent.pem"))

    assert (seen.fault, seen.sends) == (Fault.INTERNAL, 0)
