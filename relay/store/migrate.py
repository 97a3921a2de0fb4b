"""Run the Alembic migrations, which travel inside the installed package."""

from __future__ import annotations

from pathlib import Path

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import relay
from relay.core.errors import ConfigurationError
from relay.store import pooler


def migrations_folder() -> Path:
    """Return where the migrations lie: in the package when installed, beside it in a checkout."""
    package = Path(relay.__file__).resolve().parent
    for folder in (package / "alembic", package.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(f"the migrations are missing from the installation at {package}: reinstall Relay")


def alembic_config(url: str) -> Config:
    """Return Alembic's configuration for the database at `url`, as env.py wants it."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = sa.make_url(url).set(drivername="postgresql+psycopg")
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema up to `revision`. Safe to run from several machines at once: one works, the others wait.

    Raises ConfigurationError for a database whose encoding is not UTF8, as not every text could be stored, and for one
    behind a pooler that keeps no sessions: the lock that lets one work would not hold.
    """
    pooler.require_sessions(lambda: psycopg.connect(url))
    with psycopg.connect(url, client_encoding="utf8", autocommit=True) as connection:
        found = connection.execute("show server_encoding").fetchone()
    if found is None or found[0] != "UTF8":
        raise ConfigurationError(
            f"the database's encoding is {found and found[0]}, but Relay needs UTF8: make the database with "
            "`create database … template template0 encoding 'UTF8'`"
        )
    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Take migrations back down to `revision`: for tests and for a release that must be undone."""
    command.downgrade(alembic_config(url), revision)
