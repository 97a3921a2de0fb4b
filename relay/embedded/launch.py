"""Starts and ends one server process: as its user, on a port of its own, tied to the life of who started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from relay.core.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.embedded.account import Account

LOOPBACK = "127.0.0.1"
POLL = 0.01  # seconds between two looks at something that is about to happen
KILL_TIMEOUT = 5.0  # seconds for the kernel to take away a process that was killed
LOG_KEPT = 10 * 1024 * 1024  # bytes above which a log is set aside at the next start; one older log is kept
TAIL = 2000  # bytes of a log that go into an error

_SHIM = Path(__file__).with_name("shim.py")


def shim_argv(argv: Sequence[str], *, death_signal: int, account: Account | None = None) -> list[str]:
    """`argv` behind the shim. Without the main thread there is no death signal, which would follow that thread."""
    tied = death_signal if threading.current_thread() is threading.main_thread() else 0
    uid, gid = (account.uid, account.gid) if account is not None and account.switch else (-1, -1)
    here = [str(os.getpid()), str(int(tied)), str(uid), str(gid)]
    return [sys.executable, "-I", "-S", str(_SHIM), *here, *argv]


def launch(
    argv: Sequence[str], *, account: Account, log: Path, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own (so that the terminal's Ctrl-C is not for it), its output in `log`."""
    with _open_log(log) as output:
        return subprocess.Popen(  # noqa: S603 - our own command, without a shell
            shim_argv(argv, death_signal=death_signal, account=account),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=server_environment(),
            start_new_session=True,
        )


def run(argv: Sequence[str], *, account: Account, timeout: float, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of the servers' to its end as the account; it is killed with its parent or at the time-out."""
    return subprocess.run(  # noqa: S603 - our own command, without a shell
        shim_argv(argv, death_signal=signal.SIGKILL, account=account),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
        env=server_environment(),
        start_new_session=True,
        check=False,
    )


def server_environment() -> Mapping[str, str]:
    """What servers see: nothing of the caller's, whose PG* names and language would change what they do."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": os.defpath, **kept, "LC_ALL": "C", "TZ": "UTC"}


def free_port(remembered: int | None = None) -> int:
    """A loopback TCP port that is free now: the remembered one if it still is. Another process may take it first."""
    for port in (remembered or 0, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
                probe.listen(1)
            except OSError:
                continue
            taken: int = probe.getsockname()[1]
            return taken
    raise Unavailable("no free TCP port on the loopback interface")


def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` holds, at most `timeout` seconds; whether it does."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def alive(pid: int) -> bool:
    """Whether a process with this id runs; one that ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, and alive
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return not Path("/proc/self").exists()  # no /proc: the signal's answer stands


def works_in(pid: int, directory: Path) -> bool:
    """Whether the process's working directory is `directory`: servers of a data directory sit in it.

    Without /proc (macOS) only whether it runs, which can mistake another process that was given the same id.
    """
    try:
        return alive(pid) and Path(f"/proc/{pid}/cwd").readlink() == directory
    except OSError:
        return not Path("/proc/self").exists() and alive(pid)


def workers_in(directory: Path) -> list[int]:
    """Processes whose working directory is `directory`; none can be seen where there is no /proc."""
    ids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] if Path("/proc/self").exists() else []
    return [pid for pid in ids if works_in(pid, directory)]


def end(
    pid: int, signals: Sequence[tuple[signal.Signals, float]], child: subprocess.Popen[bytes] | None = None
) -> signal.Signals:
    """End a process: each signal with its patience in seconds, then SIGKILL; reaps it. Returns the signal it took."""

    def gone() -> bool:
        return child.poll() is not None if child is not None else not alive(pid)

    for number, patience in (*signals, (signal.SIGKILL, KILL_TIMEOUT)):
        if gone():
            return number
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if until(gone, patience):
            return number
    raise Unavailable(f"process {pid} does not end, not even when killed")


def log_since(log: Path, position: int) -> str:
    """What was logged after `position`, its last lines at most, for an error's message."""
    try:
        with log.open("rb") as file:
            file.seek(max(position if position <= log.stat().st_size else 0, log.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def _open_log(log: Path) -> _Log:
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_KEPT:
        log.replace(log.with_suffix(".old.log"))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.geteuid() == 0:  # in a base directory of another user's, the log is that user's too
        owner = log.parent.parent.stat()
        os.chown(log.parent, owner.st_uid, owner.st_gid)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return _Log(descriptor)


class _Log:
    """A descriptor that closes with its block: the server keeps its own copy."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
