"""New row ids, made where a clock and randomness are at hand."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from relay.core.ids import uuid7

if TYPE_CHECKING:
    from uuid import UUID


def new_id() -> UUID:
    """Return a new id: time-ordered, so that indexes grow at their right edge (RFC 9562 version 7)."""
    return uuid7(time.time_ns() // 1_000_000, os.urandom(10))
