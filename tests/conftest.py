"""Real servers for every test run: one Postgres and one Redis a pytest process, a database and a Redis prefix a test."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psycopg
import pytest
import redis
import sqlalchemy as sa

from relay.embedded.stack import Servers
from relay.store.migrate import upgrade

if TYPE_CHECKING:
    from collections.abc import Iterator

# The machine is shared and small: a slow example is no failure.
hypothesis.settings.register_profile("relay", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("relay")

_TEMPLATE = "relay_template"
_numbers = itertools.count(1)

#: A key for tests: 32 bytes, base64.
MASTER_KEYS = "test:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Postgres and Redis of this pytest process, made of nothing and thrown away."""
    base = Path(tempfile.mkdtemp(prefix="relay-tests-"))
    # What is in the kernel outlives a killed server: only a power cut would need more, and syncing takes most of the time.
    with Servers(base, discard=True, say=lambda _line: None, postgres_settings={"fsync": "off"}) as started:
        yield started


@pytest.fixture(scope="session")
def template_url(servers: Servers) -> str:
    """A migrated database to copy: a test's own database costs milliseconds instead of a migration."""
    assert servers.postgres_url is not None
    admin = sa.make_url(servers.postgres_url)
    with psycopg.connect(servers.postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {_TEMPLATE}")
    upgrade(admin.set(database=_TEMPLATE).render_as_string(hide_password=False))
    return servers.postgres_url


@pytest.fixture
def database(template_url: str) -> Iterator[str]:
    """The URL of an empty, migrated database of this test's own."""
    name = f"relay_test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(template_url, autocommit=True) as connection:
        connection.execute(f"create database {name} template {_TEMPLATE}")
    yield sa.make_url(template_url).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(template_url, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def bare_database(servers: Servers) -> Iterator[str]:
    """The URL of a database that nothing was done to yet."""
    assert servers.postgres_url is not None
    name = f"relay_bare_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(servers.postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    yield sa.make_url(servers.postgres_url).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(servers.postgres_url, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def broker(servers: Servers) -> Iterator[str]:
    """The URL of a Redis that holds nothing."""
    assert servers.redis_url is not None
    client = redis.Redis.from_url(servers.redis_url)
    client.flushall()
    yield servers.redis_url
    client.flushall()
    client.close()
