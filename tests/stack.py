"""A whole Relay for tests: its roles as processes, a receiver that remembers, and servers that can be broken.

What runs here is what runs in production: `relay api|publisher|worker|beat`, started with settings in the
environment and ended by their process ids, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
import redis
import requests

from relay.bootstrap.api import make_api
from relay.config_sources import load_settings
from relay.core.model import Scope
from relay.core.secret import new_secret
from relay.embedded.home import discard, make_base, write_state
from relay.embedded.launch import shim_argv, workers_in
from relay.embedded.postgres import PostgresServer
from relay.embedded.redis import RedisServer
from relay.outbox.stream import Stream, connect
from relay.store import keys, migrate, workspaces
from relay.store.ids import new_id
from relay.sweeps.stream_upkeep import StreamUpkeep
from relay.testkit.receiver import Receiver
from relay.web.app import create_app
from tests.places import new_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from uuid import UUID

T = TypeVar("T")

#: Set to `long`, faults last as long as they do in life; otherwise about long enough to be noticed.
LONG = os.environ.get("RELAY_FAULTS") == "long"
#: Seconds between two looks at what is waited for.
POLL_SECS = 0.02
#: Seconds that a role may take to start on a busy machine.
START_SECS = 60.0
#: 32 bytes, base64.
MASTER_KEYS = "test:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

#: Short waits, and room that runs out quickly where it leaks. What other tests are about is off.
SETTINGS = {
    "RELAY_MASTER_KEYS": MASTER_KEYS,
    "RELAY_ALLOW_PRIVATE_ENDPOINTS": "true",
    "RELAY_LOG_FORMAT": "json",
    "RELAY_TOTAL_TIMEOUT_MS": "4000",
    # The least that leaves a request of 4 s its room.
    "RELAY_LEASE_SECS": "15",
    "RELAY_RECONCILE_AFTER_SECS": "3",
    "RELAY_SHUTDOWN_GRACE_SECS": "10",
    "RELAY_MAX_IN_FLIGHT": "64",
    "RELAY_MAX_IN_FLIGHT_PER_ENDPOINT": "64",
    "RELAY_BREAKER": "false",
    "RELAY_API_THREADS": "8",
    "RELAY_DB_POOL": "8",
}
#: What a role logs when it is at work.
_AT_WORK = {"worker": "reading hints from the stream", "publisher": "publishing", "beat": "beat started"}


def wait_until(look: Callable[[], T], timeout: float, what: str) -> T:
    """Look until what is seen is true, and return it; AssertionError naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(POLL_SECS)
    return seen


def quiet_port() -> int:
    """Return a free loopback port from below those that outgoing connections get: nothing takes it by chance."""
    for _ in range(100):
        port = random.SystemRandom().randrange(11_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no port is free")


class Role:
    """One process of Relay's."""

    def __init__(self, name: str, argv: Sequence[str], environment: dict[str, str], folder: Path, port: int) -> None:
        self.name = name
        self.port = port
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                shim_argv(argv, death_signal=signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def lines(self) -> list[dict[str, Any]]:
        """What it logged; a line that is no JSON (a crash on the way in or out) as its message alone."""
        return [_line(text) for text in self.log.read_text("utf-8", "replace").splitlines()]

    def said(self, message: str) -> list[dict[str, Any]]:
        """The lines whose message is exactly `message`."""
        return [line for line in self.lines() if line["message"] == message]

    def wait_said(self, message: str, timeout: float = START_SECS) -> None:
        """Wait until it logs `message`."""
        wait_until(lambda: self.said(message) or not self.alive, timeout, f"{self.name} says {message!r}")
        assert self.said(message), f"{self.name} ended with {self.process.poll()}:\n{self.tail()}"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Wait for its end and return its exit code (negative: the signal that ended it)."""
        return self.process.wait(timeout)

    def kill(self) -> None:
        """Kill it, its children and its frozen self. Does nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def metrics(self) -> dict[str, float]:
        """What its /metrics says, by name with labels."""
        text = requests.get(f"http://127.0.0.1:{self.port}/metrics", timeout=5).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def scrape(self) -> dict[str, float]:
        """The same; nothing while it does not answer yet."""
        try:
            return self.metrics()
        except requests.ConnectionError:
            return {}

    def tail(self) -> str:
        """Its last warnings and errors, for a failed test."""
        grave = [line for line in self.lines() if line.get("level") not in ("info", "debug")]
        return "\n".join(json.dumps(line)[:1500] for line in grave[-12:])


class Stack:
    """Relay over one database and one Redis, with a receiver; nothing of it runs after the `with` block."""

    def __init__(self, *, database_url: str, broker_url: str, **settings: str) -> None:
        self.database_url = database_url
        self.broker_url = broker_url
        self.secret = new_secret(secrets.token_bytes(32)).reveal()
        self.receiver = Receiver(secret=self.secret)
        self.api_port = quiet_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        self.roles: list[Role] = []
        own = {
            "DATABASE_URL": database_url,
            "RELAY_BROKER_URL": broker_url,
            "RELAY_BIND": f"127.0.0.1:{self.api_port}",
        }
        self.settings = SETTINGS | own | settings
        self._folder = Path(tempfile.mkdtemp(prefix="relay-stack-"))

    def __enter__(self) -> Self:
        self.receiver.start()
        # The same application as `relay api` serves, in this process: for making things and for single requests.
        self.parts = make_api(load_settings(self.settings))
        self.app = create_app(self.parts)
        with self.parts.engine.begin() as connection:
            workspace = workspaces.create(connection, workspace_id=new_id(), name="tests", actor="tests")
            assert workspace is not None
            self.workspace_id: UUID = workspace.id
            _, text = keys.create(
                connection,
                key_id=new_id(),
                workspace_id=workspace.id,
                name="tests",
                scopes=list(Scope),
                actor="tests",
            )
        self.headers = {"Authorization": f"Bearer {text.reveal()}"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for role in self.roles:
                role.kill()
            if kind is not None:
                for role in self.roles:
                    print(f"--- {role.name} ended with {role.process.returncode}\n{role.tail()}")
        finally:
            self.receiver.stop()
            self.parts.engine.dispose()
            self.parts.hot.dispose()
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- processes ---

    def launch(self, command: str, **settings: str) -> Role:
        """Start a role without waiting for it."""
        port = quiet_port()
        kept = {name: value for name, value in os.environ.items() if name != "DATABASE_URL" and name[:6] != "RELAY_"}
        environment = kept | self.settings | {"RELAY_METRICS_BIND": f"127.0.0.1:{port}"} | settings
        argv = [sys.executable, "-m", "relay.cli.main", *command.split()]
        role = Role(f"{command.split(maxsplit=1)[0]}-{len(self.roles)}", argv, environment, self._folder, port)
        self.roles.append(role)
        return role

    def ready(self, *roles: Role, timeout: float = START_SECS) -> None:
        """Wait until roles are at work."""
        for role in roles:
            kind = role.name.split("-")[0]
            if kind == "api":
                wait_until(lambda: self.get("/healthz") == 200 or not role.alive, timeout, "the API answers")  # noqa: B023
                assert role.alive, role.tail()
            else:
                role.wait_said(_AT_WORK[kind], timeout)

    def start(self, *commands: str, **settings: str) -> list[Role]:
        """Start roles side by side and wait until all are at work."""
        roles = [self.launch(command, **settings) for command in commands]
        self.ready(*roles)
        return roles

    def live(self, kind: str) -> list[Role]:
        """The roles of a kind that run."""
        return [role for role in self.roles if role.name.startswith(kind) and role.alive]

    # --- the API ---

    def get(self, path: str, timeout: float = 5.0) -> int | None:
        """Return the status that `relay api` answers a GET with; None where it does not answer."""
        try:
            return requests.get(self.url + path, headers=self.headers, timeout=timeout).status_code
        except requests.RequestException:
            return None

    def endpoint(self, path: str, *, types: Sequence[str] = (), **options: object) -> str:
        """Make an endpoint at the receiver's `path` and return its id. It is never held back by its rate."""
        asked = {
            "url": self.receiver.url + path,
            "secret": self.secret,
            "event_types": list(types),
            "retry": {"strategy": "fixed", "base_ms": 200, "jitter": 0.0, "max_attempts": 20},
        } | options
        answer = self.app.test_client().post("/v1/endpoints", json=asked, headers=self.headers)
        assert answer.status_code == 201, answer.text
        endpoint_id = str(answer.get_json()["id"])
        self.rows("update relay.endpoints set rate_per_second = 10000, burst = 10000 where id = %s", endpoint_id)
        return endpoint_id

    def delivered(self) -> int:
        """Return how many deliveries have been made."""
        return int(self.rows("select count(*) from relay.deliveries where status = 2")[0][0])

    def sweeps_run(self, timeout: float = 30.0) -> None:
        """Wait until beat's ticks reach workers: reap runs to its end once more, and beat is heard of."""
        (now,) = self.rows("select clock_timestamp()")[0]
        statement = "select count(*) from relay.sweeps where name = 'reap' and started_at > %s and finished_at > %s"
        wait_until(lambda: self.rows(statement, now, now)[0][0], timeout, "reap runs")
        beaten = "select count(*) from relay.heartbeats where role = 'beat' and beat_at > %s"
        wait_until(lambda: self.rows(beaten, now)[0][0], timeout, "beat's heartbeat arrives")

    def delivery(self, delivery_id: str) -> dict[str, Any]:
        """Read a delivery with its attempts, as the API shows it."""
        answer = self.app.test_client().get(f"/v1/deliveries/{delivery_id}", headers=self.headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.get_json())

    # --- behind the scenes ---

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run SQL on a connection of its own; return the rows, if it has any."""
        with psycopg.connect(self.database_url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def end_leases(self, *, older_secs: float = 0.0) -> int:
        """Let leases of workers that died run out now (in the long form, by themselves); return how many there are.

        `older_secs` tells them from those of workers that live: taken that long ago, longer than any send takes.
        """
        lease_secs = float(self.settings["RELAY_LEASE_SECS"])
        found = self.rows(
            "update relay.deliveries set lease_until = case when %s then lease_until else now() end"
            " where status = 1 and lease_until <= now() + make_interval(secs => %s) returning id",
            LONG,
            lease_secs - older_secs,
        )
        return len(found)

    @contextlib.contextmanager
    def redis(self) -> Iterator[redis.Redis]:
        """A client of this stack's Redis."""
        with contextlib.closing(redis.Redis.from_url(self.broker_url, protocol=2)) as client:
            yield client

    def tidy_stream(self) -> int:
        """Settle what dead workers left in the stream, as the upkeep does once it is half a minute old; return what
        the stream then holds."""
        with contextlib.closing(connect(self.broker_url)) as client:
            stream = Stream(client, prefix="relay", consumer="tests")
            StreamUpkeep(hot=self.parts.hot, stream=stream, idle_ms=0).run_once(since_last=0.0)
            return stream.length()


@contextlib.contextmanager
def own_redis() -> Iterator[RedisServer]:
    """A Redis for one test to break."""
    base = _base("redis")
    server = RedisServer(base, say=lambda _line: None)
    try:
        server.start()
        yield server
    finally:
        freeze_end(server)
        server.stop()
        discard(base)


@contextlib.contextmanager
def own_postgres() -> Iterator[PostgresServer]:
    """A migrated Postgres for one test to break: durable, as in production."""
    base = _base("postgres")
    server = PostgresServer(base, say=lambda _line: None)
    try:
        server.start()
        migrate.upgrade(server.url)
        yield server
    finally:
        freeze_end(server)
        server.stop()
        discard(base)


def kill_redis(server: RedisServer, *, empty: bool) -> None:
    """Kill a Redis; `empty` takes its data with it. `server.start()` brings it back on the same port."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not server.alive(), 10, "Redis is gone")
    if empty:
        shutil.rmtree(Path(server._known("data")) / "appendonlydir")


def freeze(server: RedisServer | PostgresServer) -> None:
    """Stop every process of a server where it stands: connections stay open and nothing answers."""
    for pid in workers_in(Path(server._known("data"))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def freeze_end(server: RedisServer | PostgresServer) -> None:
    """Let it go on."""
    for pid in workers_in(Path(server._known("data"))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _base(kind: str) -> Path:
    base = make_base(new_place())
    write_state(base / f"{kind}.json", {"port": quiet_port()})
    return base


def _line(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {"message": text}
    return line if isinstance(line, dict) and "message" in line else {"message": text}
