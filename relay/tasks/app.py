"""The Celery app: a host for the pipeline, and the carrier of control tasks. It never retries a delivery."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Queue

from relay.config import Settings, require
from relay.outbox.broker import celery_settings
from relay.tasks.schedule import beat_schedule

#: Seconds. Without them a frozen Redis blocks for ever.
SOCKET_TIMEOUT_SECS = 10
CONNECT_TIMEOUT_SECS = 5
#: Longer than the longest sweep: a control task that is under way must not be handed out again.
VISIBILITY_TIMEOUT_SECS = 3600


def make_app(settings: Settings) -> Celery:
    """Make the app of one process."""
    app = Celery("relay", set_as_current=False, autofinalize=True)
    queue = f"{settings.prefix}.control"
    app.conf.update(configuration(settings, queue))
    return app


def configuration(settings: Settings, queue: str) -> dict[str, Any]:
    """Celery's settings, each for a reason."""
    broker = celery_settings(require(settings.broker_url, "RELAY_BROKER_URL"))
    return {
        **broker,
        "broker_connection_retry_on_startup": True,
        # None: try for ever. The default ends the worker after a hundred tries.
        "broker_connection_max_retries": None,
        # A Redis that answers and refuses (full, a replica) ends no worker, either: relay/tasks/consumer.py waits for it.
        "broker_channel_error_retry": True,
        "worker_consumer": "relay.tasks.consumer:PatientConsumer",
        "broker_transport_options": {
            "socket_timeout": SOCKET_TIMEOUT_SECS,
            "socket_connect_timeout": CONNECT_TIMEOUT_SECS,
            "health_check_interval": 10,
            "visibility_timeout": VISIBILITY_TIMEOUT_SECS,
            "global_keyprefix": f"{settings.prefix}:celery:",
            **broker.get("broker_transport_options", {}),
        },
        "task_serializer": "json",
        "accept_content": ["json"],
        # Postgres is the record.
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        # Control tasks are idempotent and come again with the next tick; a late acknowledgement on a connection that
        # was replaced meanwhile ends the worker (celery and kombu 5.7.0).
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "task_default_queue": queue,
        "task_queues": [Queue(queue)],
        "task_create_missing_queues": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_send_task_events": True,
        "task_send_sent_event": False,
        "worker_pool": "threads",
        "worker_concurrency": settings.worker_threads,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_remote_control": True,
        "control_queue_ttl": 60.0,
        "control_queue_expires": 60.0,
        "event_queue_expires": 60.0,
        "event_queue_ttl": 10.0,
        "event_queue_prefix": f"{settings.prefix}.events",
        "event_exchange": f"{settings.prefix}.events",
        "control_exchange": f"{settings.prefix}.control-exchange",
        "beat_scheduler": "celery.beat:Scheduler",
        "beat_schedule": beat_schedule(),
        "enable_utc": True,
        "timezone": "UTC",
    }
