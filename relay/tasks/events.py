"""Task events for Flower, published by a thread of their own.

Celery's dispatcher holds its lock while its heartbeat retries against a frozen Redis, and with it
every dispatch. So `relay.deliver` sends no events itself; what happened goes into a bounded queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger(__name__)

#: Events kept while the broker does not answer; what is over is lost: they are for looking at.
KEPT = 2000


class TaskEvents:
    """Tells Flower what became of batches. Never blocks, never fails a caller."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(maxsize=KEPT)
        self._thread = threading.Thread(target=self._run, name="relay-events", daemon=True)
        self._started_at: dict[str, float] = {}
        self._hostname = ""
        self._stopping = False

    def start(self, hostname: str) -> None:
        """Start publishing, as the worker `hostname`."""
        self._hostname = hostname
        self._thread.start()

    def began(self, task_id: str, name: str, args: str) -> None:
        """Tell that a batch was handed to the pool."""
        now = time.time()
        self._started_at[task_id] = now
        facts = {"uuid": task_id, "name": name, "args": args, "kwargs": "{}", "retries": 0, "root_id": task_id}
        self._put("task-received", facts | {"timestamp": now})
        self._put("task-started", {"uuid": task_id, "timestamp": now})

    def ended(self, task_id: str, *, succeeded: bool) -> None:
        """Tell how a batch's claim ended."""
        now = time.time()
        runtime = now - self._started_at.pop(task_id, now)
        if succeeded:
            self._put("task-succeeded", {"uuid": task_id, "result": "None", "runtime": runtime, "timestamp": now})
        else:
            self._put(
                "task-failed",
                {"uuid": task_id, "exception": "the claim failed", "traceback": "", "timestamp": now},
            )

    def stop(self) -> None:
        """Stop soon, without waiting for a broker that does not answer."""
        self._stopping = True
        self._put("", {})

    def _put(self, kind: str, facts: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait((kind, facts))
        except queue.Full:
            return

    def _run(self) -> None:
        failing = False
        while not self._stopping:
            try:
                with self._app.connection_for_write() as connection:
                    self._publish(connection)
            except Exception as error:  # noqa: BLE001 - kombu and redis raise many kinds; none may end the thread
                if not failing:
                    log.warning("task events wait for the broker", extra={"error": repr(error)[:200]})
                failing = True
                time.sleep(1.0)
            else:
                failing = False

    def _publish(self, connection: Any) -> None:
        dispatcher = self._app.events.Dispatcher(connection, hostname=self._hostname, buffer_while_offline=False)
        try:
            while not self._stopping:
                kind, facts = self._queue.get() or ("", {})
                if kind:
                    dispatcher.send(kind, **facts)
        finally:
            dispatcher.close()
