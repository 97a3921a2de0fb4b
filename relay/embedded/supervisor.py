"""Runs the processes of one installation in the foreground: starts, shows, restarts and stops them.

For one machine and one person watching. Restarts are for crashes; a process that hangs is not noticed here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from relay.embedded.launch import shim_argv
from relay.embedded.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

FIRST_PAUSE = 1.0  # seconds before the first restart; doubles each time
LONGEST_PAUSE = 30.0  # seconds; a process that lived this long starts over with the first pause
KILL_TIMEOUT = 5.0  # seconds for the kernel to take away what was killed
TICK = 1.0  # seconds between two calls of `watch`
OWN_NAME = "relay"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running. `env` is the whole environment (None: the supervisor's own).

    With `restart` off it may end once and for all. `death_signal` is what the kernel sends it when the supervisor is
    killed (Linux only).
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    restart: bool = True
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout: float = 40.0  # seconds until it is killed
    death_signal: signal.Signals = signal.SIGTERM


class Supervisor:
    """Keeps `processes` running until told to stop, their output on `out`.

    `watch` is called every second while they run; it may look after something else (it holds everything up while it
    runs), and what it returns is said.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        out: TextIO | None = None,
        *,
        watch: Callable[[], Iterable[str]] | None = None,
        colour: bool | None = None,
    ) -> None:
        self._children = [_Child(spec) for spec in processes]
        self._out = sys.stdout if out is None else out
        self._watch = watch
        self._watch_error = ""
        self._colour = self._out.isatty() and "NO_COLOR" not in os.environ if colour is None else colour
        self._wake_read, self._wake_write = -1, -1
        self._told: list[int] = []  # signals to stop that have come and have not been heeded yet

    def run(self) -> int:
        """Start all in order and return when all have ended; on the main thread only.

        SIGINT, SIGTERM or SIGHUP stops them one by one, last first; a second one kills them at once. Returns 0 after an
        orderly stop or when every process has ended well, 1 when one that is not restarted failed, 128 + signal when
        they had to be killed on demand.
        """
        output = Output(self._out, [*(child.spec.name for child in self._children), OWN_NAME], colour=self._colour)
        self._output = output
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Handlers that do nothing: the signal's number comes through the pipe.
        heeded = [number for number in (*STOP_SIGNALS, signal.SIGCHLD) if not _is_nohup(number)]
        before = {number: signal.signal(number, _noted) for number in heeded}
        try:
            if self._run_until_told():
                return self._stop_in_order()
            return 0 if all(child.last_code == 0 for child in self._children) else 1
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)
            os.close(self._wake_read)
            os.close(self._wake_write)
            output.close()

    def _run_until_told(self) -> bool:
        """Whether a signal ended it; otherwise every process has ended for good."""
        for child in self._children:
            self._start(child)
        next_tick = time.monotonic() + TICK
        while any(child.process is not None or child.due is not None for child in self._children):
            dues = [child.due for child in self._children if child.due is not None]
            if self._signals_until(min([next_tick, *dues])):
                return True
            for child in self._children:
                if child.process is not None and child.has_ended():
                    self._after_death(child)
                if child.due is not None and time.monotonic() >= child.due:
                    self._start(child)
            if time.monotonic() >= next_tick:
                self._call_watch()
                next_tick = time.monotonic() + TICK
        return False

    def _start(self, child: _Child) -> None:
        child.due = None
        try:
            descriptor = child.start()
        except OSError as error:
            self._plan_restart(child, f"cannot be started ({error.strerror})")
            return
        self._output.attach(child.spec.name, descriptor)

    def _after_death(self, child: _Child) -> None:
        code = child.reap()
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if child.spec.restart:
            self._plan_restart(child, how)
        else:
            self._output.say(OWN_NAME, f"{child.spec.name} {how}")

    def _plan_restart(self, child: _Child, how: str) -> None:
        pause = child.next_pause()
        child.due = time.monotonic() + pause
        self._output.say(OWN_NAME, f"{child.spec.name} {how}; it starts again in {pause:g} s")

    def _call_watch(self) -> None:
        if self._watch is None:
            return
        try:
            for line in self._watch():
                self._output.say(OWN_NAME, line)
            self._watch_error = ""
        except Exception as error:  # noqa: BLE001 - the loop's boundary: what is watched must not end what runs
            if str(error) != self._watch_error:
                self._output.say(OWN_NAME, str(error))
            self._watch_error = str(error)

    def _stop_in_order(self) -> int:
        for child in reversed(self._children):
            if child.process is None:
                continue
            self._output.say(OWN_NAME, f"stopping {child.spec.name}")
            child.signal(child.spec.stop_signal)
            deadline = time.monotonic() + child.spec.stop_timeout
            while not child.has_ended() and time.monotonic() < deadline:
                again = self._signals_until(deadline)
                if again:
                    self._output.say(OWN_NAME, "killing what is left")
                    self._kill_all()
                    return 128 + again
            if not child.has_ended():
                self._output.say(OWN_NAME, f"{child.spec.name} did not stop in {child.spec.stop_timeout:g} s: killed")
            child.kill()
        return 0

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()

    def _signals_until(self, deadline: float) -> int:
        """Wait until the deadline, a child's death or a signal; returns the number of a signal to stop, else 0."""
        if not self._told:
            select.select([self._wake_read], [], [], max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            self._told += [number for number in os.read(self._wake_read, 4096) if number in STOP_SIGNALS]
        return self._told.pop(0) if self._told else 0


class _Child:
    """One process, in a session and a process group of its own, so that the terminal's signals miss it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = None  # when it starts again, on the monotonic clock
        self.last_code = 0
        self._pause = FIRST_PAUSE
        self._started = 0.0

    def start(self) -> int:
        """Start it and return the descriptor that its output comes from."""
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - what the spec names, without a shell
                shim_argv(self.spec.argv, death_signal=self.spec.death_signal),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.STDOUT,
                env=self.spec.env,
                start_new_session=True,
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._started = time.monotonic()
        return read

    def has_ended(self) -> bool:
        """Whether it has ended; not reaped yet where the system can tell without, so that its id stays its own."""
        if self.process is None:
            return True
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self.process.poll() is not None

    def reap(self) -> int:
        """Take its exit code and kill what it left behind in its group: a port held by an orphan bars a restart."""
        process = self.process
        assert process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self.last_code = process.wait(KILL_TIMEOUT)
        self.process = None
        return self.last_code

    def signal(self, number: signal.Signals) -> None:
        """Signal the process itself, not its group: it stops its own children in order."""
        if self.process is not None and not self.has_ended():
            os.kill(self.process.pid, number)  # send_signal might reap it

    def kill(self) -> None:
        """Kill its group and reap it; does nothing where it does not run."""
        if self.process is not None:
            self.reap()

    def next_pause(self) -> float:
        """Seconds until the next start: twice as long each time, unless it lived for long."""
        if time.monotonic() - self._started >= LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        pause = self._pause
        self._pause = min(LONGEST_PAUSE, pause * 2)
        return pause


def _is_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number is in the pipe already."""
