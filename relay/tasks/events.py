"""Task events for Flower, published by a thread of their own, some at a time.

Celery's dispatcher holds its lock while its heartbeat retries against a frozen Redis, and with it
every dispatch. So `relay.deliver` sends no events itself; what happened is kept, bounded, and told
a few times a second: three messages a batch took a quarter of a busy worker's time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger(__name__)

#: Events kept while the broker does not answer; the oldest go first: they are for looking at.
KEPT = 2000
#: Seconds that the first event waits for company, and between two tries for a broker that does not answer.
PERIOD_SECS = 0.25
RETRY_SECS = 1.0


class TaskEvents:
    """Tells Flower what became of batches. Never blocks, never fails a caller."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        #: A deque's ends are safe between threads.
        self._kept: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._run, name="relay-events", daemon=True)
        self._started_at: dict[str, float] = {}
        self._hostname = ""
        self._stopping = threading.Event()
        self._arrived = threading.Event()
        self._failing = False

    def start(self, hostname: str) -> None:
        """Start publishing, as the worker `hostname`."""
        self._hostname = hostname
        self._thread.start()

    def began(self, task_id: str, name: str, args: str) -> None:
        """Tell that a batch was handed to the pool."""
        now = time.time()
        self._started_at[task_id] = now
        facts = {"uuid": task_id, "name": name, "args": args, "kwargs": "{}", "retries": 0, "root_id": task_id}
        self._kept.append(("task-received", facts | {"timestamp": now}))
        self._keep("task-started", {"uuid": task_id, "timestamp": now})

    def ended(self, task_id: str, *, succeeded: bool) -> None:
        """Tell how a batch's claim ended."""
        now = time.time()
        facts: dict[str, Any] = {"uuid": task_id, "timestamp": now}
        runtime = now - self._started_at.pop(task_id, now)
        if succeeded:
            self._keep("task-succeeded", facts | {"result": "None", "runtime": runtime})
        else:
            self._keep("task-failed", facts | {"exception": "the claim failed", "traceback": ""})

    def stop(self) -> None:
        """Stop soon, without waiting for a broker that does not answer."""
        self._stopping.set()
        self._arrived.set()

    def _keep(self, kind: str, facts: dict[str, Any]) -> None:
        self._kept.append((kind, facts))
        # Setting it takes its lock.
        if not self._arrived.is_set():
            self._arrived.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._app.connection_for_write() as connection:
                    self._publish(connection)
            except Exception as error:  # noqa: BLE001 - kombu and redis raise many kinds; none may end the thread
                if not self._failing:
                    log.warning("task events wait for the broker", extra={"error": repr(error)[:200]})
                self._failing = True
                self._stopping.wait(RETRY_SECS)

    def _publish(self, connection: Any) -> None:
        dispatcher = self._app.events.Dispatcher(
            connection,
            hostname=self._hostname,
            buffer_while_offline=False,
            # All of a period in one message; the limit is never reached.
            buffer_group=frozenset({"task"}),
            buffer_limit=KEPT + 1,
        )
        try:
            while not self._stopping.is_set():
                self._arrived.wait()
                if self._stopping.wait(PERIOD_SECS):
                    return
                # Cleared before they are taken: what comes in between is told now, or sets it again.
                self._arrived.clear()
                for _ in range(len(self._kept)):
                    kind, facts = self._kept.popleft()
                    dispatcher.send(kind, **facts)
                dispatcher.flush()
                self._failing = False
        finally:
            dispatcher.close()
