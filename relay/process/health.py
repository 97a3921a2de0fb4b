"""The health port of publisher and worker: `/healthz` and `/metrics`, answered by a thread of their own."""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from relay.core.errors import ConfigurationError
from relay.metrics import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.config_values import Bind

log = logging.getLogger(__name__)


class HealthServer:
    """Serves until stopped. `/healthz` says that the process runs, and asks nothing outside it: no database, no Redis.

    Where a vital part of the process is gone for good, which only a new process mends, it is 503 and names the part.
    """

    def __init__(
        self,
        bind: Bind,
        *,
        before_scrape: Callable[[], None] | None = None,
        dead: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`dead` returns the parts that are gone. Raises ConfigurationError where the port is taken."""

        class Handler(_Handler):
            refresh = staticmethod(before_scrape or (lambda: None))
            gone = staticmethod(dead or (lambda: ()))

        try:
            self._server = ThreadingHTTPServer((bind.host, bind.port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"RELAY_METRICS_BIND: {bind} cannot be listened on ({error.strerror}); give this process a port of its own"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="relay-health", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    refresh: ClassVar[Callable[[], None]]
    gone: ClassVar[Callable[[], Sequence[str]]]
    timeout = 10

    def do_GET(self) -> None:
        if self.path == "/healthz":
            gone = type(self).gone()
            said = {"status": "failing", "dead": list(gone)} if gone else {"status": "ok"}
            text = json.dumps(said, separators=(",", ":")) + "\n"
            self._answer(503 if gone else 200, text.encode(), "application/json")
        elif self.path == "/metrics":
            type(self).refresh()
            self._answer(200, generate_latest(REGISTRY), CONTENT_TYPE_LATEST)
        else:
            self._answer(404, b"not found: /healthz and /metrics are here\n", "text/plain; charset=utf-8")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)
