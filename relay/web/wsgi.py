"""The application for a WSGI server, made in the process that serves it.

`relay api` passes `load` its settings. Any other server can be given `relay.web.wsgi:app`, which reads them from the
environment. Neither makes anything at import: connections must not be shared over a fork.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from relay import logs
from relay.bootstrap.api import make_api
from relay.config_sources import load_settings
from relay.web.app import create_app

if TYPE_CHECKING:
    from flask import Flask

    from relay.config import Settings


def load(settings: Settings) -> Flask:
    """Make this process's application, and have it beat. Raises ConfigurationError, but for no database."""
    logs.configure("api", level=settings.log_level, style=settings.log_format)
    api = make_api(settings)
    api.heart.start()
    return create_app(api)


def __getattr__(name: str) -> Flask:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = load(load_settings(os.environ, dotenv=Path(".env")))
    globals()["app"] = app
    return app
