"""Postgres behind PgBouncer: in session mode Relay works as without, in any other no process starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psycopg
import pytest

from relay.core.errors import ConfigurationError
from relay.store import migrate
from relay.store.engine import make_hot_engine, way_to
from relay.store.pooler import Way
from tests.instance import instance
from tests.stack import SETTINGS, Stack, wait_until
from tests.surroundings.servers import pgbouncer
from tests.traffic import Traffic, at_rest, check, settle


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"pool_mode": "session"}, Way.SESSIONS),
        ({"pool_mode": "session", "server_round_robin": "1"}, Way.SESSIONS),
        ({"pool_mode": "transaction"}, Way.TRANSACTIONS),
        ({"pool_mode": "transaction", "server_round_robin": "1", "min_pool_size": "4"}, Way.TRANSACTIONS),
        ({"pool_mode": "statement"}, Way.TRANSACTIONS),
    ],
)
def test_the_way_is_told(database: str, settings: dict[str, str], way: Way) -> None:
    """However sessions are handed out, a pool that keeps them is told from one that does not, each time."""
    assert way_to(database) is Way.DIRECT
    with pgbouncer(database, **settings) as url:
        assert {way_to(url) for _ in range(5)} == {way}


@pytest.mark.parametrize("role", ["api", "publisher", "worker", "beat", "migrate", "keys rotate"])
def test_no_role_runs_through_a_pool_of_transactions(database: str, broker: str, role: str) -> None:
    """Though PgBouncer is told to swallow startup parameters: exit code 1, and a sentence that names the remedy."""
    with pgbouncer(database, pool_mode="transaction", ignore_startup_parameters="options") as url:
        ended = subprocess.run(
            [sys.executable, "-m", "relay.cli.main", *role.split()],
            env=os.environ | SETTINGS | {"DATABASE_URL": url, "RELAY_BROKER_URL": broker},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1, ended.stderr
    assert "pool_mode=session" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_engine_judges_for_itself(database: str) -> None:
    """Where the start could not ask, as the database was away, no connection is made later either."""
    with pgbouncer(database, pool_mode="transaction") as url:
        engine = make_hot_engine(url, name="test", size=2)
        with pytest.raises(ConfigurationError, match="PgBouncer"):
            engine.connect()
        engine.dispose()
        with instance(url) as api:
            assert api.event(api.admin("acme"), b'{"type": "test.made"}').status_code == 500
            ready = api.client.get("/readyz?for=ingest")
            assert ready.status_code == 503
            assert "pool_mode=session" in ready.text


def test_sessions_are_in_force(database: str) -> None:
    """Through session mode each connection has the settings that it asked for, and none of who had the session before."""
    with pgbouncer(database, pool_mode="session", default_pool_size="4") as url:
        engine = make_hot_engine(url, name="test", size=2)
        with engine.connect() as connection:
            found = connection.exec_driver_sql(
                "select current_setting('plan_cache_mode'), current_setting('enable_seqscan'), "
                "current_setting('statement_timeout'), current_setting('timezone')"
            ).one()
            assert tuple(found) == ("force_generic_plan", "off", "15s", "UTC")
        engine.dispose()
        for _ in range(4):
            with psycopg.connect(url) as other:
                assert other.execute("select current_setting('enable_seqscan')").fetchone() == ("on",)


def test_everything_works_in_session_mode(bare_database: str, broker: str) -> None:
    """Migrated and run through PgBouncer: all is delivered; a leader that is killed or frozen hands over."""
    with pgbouncer(bare_database, pool_mode="session", default_pool_size="60") as url:
        migrate.upgrade(url)
        with Stack(database_url=url, broker_url=broker) as stack, Traffic(stack, senders=2) as traffic:
            stack.endpoint("/verify")
            first, *_ = stack.start("publisher", "api", "worker", "beat")
            second = stack.launch("publisher")
            traffic.wait_accepted(50)
            first.signal(signal.SIGSTOP)
            second.wait_said("publishing", 30)
            first.kill()
            third = stack.launch("publisher")
            traffic.wait_accepted(50)
            second.kill()
            third.wait_said("publishing", 30)
            traffic.wait_accepted(50)
            traffic.stop()
            settle(stack)
            check(stack, traffic)
            assert set(traffic.answers) == {202}
            stack.sweeps_run()
            wait_until(lambda: stack.get("/readyz") == 200, 30, "the installation is ready")
            at_rest(stack)
