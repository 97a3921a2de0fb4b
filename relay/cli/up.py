"""`relay up`: a whole installation on one machine, for a laptop and a first look."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import requests

from relay.cli.dev_state import PRESET, DevState
from relay.cli.roles import has_flower
from relay.config import Settings, effective
from relay.config_sources import load_settings
from relay.config_values import Bind
from relay.core.errors import ConfigurationError
from relay.core.model import Scope
from relay.embedded.binaries import find_postgres, find_redis
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
    # An empty variable counts as unset, for us and for the processes.
    environ = {name: value for name, value in os.environ.items() if value}
    given = load_settings(environ, dotenv=Path(".env"), preset=PRESET)
    with_flower = has_flower()
    if not base.exists():
        # Where it cannot start it leaves nothing behind. In a folder that is there another may run, which its lock tells.
        _check_ports(given, workers, with_flower=with_flower)
        _check_servers(given)
    state = DevState(make_base(base))
    if not with_flower:
        click.echo("relay | without Flower, which is not installed: pip install '.[ops]' in a clone of Relay")
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
            settings = load_settings(environ, dotenv=Path(".env"), preset=preset)
            _check_ports(settings, workers, with_flower=with_flower)
            assert settings.database_url is not None
            database_url = settings.database_url.get_secret_value()
            upgrade(database_url)
            key = _api_key(state, database_url)
            api_url = f"http://{_reachable(settings.bind)}"
            state.write_dev_env({"RELAY_URL": api_url, "RELAY_API_KEY": key})
            # A preset goes to the processes only where it is in force: `.env`, which they read too, comes before it.
            in_force = {variable for variable, _, source in effective(settings) if source == "preset"}
            environment = environ | {name: value for name, value in preset.items() if name in in_force}
            greeting = _Greeting(settings, api_url, key, with_flower=with_flower)

            def watch() -> list[str]:
                greeting.try_say()
                return servers.revive()

            specs = _processes(environment, settings, workers, with_flower=with_flower)
            return Supervisor(specs, watch=watch).run()


def _check_servers(given: Settings) -> None:
    """Raise ConfigurationError where a server is to be started, and there is no program for it."""
    if given.broker_url is None:
        find_redis()
    if given.database_url is None:
        find_postgres()


def _check_ports(settings: Settings, workers: int, *, with_flower: bool) -> None:
    """Raise ConfigurationError naming every address that something else listens on already."""
    metrics = settings.metrics_bind
    wanted = [("RELAY_BIND", settings.bind), ("RELAY_TESTKIT_BIND", settings.testkit_bind)]
    if with_flower:
        wanted.append(("RELAY_FLOWER_BIND", settings.flower_bind))
    wanted += [("RELAY_METRICS_BIND", Bind(metrics.host, metrics.port + offset)) for offset in range(workers + 1)]
    taken = []
    for variable, bind in wanted:
        family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as one:
            # As servers do: an address whose last connections are still winding down can be listened on.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((bind.host, bind.port))
            except OSError as error:
                taken.append(f"  {variable}={bind}: {error.strerror}")
    if taken:
        raise ConfigurationError("cannot listen; set other addresses or stop what is there:\n" + "\n".join(taken))


def _processes(
    environment: dict[str, str], settings: Settings, workers: int, *, with_flower: bool
) -> list[ProcessSpec]:
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
        *([role("flower", "flower")] if with_flower else []),
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

    def __init__(self, settings: Settings, api_url: str, key: str, *, with_flower: bool) -> None:
        self._settings, self._api_url, self._key, self._with_flower = settings, api_url, key, with_flower
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
            _say_hello(self._settings, self._api_url, self._key, with_flower=self._with_flower)


def _say_hello(settings: Settings, api_url: str, key: str, *, with_flower: bool) -> None:
    receiver = f"http://{_reachable(settings.testkit_bind)}/verify"
    secret = "" if settings.testkit_secret is None else settings.testkit_secret.get_secret_value()
    flower_auth = "" if settings.flower_auth is None else settings.flower_auth.get_secret_value()
    flower = (
        f"  Flower:               http://{_reachable(settings.flower_bind)}   ({flower_auth})\n" if with_flower else ""
    )
    notes = []
    if settings.allow_private_endpoints:
        notes.append(
            "Private and loopback endpoints are allowed (RELAY_ALLOW_PRIVATE_ENDPOINTS=true): for development."
        )
    click.echo(
        f"""
Relay is up. {" ".join(notes)}

  1. Register an endpoint, once (here the test receiver, which checks the signature):

curl -s {api_url}/v1/endpoints -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' -d '{{"url": "{receiver}", "secret": "{secret}"}}'

  2. Send an event:

curl -s {api_url}/v1/events -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' -d '{{"type": "order.paid", "amount": 4999}}'

  3. See what became of it, with the id of a delivery from the answer:

curl -s {api_url}/v1/deliveries/ID -H 'Authorization: Bearer {key}'

  Send more:            {_command()} send order.paid
  The API, described:   {api_url}/docs
  Readiness:            {api_url}/readyz
  What arrived:         http://{_reachable(settings.testkit_bind)}/_requests
{flower}  Stop:                 Ctrl-C
"""
    )
    sys.stdout.flush()


def _command() -> str:
    """Return what to type for the `relay` command from this folder."""
    if shutil.which("relay"):
        return "relay"
    beside = Path(sys.executable).parent / "relay"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _reachable(bind: Bind) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind.host, bind.host)  # noqa: S104 - compared, not bound
    return str(Bind(host, bind.port))
