"""`relay.deliver`: one batch of hints as one Celery task. It claims, hands over to the sender and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.exceptions import Reject

from relay.core.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Celery, Task

    from relay.delivery.intake import Batch

NAME = "relay.deliver"


def register(app: Celery, take: Callable[[str], Batch]) -> None:
    """Register the task. `take` returns the batch that travels under a task's id."""

    @app.task(
        name=NAME,
        bind=True,
        # It belongs to this app and its worker: Celery would register it with every app made later, too.
        shared=False,
        max_retries=0,
        # Settled by the stream step once the leases are committed, and not when the claim failed.
        acks_late=True,
        acks_on_failure_or_timeout=False,
        # Celery's dispatcher holds its lock while a frozen Redis is retried; a thread of ours tells Flower instead.
        send_events=False,
        ignore_result=True,
    )
    def deliver(self: Task[..., int], ids: Sequence[str]) -> int:  # noqa: ARG001 - the ids are for whoever looks at the task
        try:
            return take(str(self.request.id)).dispatch()
        except Unavailable as error:
            # Stopping: the hints stay unsettled, and another worker gets them.
            raise Reject(str(error), requeue=False) from None
