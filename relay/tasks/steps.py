"""The step that makes a Celery worker a Relay worker: it feeds batches of hints to the worker's own pool.

On the worker's blueprint, not the consumer's, so that a broker that comes and goes restarts nothing here.
What is semi-internal in Celery (the consumer's strategies) is called in this file only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from celery import Celery, bootsteps, signals
from kombu.message import Message
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid

from relay.tasks import deliver
from relay.tasks.events import TaskEvents

if TYPE_CHECKING:
    from relay.bootstrap.worker import Worker
    from relay.delivery.intake import Batch

log = logging.getLogger(__name__)

#: Seconds that Celery's own shutdown may take after ours is done, before the process ends without it.
CELERY_EXIT_SECS = 3.0


class StreamStep(bootsteps.StartStopStep):
    """Starts the Relay worker when the pool is up; drains it when the worker stops."""

    requires = ("celery.worker.components:Pool",)
    #: Set by `install`.
    runtime: Runtime

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        """Begin to read."""
        self.runtime.start(parent)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Drain, unless the signal's own thread has."""
        self.runtime.drain()

    def terminate(self, parent: Any) -> None:  # noqa: ARG002
        """A cold shutdown: leave at once, the leases expire."""
        self.runtime.worker.intake.stop_reading()


class Runtime:
    """One process's Relay worker inside its Celery worker."""

    def __init__(self, app: Celery, worker: Worker) -> None:
        self.worker = worker
        self._app = app
        self._controller: Any = None
        self._batches: dict[str, Batch] = {}
        self._events = TaskEvents(app)
        self._deadline: float | None = None
        self._drain_lock = threading.Lock()
        self._clean = False

    def start(self, controller: Any) -> None:
        """Start all threads; batches go through `controller`'s consumer as soon as it has one."""
        self._controller = controller
        self._events.start(controller.hostname)
        self.worker.start(self.deliver)

    def take(self, task_id: str) -> Batch:
        """Return the batch of a running task."""
        return self._batches[task_id]

    def deliver(self, batch: Batch) -> None:
        """Run a batch as a task in the worker's pool; without Celery while it has no consumer (Redis away at start)."""
        consumer = getattr(self._controller, "consumer", None)
        strategy = None if consumer is None else consumer.strategies.get(deliver.NAME)
        if strategy is None:
            self.worker.intake.deliver_directly(batch)
            return
        task_id = uuid()
        message, args_repr = self._message(task_id, batch)
        self._batches[task_id] = batch
        ended = False

        def acknowledge(*_: object, **__: object) -> None:
            end(succeeded=True)

        def reject(*_: object, **__: object) -> None:
            end(succeeded=False)

        def end(*, succeeded: bool) -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            self._batches.pop(task_id, None)
            if succeeded:
                batch.acknowledge()
            else:
                batch.abandon()
            self._events.ended(task_id, succeeded=succeeded)

        self._events.began(task_id, deliver.NAME, args_repr)
        try:
            strategy(message, None, acknowledge, reject, [])
        except BaseException:
            reject()
            raise

    def on_signal(self) -> None:
        """The worker was told to stop. Called in a signal handler, so it only sets flags and starts a thread.

        The thread keeps the deadline: with Redis frozen, Celery's own main thread does not come back. A second
        signal ends the process at once; its leases then expire.
        """
        self.worker.intake.stop_reading()
        if self._deadline is not None:
            os._exit(1)
        self._deadline = time.monotonic() + self.worker.settings.shutdown_grace_secs
        threading.Thread(target=self._leave, name="relay-shutdown", daemon=True).start()

    def drain(self) -> None:
        """Finish what is in flight within the grace."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.worker.settings.shutdown_grace_secs
        with self._drain_lock:
            self._clean = self.worker.drain(self._deadline)
            self._events.stop()

    def _leave(self) -> None:
        self.drain()
        log.info("drained", extra={"clean": self._clean})
        time.sleep(max(0.0, min(CELERY_EXIT_SECS, (self._deadline or 0.0) - time.monotonic())))
        # Celery is still about: its connection to the broker does not answer. Nothing of ours is left to do.
        os._exit(0 if self._clean else 1)

    def _message(self, task_id: str, batch: Batch) -> tuple[Message, str]:
        ids = [id_.hex for id_ in batch.ids]
        args_repr = f"([{', '.join(map(str, batch.ids[:3]))}{', …' if len(ids) > 3 else ''}],)  # {len(ids)}"
        task = self._app.amqp.as_task_v2(
            task_id, deliver.NAME, args=(ids,), kwargs={}, argsrepr=args_repr, kwargsrepr="{}"
        )
        message = Message(
            body=dumps(task.body),
            content_type="application/json",
            content_encoding="utf-8",
            headers=task.headers,
            properties=task.properties,
            delivery_info={"exchange": "", "routing_key": "stream"},
        )
        return message, args_repr


def install(app: Celery, worker: Worker) -> Runtime:
    """Make `app`'s worker a Relay worker; return its runtime."""
    runtime = Runtime(app, worker)

    class Step(StreamStep):
        pass

    Step.runtime = runtime
    app.steps["worker"].add(Step)
    deliver.register(app, runtime.take)

    def shutting_down(**_: Any) -> None:
        runtime.on_signal()

    signals.worker_shutting_down.connect(shutting_down, weak=False)
    return runtime
