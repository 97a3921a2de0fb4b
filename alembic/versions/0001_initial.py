"""The whole of Relay's record.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).resolve().parent.parent / "sql" / "0001_initial.sql"


def upgrade() -> None:
    """Make every table of the schema `relay`, which env.py has made."""
    # The raw cursor: text() would take `:name`, and exec_driver_sql `%`, for parameters.
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(SQL.read_text())


def downgrade() -> None:
    """Drop everything but the schema itself, which holds Alembic's own table."""
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(
            """
            drop table relay.jobs, relay.deliveries, relay.idempotency_keys, relay.events, relay.delivery_attempts,
                relay.replays, relay.breaker_changes, relay.endpoint_minutes, relay.endpoint_buckets, relay.endpoints,
                relay.event_types, relay.api_keys, relay.ingest_buckets, relay.workspaces, relay.audit_log,
                relay.heartbeats, relay.sweeps, relay.schema_info;
            drop function relay.raise_endpoint_version();
            drop function relay.uuid7();
            """
        )
