"""`relay up`: a whole installation on one machine, for a laptop and a first look."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import requests

from relay.cli.dev_state import DevState
from relay.config import Settings, load_settings
from relay.config_values import Bind
from relay.core.model import Scope
from relay.embedded.home import make_base
from relay.embedded.lock import FileLock
from relay.embedded.stack import Servers
from relay.embedded.supervisor import ProcessSpec, Supervisor
from relay.store import keys, workspaces
from relay.store.engine import make_engine
from relay.store.ids import new_id
from relay.store.migrate import upgrade

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

WORKSPACE = "default"


def run_up(*, workers: int, base: Path) -> int:
    """Start servers that no URL replaces, migrate, make keys, and run every role until Ctrl-C or SIGTERM."""
    # Until the supervisor heeds signals itself: a stop during start-up must stop the servers, too.
    signal.signal(signal.SIGTERM, _leave)
    click.echo(f"relay | starting; data and keys are in {base}")
    state = DevState(make_base(base))
    given = load_settings(os.environ, dotenv=Path(".env"))
    with FileLock(base / "up.lock", "relay up"):
        servers = Servers(
            base,
            want_postgres=given.database_url is None,
            want_redis=given.broker_url is None,
            run_as=given.run_as,
            say=lambda line: click.echo(f"relay | {line}"),
        )
        with servers:
            preset = state.settings()
            if servers.postgres_url is not None:
                preset["DATABASE_URL"] = servers.postgres_url
            if servers.redis_url is not None:
                preset["RELAY_BROKER_URL"] = servers.redis_url
            settings = load_settings(os.environ, dotenv=Path(".env"), preset=preset)
            assert settings.database_url is not None
            database_url = settings.database_url.get_secret_value()
            upgrade(database_url)
            key = _api_key(state, database_url)
            api_url = f"http://{_reachable(settings.bind)}"
            state.write_dev_env({"RELAY_URL": api_url, "RELAY_API_KEY": key})
            environment = dict(os.environ) | {name: value for name, value in preset.items() if name not in os.environ}
            greeting = _Greeting(settings, api_url, key)

            def watch() -> list[str]:
                greeting.try_say()
                return servers.revive()

            return Supervisor(_processes(environment, settings, workers), watch=watch).run()


def _processes(environment: dict[str, str], settings: Settings, workers: int) -> list[ProcessSpec]:
    def role(name: str, command: str, *, offset: int | None = None, stop_timeout: float = 15.0) -> ProcessSpec:
        env = dict(environment)
        if offset is not None:
            bind = settings.metrics_bind
            env["RELAY_METRICS_BIND"] = str(Bind(bind.host, bind.port + offset))
        return ProcessSpec(
            name=name,
            argv=[sys.executable, "-m", "relay.cli.main", *command.split()],
            env=env,
            stop_timeout=stop_timeout,
        )

    grace = settings.shutdown_grace_secs + 10.0
    return [
        role("testkit", "testkit"),
        role("api", "api", stop_timeout=grace),
        role("publisher", "publisher", offset=0),
        *(
            role(f"worker-{n}", f"worker --name worker-{n}@relay", offset=n, stop_timeout=grace)
            for n in range(1, workers + 1)
        ),
        role("beat", "beat"),
        role("flower", "flower"),
    ]


def _api_key(state: DevState, database_url: str) -> str:
    """Return the kept key if the database knows it, else a new one of the workspace `default`."""
    engine = make_engine(database_url, name="up", size=1)
    try:
        with engine.begin() as connection:
            kept = state.read_dev_env().get("RELAY_API_KEY")
            if kept is not None and keys.find(connection, kept) is not None:
                return kept
            workspace = workspaces.by_name(connection, WORKSPACE)
            workspace_id = workspace.id if workspace is not None else _make_workspace(connection)
            _, text = keys.create(
                connection,
                key_id=new_id(),
                workspace_id=workspace_id,
                name="relay up",
                scopes=list(Scope),
                actor="relay",
            )
            return text.reveal()
    finally:
        engine.dispose()


def _make_workspace(connection: sa.Connection) -> UUID:
    workspace = workspaces.create(connection, workspace_id=new_id(), name=WORKSPACE, actor="relay")
    assert workspace is not None, "its name was free a moment ago, in this transaction"
    return workspace.id


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


class _Greeting:
    """What to try next, said once, when it can be tried."""

    def __init__(self, settings: Settings, api_url: str, key: str) -> None:
        self._settings, self._api_url, self._key = settings, api_url, key
        self._said = False

    def try_say(self) -> None:
        if self._said:
            return
        try:
            answer = requests.get(f"{self._api_url}/readyz?for=ingest", timeout=0.5)
        except requests.RequestException:
            return
        if answer.ok:
            self._said = True
            _say_hello(self._settings, self._api_url, self._key)


def _say_hello(settings: Settings, api_url: str, key: str) -> None:
    receiver = f"http://{_reachable(settings.testkit_bind)}/verify"
    secret = "" if settings.testkit_secret is None else settings.testkit_secret.get_secret_value()
    flower_auth = "" if settings.flower_auth is None else settings.flower_auth.get_secret_value()
    notes = []
    if settings.allow_private_endpoints:
        notes.append(
            "Private and loopback endpoints are allowed (RELAY_ALLOW_PRIVATE_ENDPOINTS=true): for development."
        )
    click.echo(
        f"""
Relay is up. {" ".join(notes)}

  1. Register an endpoint (here the test receiver, which checks the signature):

curl -s {api_url}/v1/endpoints -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' -d '{{"url": "{receiver}", "secret": "{secret}"}}'

  2. Send an event:

curl -s {api_url}/v1/events -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' -d '{{"type": "order.paid", "amount": 4999}}'

  3. See what became of it, with the id of a delivery from the answer:

curl -s {api_url}/v1/deliveries/ID -H 'Authorization: Bearer {key}'

  The same in one go:   relay send order.paid
  Readiness:            {api_url}/readyz
  What arrived:         http://{_reachable(settings.testkit_bind)}/_requests
  Flower:               http://{_reachable(settings.flower_bind)}   ({flower_auth})
  Stop:                 Ctrl-C
"""
    )
    sys.stdout.flush()


def _reachable(bind: Bind) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind.host, bind.host)  # noqa: S104 - compared, not bound
    return str(Bind(host, bind.port))
