"""The long-running roles but for the API: publisher, worker, beat, Flower."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.exceptions import SecurityWarning

from relay import metrics
from relay.bootstrap.publisher import make_publisher
from relay.bootstrap.schema import await_schema, check_schema
from relay.bootstrap.worker import make_worker
from relay.core.errors import ConfigurationError
from relay.process.health import HealthServer
from relay.tasks import maintenance, steps
from relay.tasks.app import make_app

if TYPE_CHECKING:
    from relay.config import Settings

log = logging.getLogger(__name__)

#: Seconds. Threads share the interpreter's lock: at the default 5 ms a claim in Python would hold up the send loop.
SWITCH_INTERVAL = 0.0005
#: Objects made, less those freed, before the youngest are looked through. The default of 700 is one claim's.
COLLECT_AFTER = 50_000


def run_publisher(settings: Settings) -> int:
    """Publish until SIGTERM or SIGINT."""
    _await_schema(settings)
    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parts = make_publisher(settings)
    metrics.REGISTRY.register(parts.gauges)
    health = HealthServer(settings.metrics_bind, before_scrape=parts.refresh_metrics, dead=parts.vitals.dead)
    health.start()
    parts.gauges.start()
    parts.heart.start()
    parts.vitals.watch()
    log.info("publisher started", extra={"health": f"http://{settings.metrics_bind}/healthz"})
    quieten_collector()
    parts.publisher.run(stop)
    parts.vitals.leave()
    parts.gauges.stop()
    parts.heart.stop()
    health.stop()
    return 0


def run_worker(settings: Settings, *, name: str | None) -> int:
    """Deliver until SIGTERM, then finish what is in flight within RELAY_SHUTDOWN_GRACE_SECS and return 0."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    _keep_logging()
    # Celery warns of root because of pickle; here only JSON is accepted, and `relay up` runs as whoever starts it.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    _await_schema(settings)
    worker = make_worker(settings)
    health = HealthServer(settings.metrics_bind, before_scrape=worker.refresh_metrics, dead=worker.vitals.dead)
    health.start()
    app = make_app(settings)
    steps.install(app, worker)
    maintenance.register(app, lambda: worker)
    celery_worker: Any = app.Worker(
        hostname=name or f"relay-{os.getpid()}@{socket.gethostname()}",
        pool_cls="threads",
        concurrency=settings.worker_threads,
        loglevel=settings.log_level.upper(),
        quiet=True,
        without_gossip=True,
        without_mingle=True,
    )
    log.info("worker started", extra={"health": f"http://{settings.metrics_bind}/healthz"})
    quieten_collector()
    maintenance.start_days(worker)
    celery_worker.start()
    health.stop()
    return int(celery_worker.exitcode or 0)


def run_beat(settings: Settings) -> int:
    """Tick until SIGTERM."""
    _keep_logging()
    check_schema(settings)
    app = make_app(settings)
    log.info("beat started")
    app.Beat(loglevel=settings.log_level.upper(), quiet=True).run()
    return 0


def run_flower(settings: Settings) -> None:
    """Become Flower. Its login travels in the environment, not on the command line, where `ps` would show it.

    Raises ConfigurationError where it is not installed, or has no login.
    """
    if not has_flower():
        raise ConfigurationError("Flower is not installed: pip install '.[ops]' in a clone of Relay")
    if settings.flower_auth is None:
        raise ConfigurationError("RELAY_FLOWER_AUTH is not set (user:password): Flower is not run open to everybody")
    # No setting of Flower's own: FLOWER_UNAUTHENTICATED_API=true and others open what is closed here.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOWER_")}
    environment = kept | {
        "FLOWER_BASIC_AUTH": settings.flower_auth.get_secret_value(),
        "FLOWER_ADDRESS": settings.flower_bind.host,
        "FLOWER_PORT": str(settings.flower_bind.port),
        "FLOWER_INSPECT_TIMEOUT": "2000",
        # Workers send them anyway; asking every worker each 5 s would cost as much as all that Flower does when idle.
        "FLOWER_ENABLE_EVENTS": "false",
        # The console shows no buttons for the routes that relay/tasks/console.py takes away.
        "FLOWER_READ_ONLY": "true",
    }
    argv = [
        sys.executable,
        "-m",
        "relay.tasks.console",
        "-A",
        "relay.tasks.inspected",
        "--quiet",
        "flower",
        "--loglevel=warning",
    ]
    os.execve(sys.executable, argv, environment)  # noqa: S606 - no shell, our own arguments


def has_flower() -> bool:
    """Say whether Flower is installed, which comes with the extra `ops`."""
    return find_spec("flower") is not None


def quieten_collector() -> None:
    """Look for reference cycles seldom: what a delivery is made of holds none, and looking took a tenth of the time.

    Call it once everything is imported and wired: that is set aside for good.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 100)


def _await_schema(settings: Settings) -> None:
    """Wait for the database, however long. SIGTERM or SIGINT end the process at once, until the role's own handlers do.

    Said here, as the first process of a container is spared the signals that it has no handler for.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    await_schema(settings)


def _keep_logging() -> None:
    """Keep Celery from setting up logging of its own."""
    signals.setup_logging.connect(_nothing, weak=False)


def _nothing(**_: object) -> None:
    """Take the place of Celery's logging setup."""
