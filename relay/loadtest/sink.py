"""The receiver of a load test, seen from the process that measures: starts it, asks what came, stops it.

Every arrival is kept, so that losses, duplicates and latencies are exact. Costs 24 bytes a request over there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from array import array
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from relay.core.errors import Unavailable
from relay.embedded.launch import shim_argv

#: Seconds. A sink that does not answer within them is taken for dead.
_ANSWER_SECS = 30.0
_STOP_SECS = 5.0
_ID_BYTES = 16
#: Run as a file, without the package around it: it needs the standard library alone, and is up at once.
_SERVER = Path(__file__).with_name("sink_server.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What came, in the order of arrival."""

    #: The 16 bytes of each request's delivery id, one after the other.
    ids: bytes
    #: When each was read whole, in seconds of Unix time.
    times: array[float]

    def pairs(self) -> list[tuple[bytes, float]]:
        """Id and time of each request."""
        return [(self.ids[place * _ID_BYTES : (place + 1) * _ID_BYTES], at) for place, at in enumerate(self.times)]


class Sink:
    """A receiver in a process of its own, within a `with` block.

    `origins` is the number of its ports: to a client each is a host of its own. One process takes tens of thousands of
    requests a second. Its methods must not be called by two threads at once. They raise Unavailable where the process
    is gone.
    """

    def __init__(self, *, origins: int = 1) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and file
                shim_argv(
                    [sys.executable, "-I", "-S", str(_SERVER), str(theirs.fileno()), str(origins)],
                    death_signal=signal.SIGKILL,
                ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = Connection(ours.detach())
        try:
            self._ports: list[int] = json.loads(self._ask(b"ports"))
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def urls(self) -> list[str]:
        """Its origins, such as `http://127.0.0.1:40001`; what to put behind them says `relay.loadtest.sink_server`."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def url(self) -> str:
        """The first of its origins."""
        return self.urls[0]

    def count(self) -> int:
        """How many requests came and are written down, duplicates and nameless ones among them."""
        return int(self._ask(b"count"))

    def snapshot(self) -> Arrivals:
        """All requests with a delivery id that came since the start or the last reset."""
        ids = self._ask(b"snapshot")
        times = array("d")
        times.frombytes(self._receive())
        return Arrivals(ids=ids, times=times)

    def reset(self) -> None:
        """Forget what came."""
        self._ask(b"reset")

    def answer(self, *, status: int = 204, delay_ms: float = 0) -> None:
        """Answer with `status` (204 or 200) after a delay, from now on."""
        self._ask(b"answer " + json.dumps({"status": status, "delay_ms": delay_ms}).encode())

    def stop(self) -> None:
        """End the process; safe to call again."""
        with contextlib.suppress(Unavailable, OSError):
            self._ask(b"stop")
        self._control.close()
        try:
            self._process.wait(_STOP_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, command: bytes) -> bytes:
        try:
            self._control.send_bytes(command)
        except OSError as error:
            raise Unavailable("the load test's sink has ended") from error
        return self._receive()

    def _receive(self) -> bytes:
        try:
            if self._control.poll(_ANSWER_SECS):
                return self._control.recv_bytes()
        except (EOFError, OSError) as error:
            raise Unavailable("the load test's sink has ended") from error
        raise Unavailable("the load test's sink does not answer")
