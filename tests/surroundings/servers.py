"""What stands between Relay and its servers, or makes them other than `relay up` does: PgBouncer, TLS, sentinels.

Files here are called check_*.py: pytest takes them where they are named, which `make surroundings` does, and
`make test` does not. What is missing on the machine fails a check and is named.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from relay.embedded.account import choose_account
from relay.embedded.binaries import find_redis
from relay.embedded.launch import shim_argv
from tests.certificates import key_pem
from tests.stack import quiet_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Seconds for a server to answer.
START_SECS = 20.0


def program(name: str, package: str) -> str:
    """Return where a program is, or fail naming the Debian package that has it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        pytest.fail(f"{name} is not on this machine: apt-get install -y {package}")
    return found


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that servers under another user can read too."""
    made = Path(tempfile.mkdtemp(prefix="relay-around-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def process(argv: Sequence[str], log: Path, answers: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; it is at work when `answers` says so."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            shim_argv(argv, death_signal=signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: started.poll() is not None or answers(), START_SECS, f"{argv[0]} answers")
        assert started.poll() is None, log.read_text("utf-8", "replace")
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)
        started.wait(10)


@contextlib.contextmanager
def pgbouncer(server_url: str, **settings: str) -> Iterator[str]:
    """PgBouncer before the Postgres at `server_url`; yield the URL that leads through it."""
    argv = [program("pgbouncer", "pgbouncer"), "-q"]
    server = sa.make_url(server_url)
    with folder() as home:
        through = server.set(port=quiet_port())
        users = home / "users.txt"
        users.write_text(f'"{server.username}" "{server.password}"\n')
        own = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(through.port),
            "unix_socket_dir": "",
            "auth_type": "plain",
            "auth_file": str(users),
            **({"user": "nobody"} if os.geteuid() == 0 else {}),
            **settings,
        }
        lines = "".join(f"{name} = {value}\n" for name, value in own.items())
        (home / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={server.host} port={server.port}\n[pgbouncer]\n{lines}"
        )
        url = through.render_as_string(hide_password=False)
        with process([*argv, str(home / "pgbouncer.ini")], home / "log", lambda: _accepts(url)):
            yield url


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """An authority, and a certificate of its for 127.0.0.1, as files."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(home: Path, *, host: str = "127.0.0.1") -> Certificates:
    """Make them in `home`; the key is readable by the account that servers run as, and nobody else."""
    now = dt.datetime.now(dt.UTC)
    issuer = f"authority {x509.random_serial_number():x}"[:40]
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def sign(name: str, public: ec.EllipticCurvePublicKey, extensions: Sequence[x509.ExtensionType]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    home.mkdir(exist_ok=True)
    home.chmod(0o755)
    made = Certificates(authority=home / "ca.pem", certificate=home / "server.pem", key=home / "server.key")
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    made.authority.write_bytes(sign(issuer, ca_key.public_key(), [constraints]))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    made.certificate.write_bytes(sign(host, key.public_key(), [names]))
    made.key.touch(0o600)
    made.key.write_text(key_pem(key))
    account = choose_account(None)
    if account.switch:
        os.chown(made.key, account.uid, account.gid)
    return made


@contextlib.contextmanager
def redis_server(home: Path, settings: Mapping[str, str], client: redis.Redis, *flags: str) -> Iterator[int]:
    """A Redis with these settings (a sentinel, with `--sentinel`), once `client` gets an answer; yield its process id."""
    home.mkdir()
    file = home / "server.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    with client, process([str(find_redis().path), str(file), *flags], home / "log", lambda: _pongs(client)) as started:
        yield started.pid


def _accepts(url: str) -> bool:
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool)
    try:
        with engine.connect():
            return True
    except sa.exc.OperationalError as error:
        # Pooling by statement refuses the driver's transaction, which is an answer.
        return "statement pooling" in str(error)


def _pongs(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
