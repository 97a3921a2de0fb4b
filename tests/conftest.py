"""Real servers for every test run: one Postgres and one Redis a pytest process, a database and a Redis prefix a test."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import hypothesis
import pytest
import redis

from relay.embedded.stack import Servers
from tests.databases import Databases
from tests.places import new_place

if TYPE_CHECKING:
    from collections.abc import Iterator

# Whoever runs this in the background (`nohup`, `&`) has these ignored, and what is started here would inherit that.
for _signal, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_signal, _usual)

# The machine is shared and small: a slow example is no failure.
hypothesis.settings.register_profile("relay", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("relay")

#: What is in the kernel outlives a killed server: only a power cut would need `fsync`. The data lies in memory, so the log
#: stays small. And nothing may analyse or clean up by itself: plans would depend on when.
POSTGRES_SETTINGS = {"fsync": "off", "max_wal_size": "256MB", "autovacuum": "off"}
#: A key for tests: 32 bytes, base64.
MASTER_KEYS = "test:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Postgres and Redis of this pytest process, made of nothing and thrown away."""
    base = new_place()
    with Servers(base, discard=True, say=lambda _line: None, postgres_settings=POSTGRES_SETTINGS) as started:
        yield started


@pytest.fixture(scope="session")
def databases(servers: Servers) -> Iterator[Databases]:
    """The databases of this pytest process."""
    assert servers.postgres_url is not None
    made = Databases(servers.postgres_url)
    yield made
    made.close()


@pytest.fixture
def database(databases: Databases) -> Iterator[str]:
    """The URL of an empty, migrated database of this test's own."""
    url = databases.take()
    yield url
    databases.give_back(url)


@pytest.fixture(scope="module")
def still_database(databases: Databases) -> Iterator[str]:
    """The URL of a migrated database that a module's tests share: for those that leave it as they found it."""
    url = databases.take()
    yield url
    databases.give_back(url)


@pytest.fixture
def bare_database(databases: Databases) -> Iterator[str]:
    """The URL of a database that nothing was done to yet."""
    url = databases.bare()
    yield url
    databases.drop(url)


@pytest.fixture
def broker(servers: Servers) -> Iterator[str]:
    """The URL of a Redis that holds nothing."""
    assert servers.redis_url is not None
    client = redis.Redis.from_url(servers.redis_url)
    client.flushall()
    yield servers.redis_url
    client.flushall()
    client.close()
