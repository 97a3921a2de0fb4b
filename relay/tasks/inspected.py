"""The app as Celery's own tools want it: importable. For Flower and `celery inspect`; no worker starts from here."""

from __future__ import annotations

import os
from pathlib import Path

from relay.config_sources import load_settings
from relay.tasks.app import make_app

app = make_app(load_settings(os.environ, dotenv=Path(".env")))
