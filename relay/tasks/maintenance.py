"""Control tasks: each one call to a sweep, so that it can be asked for in Flower, and the rarer ones seen there."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import NAMESPACE_DNS, uuid5

from relay import __version__
from relay.delivery.dispatch import DATABASE_ERRORS
from relay.store import heartbeats
from relay.store.heartbeats import Process
from relay.tasks.schedule import SWEEPS, task_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

    from relay.bootstrap.worker import Worker

log = logging.getLogger(__name__)

#: Seconds between two ticks from which on Flower is told of each. Oftener, they would soon be all that its list holds;
#: and three messages for each tick were a quarter of what an idle installation costs.
TOLD_FROM_SECS = 60.0

#: Beat has no row of its own to beat: what arrives here is its sign of life.
BEAT_PROCESS = Process(process_id=uuid5(NAMESPACE_DNS, "beat.relay"), role="beat", host="", pid=0, release=__version__)


def register(app: Celery, worker: Callable[[], Worker]) -> None:
    """Register a task for each sweep, and beat's heartbeat."""
    for sweep in SWEEPS:
        _register_sweep(app, worker, sweep)

    @app.task(name="relay.heartbeat", max_retries=0, shared=False, send_events=False)
    def heartbeat() -> None:
        with _database_may_be_away("heartbeat"), worker().engine.begin() as connection:
            heartbeats.beat(connection, BEAT_PROCESS, {})


def start_days(worker: Worker) -> None:
    """Begin to make the attempt log's missing days, unless that was done lately: beat asks for it seldom, and a beat that
    is restarted oftener never does (B-160). On a thread of its own: a lock may keep it waiting."""

    def run() -> None:
        with _database_may_be_away("partitions"):
            worker.run_sweep("partitions")

    threading.Thread(target=run, name="relay-days", daemon=True).start()


def _register_sweep(app: Celery, worker: Callable[[], Worker], sweep: str) -> None:
    @app.task(name=task_name(sweep), max_retries=0, shared=False, send_events=SWEEPS[sweep] >= TOLD_FROM_SECS)
    def run() -> None:
        with _database_may_be_away(sweep):
            worker().run_sweep(sweep)


@contextmanager
def _database_may_be_away(task: str) -> Iterator[None]:
    """Say in a line that it is: the next tick comes in seconds, and an outage would fill the log with tracebacks."""
    try:
        yield
    except DATABASE_ERRORS as error:
        log.warning("a control task met no database", extra={"task": task, "error": str(error).strip()[:200]})
