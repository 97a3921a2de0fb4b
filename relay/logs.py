"""Logging: JSON for machines, text on a terminal; `extra={...}` becomes fields either way."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

#: What every record has; whatever else it has came with `extra`.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

#: Third parties that say a line for each of ours.
_QUIET = (
    "alembic.runtime.plugins",
    "amqp",
    "celery.app.trace",
    "celery.beat",
    "celery.worker.consumer.connection",
    "celery.worker.strategy",
    "kombu",
    "urllib3",
)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A readable line, fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items() if value is not None)
        line = f"{_timestamp(record.created)[11:23]} {record.levelname.lower():7} {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(role: str, *, level: str, style: Literal["auto", "json", "text"]) -> None:
    """Send all logging of this process to stderr. `auto` is text on a terminal, JSON in a pipe."""
    if style == "auto":
        style = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}Z"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _USUAL and not name.startswith("_")}
