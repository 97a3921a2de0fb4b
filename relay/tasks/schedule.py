"""What beat sends, and how often. No `expires`: Celery would judge it by the worker's clock against beat's."""

from __future__ import annotations

from typing import Any

from relay.store.heartbeats import BEAT_SECS

#: Sweep (relay/sweeps) to seconds between two ticks. The sweeps' own intervals are the same, but where a line says so.
SWEEPS = {
    "reap": 5.0,
    "reconcile": 10.0,
    "stream-upkeep": 15.0,
    # It runs once an hour or a little oftener: a beat that is restarted within the hour must have ticked for it, too.
    "partitions": 600.0,
    # Workers look for its work themselves, every 2 s: this is for when they cannot.
    "wake": 15.0,
    "sleepers": 60.0,
    # It runs every 10 minutes, and at each tick while there is more to delete than one run can.
    "retention": 60.0,
    # As for `wake`.
    "replay": 15.0,
}


def task_name(sweep: str) -> str:
    """Return the Celery task that runs `sweep`."""
    return f"relay.{sweep.replace('-', '_')}"


def beat_schedule() -> dict[str, dict[str, Any]]:
    """Return Celery's beat table."""
    table = {sweep: {"task": task_name(sweep), "schedule": secs} for sweep, secs in SWEEPS.items()}
    table["heartbeat"] = {"task": "relay.heartbeat", "schedule": BEAT_SECS}
    return table
