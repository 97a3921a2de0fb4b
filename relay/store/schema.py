"""Which schema this release runs on, and a plain refusal of any other."""

from __future__ import annotations

import sqlalchemy as sa

from relay.core.errors import ConfigurationError, SchemaMismatch, SchemaTooNew

#: The schema this release was written for: schema_info.version must be at least this, and
#: schema_info.oldest_supported at most this. So a release runs on the schema of the next one, and a
#: fleet is upgraded by migrating first and replacing processes after.
SCHEMA_VERSION = 2


def check(connection: sa.Connection) -> None:
    """Raise SchemaMismatch unless this release can run on the database's schema, and ConfigurationError
    unless a commit here is durable (`synchronous_commit`: a 202 is a promise)."""
    if connection.scalar(sa.text("select to_regclass('relay.schema_info')")) is None:
        raise SchemaMismatch("the database has no schema `relay` yet: run `relay migrate`")
    version, oldest = connection.execute(sa.text("select version, oldest_supported from relay.schema_info")).one()
    if version < SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the database's schema is version {version}, this release needs {SCHEMA_VERSION}: run `relay migrate`"
        )
    if oldest > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"the database's schema is marked as too new for this release (it needs a release for schema {oldest} "
            f"or later, this one is for {SCHEMA_VERSION}): upgrade Relay on this machine"
        )
    if connection.scalar(sa.text("show synchronous_commit")) == "off":
        raise ConfigurationError(
            "synchronous_commit is off, so an accepted event could be lost: turn it on for Relay's role or database"
        )
