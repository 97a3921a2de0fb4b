"""Run the migrations: one at a time, in their own transactions, and never two runs at once.

Called through `relay migrate` (relay/store/migrate.py), which hands over the database's URL.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import context

#: One migration run at a time in a database, whatever machine it runs on.
MIGRATION_LOCK = 0x52454C41594D4947  # "RELAYMIG"
#: Wait for another's run at most this long.
LOCK_WAIT_SECS = 300.0
LOCK_POLL_SECS = 0.2


def run() -> None:
    """Take the lock, make the schema, and run what is missing."""
    url: str = context.config.attributes["url"]
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        # A statement waits for a table's lock at most so long: a migration must not queue up all traffic behind it.
        connection.exec_driver_sql("set lock_timeout = '4s'")
        connection.exec_driver_sql("set statement_timeout = '60s'")
        # A role called relay has the schema as its default one, whose tables a comparison would see without a schema.
        connection.exec_driver_sql("set search_path = public")
        connection.dialect.default_schema_name = "public"
        connection.commit()
        _lock(connection)
        try:
            connection.exec_driver_sql("create schema if not exists relay")
            connection.commit()
            context.configure(
                connection=connection,
                target_metadata=context.config.attributes.get("metadata"),
                version_table_schema="relay",
                include_schemas=True,
                include_name=_ours,
                transaction_per_migration=True,
                compare_type=True,
            )
            with context.begin_transaction():
                context.run_migrations()
        finally:
            connection.rollback()
            connection.exec_driver_sql(f"select pg_advisory_unlock({MIGRATION_LOCK})")
            connection.commit()


def _lock(connection: sa.Connection) -> None:
    # Polled: a waiting pg_advisory_lock holds a snapshot, on which CREATE INDEX CONCURRENTLY waits in turn.
    deadline = time.monotonic() + LOCK_WAIT_SECS
    while True:
        taken = connection.exec_driver_sql(f"select pg_try_advisory_lock({MIGRATION_LOCK})").scalar_one()
        connection.commit()
        if taken:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"another `relay migrate` has held the migration lock for {LOCK_WAIT_SECS:.0f} s")
        time.sleep(LOCK_POLL_SECS)


def _ours(name: str | None, kind: str, _parents: object) -> bool:
    """Compare the schema `relay` only, and no partition: those come and go with the days."""
    if kind == "schema":
        return name == "relay"
    if kind == "table" and name is not None:
        return not name.startswith("delivery_attempts_") and name != "alembic_version"
    return True


run()
