"""`relay api`: the HTTP API, in this process or in several."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import resource
import signal
import socket
import threading
import time
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from relay import logs
from relay.bootstrap.api import make_api
from relay.bootstrap.schema import check_schema
from relay.core.errors import ConfigurationError
from relay.process.metrics_api import ApiFigures, shared
from relay.web.app import EXPRESS, create_app
from relay.web.front import CONNECTIONS, Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import SpawnProcess

    from relay.config import Settings
    from relay.config_values import Bind

#: Connections waiting to be accepted.
_BACKLOG: Final = 2048
#: Descriptors kept for what is no client: the database's connections, files.
_OTHER_DESCRIPTORS: Final = 256
#: Objects made, less those freed, before the youngest are looked through. The default of 700 is a few requests'.
_COLLECT_AFTER: Final = 50_000
#: A serving process that ends within so many seconds did not start; after so many such in a row none is made anew.
_START_SECS: Final = 10.0
_FAILED_STARTS: Final = 5
#: Seconds between two processes that replace one that died.
_RESPAWN_SECS: Final = 0.5
#: Seconds that a serving process has beyond the grace.
_MARGIN_SECS: Final = 2.0

log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then finish what is under way within RELAY_SHUTDOWN_GRACE_SECS.

    Must run in the main thread. Returns 0, or 1 where requests had to be cut off. With several processes each makes its
    own connections, and one that dies is replaced; where they die again and again the answer is 1. Raises
    ConfigurationError where RELAY_BIND cannot be used.
    """
    check_schema(settings)
    with _reserved(settings.bind) as (address, port):
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        log.info("the API starts", extra={"url": f"http://{shown}", "processes": settings.api_processes})
        if settings.api_processes == 1:
            return _serve_here(settings, address, port)
        return _Processes(settings, address, port).run()


def _serve_here(settings: Settings, address: str, port: int, figures: ApiFigures | None = None) -> int:
    api = make_api(settings, figures)
    app = create_app(api)
    front = Front(
        app,
        _listen(address, port),
        threads=settings.api_threads,
        grace_secs=settings.shutdown_grace_secs,
        connections=_room_for_connections(),
        on_refusal=api.figures.answered,
        express=app.extensions.get(EXPRESS),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: front.stop())
    # What is there by now stays: it need not be looked through.
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)
    api.heart.start()
    finished = front.run()
    api.heart.stop()
    log.info("the API has stopped")
    return 0 if finished else 1


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # For the next start: connections that this one ended linger in the system for a minute, with their listener's option.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(_BACKLOG)
    return listener


def _room_for_connections() -> int:
    """Raise this process's limit of descriptors to what is wanted, if that is allowed; return what it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(64, min(CONNECTIONS, soft - _OTHER_DESCRIPTORS))


class _Processes:
    """The serving processes, where there are several."""

    def __init__(self, settings: Settings, address: str, port: int) -> None:
        self._settings = settings
        self._memory = shared(settings.api_processes)
        self._arguments = (settings, address, port, self._memory)
        self._grace_secs = settings.shutdown_grace_secs + _MARGIN_SECS
        #: When each started, and its row of the figures.
        self._live: dict[SpawnProcess, tuple[float, int]] = {}
        self._stopping = False
        self._failed = 0

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for row in range(self._settings.api_processes):
            self._start(row)
        code = 0
        while self._live and not self._stopping:
            wait([process.sentinel for process in self._live])
            code = self._replace()
        end = time.monotonic() + self._grace_secs
        for process in self._live:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            code = code or (1 if process.exitcode else 0)
        return code

    def _start(self, row: int) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(*self._arguments, row))
        process.start()
        self._live[process] = (time.monotonic(), row)
        if self._stopping:
            process.terminate()

    def _replace(self) -> int:
        """Start a process for each that died; return 1, having ended all, where that has no prospect."""
        for process, (since, row) in list(self._live.items()):
            if process.is_alive() or self._stopping:
                continue
            del self._live[process]
            self._failed = self._failed + 1 if time.monotonic() - since < _START_SECS else 0
            log.error("a serving process ended", extra={"pid": process.pid, "code": process.exitcode})
            if self._failed >= _FAILED_STARTS:
                self._stop()
                return 1
            time.sleep(_RESPAWN_SECS)
            self._start(row)
        return 0

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for process in list(self._live):
            process.terminate()


def _child(settings: Settings, address: str, port: int, memory: Any, row: int) -> None:
    """Serve in a process of its own, until it is told to stop or has no parent any more."""
    logs.configure("api", level=settings.log_level, style=settings.log_format)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def follow() -> None:
            wait([sentinel])
            signal.raise_signal(signal.SIGTERM)

        threading.Thread(target=follow, name="relay-parent", daemon=True).start()
    raise SystemExit(_serve_here(settings, address, port, ApiFigures(memory, row)))


@contextmanager
def _reserved(bind: Bind) -> Iterator[tuple[str, int]]:
    """Hold the address for as long as it is served; yield it in figures, with the port that the system chose for 0.

    Each serving process binds a socket of its own beside the others' (SO_REUSEPORT), and so would a second `relay api`,
    unnoticed. Hence a first bind that shares with nobody.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0]
        address = str(resolved[0])
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((address, bind.port))
            port = int(alone.getsockname()[1])
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address, port))
    except OSError as error:
        raise ConfigurationError(
            f"RELAY_BIND={bind} cannot be listened on ({error.strerror or error}): choose another address or port, or "
            "stop what uses it"
        ) from error
    with held:
        yield address, port
