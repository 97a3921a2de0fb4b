"""A Relay to measure: servers, a clean database, and Relay's roles as the processes that they are in production."""

from __future__ import annotations

import base64
import contextlib
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pycurl
import redis
from psycopg import sql

import relay
from relay.config import effective
from relay.config_sources import load_settings
from relay.core.errors import Unavailable
from relay.embedded.launch import free_port, shim_argv
from relay.embedded.stack import Servers
from relay.loadtest import counters, usage
from relay.loadtest.calibration import python_loop_ms
from relay.loadtest.sink import Sink
from relay.store import migrate
from relay.store.vault import Vault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.loadtest.accounting import Connection

#: Seconds that roles may take to be ready, and to end.
START_SECS = 60.0
STOP_SECS = 15.0
#: Seconds between two looks at something that is waited for.
POLL_SECS = 0.02

#: Characters of a role's log that go into an error.
_TAIL_CHARACTERS = 3000

#: Relay's settings that figures depend on: they are part of every report.
_REPORTED = (
    "RELAY_MAX_IN_FLIGHT",
    "RELAY_MAX_IN_FLIGHT_PER_ENDPOINT",
    "RELAY_CLAIM_BATCH",
    "RELAY_LEASE_SECS",
    "RELAY_BREAKER",
    "RELAY_API_PROCESSES",
    "RELAY_API_THREADS",
    "RELAY_WORKER_THREADS",
    "RELAY_DB_POOL",
    "RELAY_LOG_LEVEL",
)
#: Postgres's, likewise: without the first two no figure counts.
_REPORTED_OF_POSTGRES = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "full_page_writes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What had been used at one moment; two of them make a difference."""

    cpu_secs: Mapping[str, float]
    #: Of the whole machine, and of this process; the former is not known everywhere.
    machine_secs: float | None
    own_secs: float
    #: The monotonic clock, in seconds.
    at: float
    statements: int | None
    round_trips: int | None


class Stack:
    """Everything that a scenario needs, within a `with` block; nothing of it is left afterwards.

    With URLs given, a database of its own is made on that server, and a prefix of its own used in that Redis; both are
    taken away again. CPU of servers that were not started here is not known. Settings of the environment (`RELAY_…`)
    hold for the roles, but for those that this sets itself. `preamble` are Python statements that each role runs first:
    with them a constant can be tried that is no setting.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        broker_url: str | None = None,
        environ: Mapping[str, str] | None = None,
        preamble: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._given_database = database_url
        self._given_broker = broker_url
        self._environ = dict(os.environ if environ is None else environ)
        self._preamble = preamble
        self._say = say
        self._undo = contextlib.ExitStack()
        self._roles: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._logs: dict[int, Path] = {}
        self._servers: Servers | None = None
        self._sink: Sink | None = None
        self.prefix = f"relay-loadtest-{secrets.token_hex(4)}"
        key = secrets.token_bytes(32)
        self.vault = Vault({"loadtest": key})
        self._master_key = f"loadtest:{base64.b64encode(key).decode()}"
        self.admin_key = secrets.token_urlsafe(32)

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="relay-loadtest-"))
        self.python_loop_ms = python_loop_ms()
        self._say("starting servers")
        # Its own directory goes with it, the roles' logs included.
        self._servers = Servers(
            self._folder,
            want_postgres=self._given_database is None,
            want_redis=self._given_broker is None,
            discard=True,
            say=self._say,
        )
        self._undo.enter_context(self._servers)
        self.broker_url = self._given_broker or _known(self._servers.redis_url)
        self.database_url = (
            self._make_database(self._given_database) if self._given_database else _known(self._servers.postgres_url)
        )
        migrate.upgrade(self.database_url)
        self.connection: Connection = self._undo.enter_context(
            contextlib.closing(psycopg.connect(self.database_url, autocommit=True))
        )
        self.broker: redis.Redis = self._undo.enter_context(
            contextlib.closing(redis.Redis.from_url(self.broker_url, protocol=2))
        )
        self._undo.callback(self._forget_keys)
        self._counts_statements = counters.enable_statements(self.connection)
        self.api_port = free_port()
        self.environment = self._make_environment()
        self._undo.callback(self.stop_roles)

    def _make_database(self, url: str) -> str:
        name = f"relay_loadtest_{secrets.token_hex(6)}"
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement)
        self._undo.callback(_drop_database, url, name)
        return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))

    def _make_environment(self) -> dict[str, str]:
        package = str(Path(relay.__file__).resolve().parent.parent)
        above = self._environ.get("PYTHONPATH")
        return {
            # Settings of the environment may tune what is measured.
            "RELAY_LOG_LEVEL": "warning",
            **self._environ,
            "PYTHONPATH": f"{package}{os.pathsep}{above}" if above else package,
            "DATABASE_URL": self.database_url,
            "RELAY_BROKER_URL": self.broker_url,
            "RELAY_PREFIX": self.prefix,
            "RELAY_MASTER_KEYS": self._master_key,
            "RELAY_ADMIN_KEY": self.admin_key,
            "RELAY_BIND": f"127.0.0.1:{self.api_port}",
            "RELAY_METRICS_BIND": "127.0.0.1:0",
            "RELAY_ALLOW_PRIVATE_ENDPOINTS": "true",
            "RELAY_REQUIRE_HTTPS": "false",
            "RELAY_ALLOWED_PORTS": "*",
            "RELAY_ALLOWED_CIDRS": "",
            "RELAY_DENIED_CIDRS": "",
            "RELAY_EGRESS_PROXY": "",
            "RELAY_SHUTDOWN_GRACE_SECS": "5",
            "RELAY_FAILPOINT": "",
        }

    def start_sink(self, *, origins: int = 1) -> Sink:
        """Start the receiver; it ends with the stack."""
        self._sink = self._undo.enter_context(Sink(origins=origins))
        return self._sink

    def start_role(self, role: str, count: int = 1) -> None:
        """Start `count` processes of one of Relay's roles, as the command line does."""
        argv = [sys.executable, "-m", "relay.cli.main", role]
        if self._preamble:
            argv = [sys.executable, "-c", f"{self._preamble}\nfrom relay.cli.main import main\nmain()", role]
        self.start_process(role, argv, count)

    def start_process(self, role: str, argv: Sequence[str], count: int = 1) -> None:
        """Start `count` processes of any command as `role`, in the roles' environment."""
        for _ in range(count):
            log = self._folder / f"{role}-{len(self._logs)}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(  # noqa: S603  # our own interpreter and modules
                    shim_argv(argv, death_signal=signal.SIGTERM),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    # Away from the caller's .env, which is for another Relay.
                    cwd=self._folder,
                    start_new_session=True,
                )
            self._logs[process.pid] = log
            self._roles.setdefault(role, []).append(process)

    def wait_for(self, condition: Callable[[], bool], what: str, *, secs: float = START_SECS) -> None:
        """Wait until `condition` holds. Raises Unavailable, with the end of its log, where a role ends meanwhile."""
        deadline = time.monotonic() + secs
        while not condition():
            self.check_roles()
            if time.monotonic() > deadline:
                raise Unavailable(f"{what} took longer than {secs:.0f} s{self._last_words()}")
            time.sleep(POLL_SECS)

    def wait_for_heartbeats(self, wanted: Mapping[str, int]) -> None:
        """Wait until so many processes of each role say that they are alive."""

        def ready() -> bool:
            rows = self.connection.execute(
                "select role, count(*) from relay.heartbeats group by role  -- relay loadtest"
            ).fetchall()
            beating: dict[str, int] = dict(rows)
            return all(beating.get(role, 0) >= count for role, count in wanted.items())

        self.wait_for(ready, f"the start of {', '.join(wanted)}")

    def check_roles(self) -> None:
        """Raise Unavailable where a role's process has ended by itself."""
        for role, processes in self._roles.items():
            for process in processes:
                if process.poll() is not None:
                    said = _tail(self._logs[process.pid])
                    raise Unavailable(f"a {role} process ended with status {process.returncode}:\n{said}")

    def stop_roles(self) -> None:
        """End the roles, by signal and by force; safe to call again."""
        processes = [process for some in self._roles.values() for process in some]
        self._roles = {}
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_SECS
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def read(self) -> Reading:
        """What has been used so far."""
        return Reading(
            cpu_secs=usage.cpu_secs(self._pids()),
            machine_secs=usage.machine_secs(),
            own_secs=usage.own_secs(),
            at=time.monotonic(),
            statements=counters.statements(self.connection) if self._counts_statements else None,
            round_trips=counters.round_trips(self.broker),
        )

    def worker_rss_mb(self) -> float | None:
        """Peak resident memory of the largest worker process, in MiB."""
        return usage.peak_rss_mb(process.pid for process in self._roles.get("worker", []))

    def worker_rss_now_mb(self) -> float | None:
        """Resident memory of the largest worker process at this moment, in MiB."""
        return usage.rss_mb([process.pid for process in self._roles.get("worker", [])])

    def settings(self) -> dict[str, object]:
        """The settings of Relay and of Postgres that figures depend on."""
        of_relay = load_settings({name: text for name, text in self.environment.items() if _is_setting(name)})
        known = {name: value for name, value, _ in effective(of_relay)}
        return {
            **{name: known[name] for name in _REPORTED if name in known},
            **{f"postgres.{name}": self._show(name) for name in _REPORTED_OF_POSTGRES},
        }

    def versions(self) -> dict[str, str]:
        """What ran."""
        of_broker = self.broker.info("server")
        return {
            "relay": relay.__version__,
            "python": platform.python_version(),
            "postgres": self._show("server_version"),
            "redis": str(of_broker.get("valkey_version") or of_broker.get("redis_version")),
            "curl": pycurl.version_info()[1],
            "kernel": platform.release(),
        }

    def _show(self, name: str) -> str:
        row = self.connection.execute("select current_setting(%s)  -- relay loadtest", [name]).fetchone()
        return "" if row is None else str(row[0])

    def _pids(self) -> dict[str, list[int]]:
        pids = {role: [process.pid for process in processes] for role, processes in self._roles.items()}
        servers = self._servers
        for name, server in (
            ("postgres", servers.postgres if servers else None),
            ("redis", servers.redis if servers else None),
        ):
            if server is not None and server.pid is not None:
                pids[name] = [server.pid]
        if self._sink is not None:
            pids["sink"] = [self._sink.pid]
        return pids

    def _last_words(self) -> str:
        said = [f"\n{log.name}:\n{text}" for log in self._logs.values() if (text := _tail(log))]
        return "".join(said)

    def _forget_keys(self) -> None:
        if self._given_broker is not None:
            keys: list[Any] = list(self.broker.scan_iter(match=f"*{self.prefix}*", count=1000))
            if keys:
                self.broker.delete(*keys)


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-_TAIL_CHARACTERS:].strip()


def _known(url: str | None) -> str:
    if url is None:
        raise Unavailable("a server that was started has no address")
    return url


def _is_setting(name: str) -> bool:
    return name == "DATABASE_URL" or name.upper().startswith("RELAY_")


def _drop_database(url: str, name: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
