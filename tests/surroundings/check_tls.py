"""Postgres and Redis over TLS: everything runs, each connection is encrypted, and who they are is checked."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest
import redis
import requests

from relay.embedded.binaries import find_postgres, find_redis
from relay.embedded.home import discard, make_base
from relay.embedded.postgres import PostgresServer
from relay.outbox.stream import connect
from relay.store import migrate
from tests.places import new_place
from tests.stack import Stack, quiet_port, wait_until
from tests.surroundings.servers import Certificates, folder, make_certificates, redis_server
from tests.traffic import Traffic, at_rest, check, settle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder for certificates and data."""
    with folder() as made:
        yield made


@pytest.fixture
def certificates(home: Path) -> Certificates:
    """What the servers show."""
    return make_certificates(home / "own")


@pytest.fixture
def postgres(certificates: Certificates) -> Iterator[str]:
    """A migrated Postgres that takes TLS, and its URL, without parameters."""
    if find_postgres().wheel_parts:
        pytest.fail("the wheel's Postgres has no TLS: apt-get install -y postgresql")
    base = make_base(new_place())
    settings = {
        "fsync": "off",
        "ssl": "on",
        "ssl_cert_file": str(certificates.certificate),
        "ssl_key_file": str(certificates.key),
    }
    server = PostgresServer(base, say=lambda _line: None, settings=settings)
    try:
        server.start()
        migrate.upgrade(server.url)
        yield server.url
    finally:
        server.stop()
        discard(base)


@pytest.fixture
def tls_redis(home: Path, certificates: Certificates) -> Iterator[str]:
    """A Redis that takes nothing but TLS, and its URL, without parameters."""
    if find_redis().wheel_parts:
        pytest.fail("the wheel's Valkey has no TLS: apt-get install -y redis-server")
    port, password = quiet_port(), secrets.token_hex(8)
    settings = {
        "bind": "127.0.0.1",
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": str(certificates.certificate),
        "tls-key-file": str(certificates.key),
        "tls-ca-cert-file": str(certificates.authority),
        "tls-auth-clients": "no",
        "requirepass": password,
        "save": '""',
    }
    url = f"rediss://:{password}@127.0.0.1:{port}/1"
    with redis_server(home / "redis", settings, connect(f"{url}?ssl_ca_certs={certificates.authority}")):
        yield url


def test_everything_works_over_tls(postgres: str, tls_redis: str, certificates: Certificates) -> None:
    """With both servers' certificates checked all is delivered, beat's ticks arrive, and no session is in the clear."""
    database = f"{postgres}?sslmode=verify-full&sslrootcert={certificates.authority}"
    broker = f"{tls_redis}?ssl_ca_certs={certificates.authority}"
    auth, port = ("flower", "flower-for-tests"), quiet_port()
    with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=2) as traffic:
        stack.endpoint("/verify")
        roles = stack.start("api", "publisher", "worker", "beat")
        flower = stack.launch("flower", RELAY_FLOWER_AUTH=":".join(auth), RELAY_FLOWER_BIND=f"127.0.0.1:{port}")
        traffic.wait_accepted(50)
        traffic.stop()
        settle(stack)
        check(stack, traffic)
        stack.sweeps_run()
        wait_until(lambda: stack.get("/readyz") == 200, 30, "the installation is ready")
        clear = "select count(*) filter (where not ssl), count(*) from pg_stat_ssl join pg_stat_activity using (pid)"
        (unsafe, sessions) = stack.rows(f"{clear} where application_name like 'relay %%'")[0]
        assert unsafe == 0
        assert sessions > 4

        def flower_sees() -> bool:
            with contextlib.suppress(requests.ConnectionError):
                page = requests.get(f"http://127.0.0.1:{port}/broker", auth=auth, timeout=10)
                return page.status_code == 200 and "relay.control" in page.text
            return False

        wait_until(flower_sees, 60, "Flower shows the broker's queue")
        at_rest(stack)
        for role in (*roles, flower):
            text = role.log.read_text("utf-8", "replace")
            assert "CERT_NONE" not in text
            assert "insecure" not in text.lower()
            assert tls_redis.split("@", maxsplit=1)[0].removeprefix("rediss://:") not in text, (
                "a password is in the log"
            )


def test_a_server_with_a_strangers_certificate_is_not_used(
    postgres: str, tls_redis: str, certificates: Certificates, home: Path
) -> None:
    """Neither without an authority that signed it nor under another name; Celery's own connection is no exception."""
    strange = make_certificates(home / "strange").authority
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        psycopg.connect(f"{postgres}?sslmode=verify-full&sslrootcert={strange}")
    with pytest.raises(psycopg.OperationalError, match="does not match host name"):
        named = postgres.replace("127.0.0.1", "localhost")
        psycopg.connect(f"{named}?sslmode=verify-full&sslrootcert={certificates.authority}")
    for wrong in (
        tls_redis,
        f"{tls_redis}?ssl_ca_certs={strange}",
        f"{tls_redis.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={certificates.authority}",
    ):
        with connect(wrong) as client, pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            client.ping()
        program = (
            "import sys; from relay.config_sources import load_settings; from relay.tasks.app import make_app;"
            "make_app(load_settings({'RELAY_BROKER_URL': sys.argv[1]})).connection().ensure_connection(max_retries=1)"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program, wrong], capture_output=True, text=True, timeout=60, check=False
        )
        assert "certificate verify failed" in ended.stderr
