"""What the gates need: buckets, wakes, and indexes for waiting and dead rows.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SQL = Path(__file__).resolve().parent.parent / "sql" / "0002_gates.sql"


def upgrade() -> None:
    """Add to the schema; a release for version 1 goes on running."""
    # The raw cursor: text() would take `:name`, and exec_driver_sql `%`, for parameters.
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(SQL.read_text())


def downgrade() -> None:
    """Leave the schema as version 1 had it."""
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(
            """
            drop trigger endpoint_bucket on relay.endpoints;
            drop function relay.fill_new_bucket();
            drop table relay.endpoint_buckets, relay.wakes;
            create table relay.endpoint_buckets (
                endpoint_id uuid primary key references relay.endpoints on delete cascade,
                tokens double precision not null,
                refilled_at timestamptz not null,
                slots_until timestamptz
            ) with (fillfactor = 50);
            drop index relay.deliveries_waiting, relay.deliveries_dead, relay.deliveries_dead_by_endpoint;
            alter table relay.ingest_buckets set logged;
            alter table relay.replays drop paced_until;
            alter table relay.workspaces drop event_types_version;
            alter table relay.endpoints drop public_key, drop previous_public_key;
            update relay.schema_info set version = 1;
            """
        )
