"""The life of one embedded server, whichever it is: who may run it, where it lives, how it starts and ends.

One launcher runs the server of a base directory at a time. While another one does, starting means joining: waiting
until that server is ready, and leaving it alone at the end. A server whose launcher died is ended and started anew, so
that it has one again. A server ends with its launcher, on Linux and if it was started on the main thread; elsewhere it
may stay behind, and is dealt with at the next start.
"""

from __future__ import annotations

import abc
import contextlib
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from relay.core.errors import ConfigurationError, Unavailable
from relay.embedded.account import Account, choose_account
from relay.embedded.home import Say, make_base, own_directory, read_state, settle, write_state
from relay.embedded.launch import POLL, end, free_port, launch, log_since, workers_in, works_in
from relay.embedded.lock import FileLock

if TYPE_CHECKING:
    import subprocess

START_TIMEOUT = 60.0  # seconds; recovery after a crash reads much again
START_TRIES = 5
RETRY_PAUSE = 0.2  # seconds between two tries

Signals = Sequence[tuple[signal.Signals, float]]


class Server(abc.ABC):
    """What Postgres and Redis have in common. A kind says what to run and how to tell that it is ready."""

    #: The server's name for people, and in small letters for its files.
    KIND: ClassVar[str]
    #: What the kernel sends the server when its launcher dies: a clean stop.
    DEATH_SIGNAL: ClassVar[signal.Signals]
    #: The clean stop, each signal with its patience in seconds; SIGKILL comes last by itself.
    STOP: ClassVar[Signals]
    #: The same for a server that did not become ready, or lost its launcher.
    ABANDON: ClassVar[Signals]
    #: Words in the log of a failed start after which another try may do: a port taken meanwhile, say.
    PASSING: ClassVar[Sequence[str]]

    _account: Account
    _directory: Path

    def __init__(self, base: Path, run_as: str | None, *, system: bool, wheel: bool, say: Say) -> None:
        name = self.KIND.lower()
        self._base = make_base(base)
        self._run_as = run_as
        self._system = system
        self._wheel = wheel
        self._say = say
        self._lock = FileLock(self._base / f"{name}.lock", f"the {self.KIND} of {self._base}")
        self._log = self._base / "log" / f"{name}.log"
        self._log_before = 0
        self._state_path = self._base / f"{name}.json"
        self._state: dict[str, Any] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._owned = False

    @property
    def pid(self) -> int | None:
        """The server's process id, None where it does not run."""
        if self._child is not None:
            return self._child.pid if self._child.poll() is None else None
        state = read_state(self._state_path)
        pid, data = state.get("pid"), state.get("data")
        return pid if isinstance(pid, int) and isinstance(data, str) and works_in(pid, Path(data)) else None

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.pid is not None

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the server, or join the one that another launcher runs; returns when it is ready.

        Raises ConfigurationError when it cannot be made or started, Unavailable when it is not ready in time. Does
        nothing while this object's server runs.
        """
        self.begin()
        self.await_ready(timeout)

    def begin(self) -> None:
        """The first half of `start`: make what is missing and start the process, without waiting until it is ready."""
        if self._child is not None and self._child.poll() is None:
            return
        self._owned = self._owned or self._lock.try_acquire()
        if not self._owned:
            return
        with self._abandoned_on_failure():
            self._prepare()
            self._spawn()

    def await_ready(self, timeout: float = START_TIMEOUT) -> None:
        """The second half of `start`."""
        deadline = time.monotonic() + timeout
        tries = 1
        with self._abandoned_on_failure():
            while not self._is_ready():
                if time.monotonic() >= deadline:
                    raise Unavailable(
                        f"{self.KIND} in {self._base} is not ready after {timeout:g} s (log: {self._log})"
                    )
                time.sleep(POLL)
                if not self._owned:
                    self.begin()  # the other launcher may have died meanwhile
                elif self._child is not None and self._child.poll() is not None:
                    said = log_since(self._log, self._log_before)
                    if tries == START_TRIES or not any(words in said for words in self.PASSING):
                        raise ConfigurationError(f"{self.KIND} did not start; its log ({self._log}) ends with:\n{said}")
                    tries += 1
                    time.sleep(RETRY_PAUSE)
                    self._spawn()

    def _end(self, signals: Signals) -> None:
        child, self._child = self._child, None
        try:
            if child is not None:
                end(child.pid, signals, child)
        finally:
            if self._owned:
                self._owned = False
                self._lock.release()

    @abc.abstractmethod
    def _install(self, account: Account, home: Path) -> Path:
        """Find the programs and make the data directory, which is returned. No server of this directory may run."""

    @abc.abstractmethod
    def _configure(self, port: int) -> Sequence[str]:
        """Write the configuration for `port` and return the command that runs the server."""

    @abc.abstractmethod
    def _answers(self, pid: int, port: int) -> bool:
        """Whether the process `pid` serves this data on `port`, and is done with starting."""

    def _known(self, name: str) -> Any:
        if name not in self._state:
            self._state = read_state(self._state_path)
        try:
            return self._state[name]
        except KeyError:
            raise Unavailable(f"the {self.KIND} of {self._base} has not been started") from None

    def _remember(self, **facts: Any) -> None:
        self._state = {**self._state, **facts}
        write_state(self._state_path, self._state)

    def _prepare(self) -> None:
        """Settle user, place, programs and data; what was there before is found again as it was."""
        self._state = read_state(self._state_path)
        data = self._state.get("data")
        known = [Path(data)] if isinstance(data, str) else []
        account = choose_account(self._run_as, [*known, self._base])
        home = settle(self._base, account, self._say)
        self._account = account
        self._directory = own_directory(home / self.KIND.lower(), account)
        self._remember(password=self._state.get("password") or secrets.token_hex(24))
        self._remember(data=str(self._install(account, home)))

    def _spawn(self) -> None:
        port = free_port(self._state.get("port"))
        argv = self._configure(port)
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        self._child = launch(argv, account=self._account, log=self._log, death_signal=self.DEATH_SIGNAL)
        self._remember(port=port, pid=self._child.pid)

    def _is_ready(self) -> bool:
        if not self._owned:
            self._state = read_state(self._state_path)
        pid, port = self._state.get("pid"), self._state.get("port")
        return isinstance(pid, int) and isinstance(port, int) and self._answers(pid, port)

    def _end_leftovers(self, data: Path, pid: int | None) -> None:
        """End what a dead launcher left running: this is for the holder of the lock, so it is nobody else's."""
        if pid is not None and works_in(pid, data):
            end(pid, self.STOP)
        for other in workers_in(data):
            end(other, self.ABANDON)

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # an interrupt too must leave no server behind
            self._end(self.ABANDON)
            raise
