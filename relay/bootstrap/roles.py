"""What every role does at its start, and shows of itself."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from relay import failpoints, metrics
from relay.config import warnings_of
from relay.tracing import make_tracing

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.config import Settings
    from relay.tracing import Tracing

log = logging.getLogger(__name__)


def arm(settings: Settings) -> None:
    failpoints.arm({point.name: point.action for point in settings.failpoint})
    for warning in warnings_of(settings):
        log.warning(warning)


def tracing_of(settings: Settings, role: str) -> Tracing | None:
    return make_tracing(role) if settings.tracing else None


def note_pools(engines: Mapping[str, sa.Engine]) -> None:
    pools = {name: cast("sa.QueuePool", engine.pool) for name, engine in engines.items()}
    metrics.POOLS.in_use = {name: pool.checkedout() for name, pool in pools.items()}
    metrics.POOLS.limits = {name: pool.size() for name, pool in pools.items()}


def consumer_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
