"""`relay api`: the HTTP API, served by Granian."""

from __future__ import annotations

import functools
import logging
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from granian import Granian
from granian.constants import HTTPModes, Interfaces
from granian.log import LogLevels

from relay import bootstrap
from relay.core.errors import ConfigurationError
from relay.web import wsgi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.config import Settings
    from relay.config_values import Bind

#: Connections waiting to be accepted, and connections that a process holds open (idle ones count).
_BACKLOG: Final = 2048
_CONNECTIONS: Final = 1024

#: Granian's own lines go where ours go.
_LOGGING: Final = {
    "handlers": {},
    "loggers": {"_granian": {"level": "INFO", "handlers": [], "propagate": True}},
}

log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then finish what is under way within RELAY_SHUTDOWN_GRACE_SECS; return 0.

    Must run in the main thread. The serving processes are children, which make their own connections. HTTP/1.1 only:
    chunked bodies and kept-alive connections are the server's. A child that dies is replaced; where children die
    again and again the process exits with status 1. Raises ConfigurationError where RELAY_BIND cannot be used.
    """
    bootstrap.check_schema(settings)
    with _reserved(settings.bind) as (address, port):
        server = Granian(
            "relay.web.wsgi",
            address=address,
            port=port,
            interface=Interfaces.WSGI,
            workers=settings.api_processes,
            blocking_threads=settings.api_threads,
            backlog=_BACKLOG,
            backpressure=_CONNECTIONS,
            http=HTTPModes.http1,
            websockets=False,
            log_level=LogLevels(settings.log_level),
            log_dictconfig=_LOGGING,
            respawn_failed_workers=True,
            workers_kill_timeout=max(1, settings.shutdown_grace_secs),
        )
        # It warns of more than 2 threads a core at every start. These wait for Postgres most of the time.
        logging.getLogger("_granian").addFilter(
            lambda record: not record.getMessage().startswith("Configuration allows")
        )
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        log.info("the API starts", extra={"url": f"http://{shown}", "processes": settings.api_processes})
        server.serve(target_loader=functools.partial(wsgi.load, settings), wrap_loader=False)
    return 0


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
