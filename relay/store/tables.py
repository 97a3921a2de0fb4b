"""The tables as SQLAlchemy Core sees them: for the admin queries, and to hold against the migrations.

The migrations make them (alembic/sql); `alembic check` in the tests finds any difference.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Column, DateTime, ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, DOUBLE_PRECISION, JSONB, UUID

metadata = sa.MetaData(schema="relay")

_TIME = DateTime(timezone=True)
_NOW = text("now()")


def _id() -> Column[object]:
    return Column("id", UUID(as_uuid=True), primary_key=True)


def _workspace(*, nullable: bool = False) -> Column[object]:
    return Column("workspace_id", UUID(as_uuid=True), ForeignKey("relay.workspaces.id"), nullable=nullable)


def _created() -> Column[object]:
    return Column("created_at", _TIME, nullable=False, server_default=_NOW)


schema_info = sa.Table(
    "schema_info",
    metadata,
    Column("only_row", sa.Boolean, primary_key=True, server_default=text("true")),
    Column("version", sa.Integer, nullable=False),
    Column("oldest_supported", sa.Integer, nullable=False),
)

workspaces = sa.Table(
    "workspaces",
    metadata,
    _id(),
    Column("name", sa.Text, nullable=False, unique=True),
    Column("max_endpoints", sa.Integer),
    Column("ingest_rate", DOUBLE_PRECISION),
    Column("max_payload_bytes", sa.Integer),
    Column("job_secret", BYTEA),
    Column("job_previous_secret", BYTEA),
    Column("job_previous_secret_expires_at", _TIME),
    _created(),
    Column("event_types_version", sa.Integer, nullable=False, server_default="0"),
)

ingest_buckets = sa.Table(
    "ingest_buckets",
    metadata,
    Column("workspace_id", UUID(as_uuid=True), ForeignKey("relay.workspaces.id", ondelete="CASCADE"), primary_key=True),
    Column("tokens", DOUBLE_PRECISION, nullable=False),
    Column("refilled_at", _TIME, nullable=False),
    prefixes=["UNLOGGED"],
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    _id(),
    _workspace(),
    Column("name", sa.Text, nullable=False),
    Column("lookup", sa.Text, nullable=False, unique=True),
    Column("digest", BYTEA, nullable=False),
    Column("scopes", ARRAY(sa.Text), nullable=False),
    _created(),
    Column("last_used_at", _TIME),
    Column("revoked_at", _TIME),
    Index("api_keys_by_workspace", "workspace_id", "created_at", "id"),
)

event_types = sa.Table(
    "event_types",
    metadata,
    Column("workspace_id", UUID(as_uuid=True), ForeignKey("relay.workspaces.id"), primary_key=True),
    Column("name", sa.Text, primary_key=True),
    Column("description", sa.Text, nullable=False, server_default=""),
    Column("json_schema", JSONB),
    _created(),
    Column("updated_at", _TIME, nullable=False, server_default=_NOW),
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    _id(),
    _workspace(),
    Column("kind", sa.SmallInteger, nullable=False, server_default="0"),
    Column("origin", sa.Text),
    Column("transport", sa.Text, nullable=False, server_default="http"),
    Column("url", sa.Text, nullable=False),
    Column("description", sa.Text, nullable=False, server_default=""),
    Column("event_types", ARRAY(sa.Text), nullable=False, server_default="{}"),
    Column("signing", sa.Text, nullable=False, server_default="relay"),
    Column("headers", JSONB, nullable=False, server_default="{}"),
    Column("certificate", sa.Text),
    Column("certificate_key", BYTEA),
    Column("secret", BYTEA),
    Column("previous_secret", BYTEA),
    Column("previous_secret_expires_at", _TIME),
    Column("rate_per_second", DOUBLE_PRECISION, nullable=False, server_default="10"),
    Column("burst", sa.Integer, nullable=False, server_default="20"),
    Column("max_in_flight", sa.Integer),
    Column("timeout_ms", sa.Integer),
    Column("retry", JSONB, nullable=False, server_default="{}"),
    Column("metadata", JSONB, nullable=False, server_default="{}"),
    Column("enabled", sa.Boolean, nullable=False, server_default=text("true")),
    Column("disabled_at", _TIME),
    Column("disabled_reason", sa.Text),
    _created(),
    Column("updated_at", _TIME, nullable=False, server_default=_NOW),
    Column("deleted_at", _TIME),
    Column("version", sa.Integer, nullable=False, server_default="1"),
    Column("breaker_state", sa.SmallInteger, nullable=False, server_default="0"),
    Column("breaker_failures", sa.Integer, nullable=False, server_default="0"),
    Column("breaker_trips", sa.Integer, nullable=False, server_default="0"),
    Column("breaker_generation", sa.BigInteger, nullable=False, server_default="0"),
    Column("breaker_open_until", _TIME),
    Column("probe_delivery_id", UUID(as_uuid=True)),
    Column("probe_deadline", _TIME),
    Column("held_until", _TIME),
    Column("failing_since", _TIME),
    Column("failing_attempts", sa.Integer, nullable=False, server_default="0"),
    Column("public_key", BYTEA),
    Column("previous_public_key", BYTEA),
    Index("endpoints_by_workspace", "workspace_id", "created_at", "id", postgresql_where=text("deleted_at is null")),
    Index("endpoints_by_origin", "workspace_id", "origin", unique=True, postgresql_where=text("kind = 1")),
)

endpoint_buckets = sa.Table(
    "endpoint_buckets",
    metadata,
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id", ondelete="CASCADE"), primary_key=True),
    Column("tokens", DOUBLE_PRECISION, nullable=False),
    Column("refilled_at", _TIME, nullable=False),
    Column("slots_until", _TIME),
    Column("slots_generation", sa.BigInteger, nullable=False, server_default="0"),
    prefixes=["UNLOGGED"],
)

wakes = sa.Table(
    "wakes",
    metadata,
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id", ondelete="CASCADE"), primary_key=True),
    Column("retries_too", sa.Boolean, nullable=False, server_default=text("false")),
    Column("ends_as", sa.SmallInteger),
    Column("asked_at", _TIME, nullable=False, server_default=_NOW),
)

endpoint_minutes = sa.Table(
    "endpoint_minutes",
    metadata,
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id", ondelete="CASCADE"), primary_key=True),
    Column("minute", _TIME, primary_key=True),
    *(
        Column(name, sa.Integer, nullable=False, server_default="0")
        for name in ("successes", "retryable_failures", "permanent_failures", "deferrals")
    ),
    Column("last_success_at", _TIME),
    Column("last_failure_at", _TIME),
)

breaker_changes = sa.Table(
    "breaker_changes",
    metadata,
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id", ondelete="CASCADE"), primary_key=True),
    Column("at", _TIME, nullable=False, server_default=text("clock_timestamp()")),
    Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
    Column("state", sa.SmallInteger, nullable=False),
    Column("open_until", _TIME),
)

events = sa.Table(
    "events",
    metadata,
    _id(),
    _workspace(),
    Column("type", sa.Text, nullable=False),
    Column("source", sa.SmallInteger, nullable=False, server_default="0"),
    Column("content_type", sa.Text, nullable=False),
    Column("payload", BYTEA, nullable=False),
    Column("api_key_id", UUID(as_uuid=True)),
    Column("request_id", sa.Text),
    Column("idempotency_key", sa.Text),
    Column("traceparent", sa.Text),
    Column("delivery_ids", ARRAY(UUID(as_uuid=True)), nullable=False, server_default="{}"),
    _created(),
    Index("events_by_workspace", "workspace_id", "created_at", "id"),
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    Column("workspace_id", UUID(as_uuid=True), primary_key=True),
    Column("key", sa.Text, primary_key=True),
    Column("fingerprint", BYTEA, nullable=False),
    Column("event_id", UUID(as_uuid=True), nullable=False),
    Column("response", BYTEA, nullable=False),
    _created(),
    Index("idempotency_keys_by_age", "created_at"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    _id(),
    Column("workspace_id", UUID(as_uuid=True), nullable=False),
    Column("event_id", UUID(as_uuid=True), nullable=False),
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id"), nullable=False),
    Column("event_type", sa.Text, nullable=False),
    Column("status", sa.SmallInteger, nullable=False, server_default="0"),
    Column("reason", sa.Text),
    Column("attempt_count", sa.Integer, nullable=False, server_default="0"),
    Column("budget_from", sa.Integer, nullable=False, server_default="0"),
    Column("generation", sa.Integer, nullable=False, server_default="0"),
    Column("due_at", _TIME, server_default=_NOW),
    Column("announced_at", _TIME),
    Column("lease_token", UUID(as_uuid=True)),
    Column("lease_until", _TIME),
    Column("expires_at", _TIME),
    Column("deferred_reason", sa.Text),
    Column("deferred_since", _TIME),
    Column("deferred_count", sa.Integer, nullable=False, server_default="0"),
    Column("last_attempt", JSONB),
    _created(),
    Column("finished_at", _TIME),
    Index("deliveries_unannounced", "due_at", "id", postgresql_where=text("status = 0 and announced_at is null")),
    Index("deliveries_announced", "announced_at", postgresql_where=text("status = 0 and announced_at is not null")),
    Index("deliveries_leased", "lease_until", postgresql_where=text("status = 1")),
    Index("deliveries_by_endpoint", "endpoint_id", "created_at", "id"),
    Index(
        "deliveries_waiting",
        "endpoint_id",
        "due_at",
        "id",
        postgresql_where=text("status = 0 and (attempt_count > 0 or deferred_reason is not null)"),
    ),
    Index("deliveries_dead", "workspace_id", "created_at", "id", postgresql_where=text("status = 3")),
    Index("deliveries_dead_by_endpoint", "endpoint_id", "created_at", "id", postgresql_where=text("status = 3")),
)

jobs = sa.Table(
    "jobs",
    metadata,
    Column("delivery_id", UUID(as_uuid=True), ForeignKey("relay.deliveries.id", ondelete="CASCADE"), primary_key=True),
    Column("url", sa.Text, nullable=False),
    Column("headers", JSONB, nullable=False),
    Column("headers_sealed", sa.Boolean, nullable=False),
    Column("signing", sa.Text, nullable=False),
    Column("max_attempts", sa.Integer, nullable=False),
    Column("timeout_ms", sa.Integer),
)

delivery_attempts = sa.Table(
    "delivery_attempts",
    metadata,
    Column("delivery_id", UUID(as_uuid=True), primary_key=True),
    Column("at", _TIME, primary_key=True),
    Column("lease_token", UUID(as_uuid=True), primary_key=True),
    Column("number", sa.Integer),
    Column("generation", sa.Integer, nullable=False),
    Column("class", sa.SmallInteger, nullable=False),
    Column("code", sa.Text),
    Column("error", sa.Text),
    Column("status", sa.Integer),
    Column("body_incomplete", sa.Boolean, nullable=False, server_default=text("false")),
    Column("sends", sa.SmallInteger, nullable=False, server_default="0"),
    *(
        Column(name, sa.Integer)
        for name in (
            "dns_us",
            "connect_us",
            "tls_us",
            "first_byte_us",
            "total_us",
            "bytes_sent",
            "bytes_received",
        )
    ),
    Column("remote_address", sa.Text),
    Column("worker", sa.Text),
    Column("reply_headers", sa.Text),
    Column("snippet", sa.Text),
    postgresql_partition_by="RANGE (at)",
)

replays = sa.Table(
    "replays",
    metadata,
    _id(),
    _workspace(),
    Column("endpoint_id", UUID(as_uuid=True), ForeignKey("relay.endpoints.id"), nullable=False),
    Column("filters", JSONB, nullable=False),
    Column("state", sa.Text, nullable=False, server_default="waiting"),
    Column("after_created_at", _TIME),
    Column("after_id", UUID(as_uuid=True)),
    *(
        Column(name, sa.Integer, nullable=False, server_default="0")
        for name in (
            "matched",
            "replayed",
            "skipped",
        )
    ),
    Column("lease_until", _TIME),
    _created(),
    Column("finished_at", _TIME),
    Column("paced_until", _TIME),
    Index("replays_unfinished", "created_at", postgresql_where=text("finished_at is null")),
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    _id(),
    Column("workspace_id", UUID(as_uuid=True)),
    Column("at", _TIME, nullable=False, server_default=_NOW),
    Column("actor", sa.Text, nullable=False),
    Column("action", sa.Text, nullable=False),
    Column("target", sa.Text, nullable=False),
    Column("before", JSONB),
    Column("after", JSONB),
    Column("request_id", sa.Text),
    Index("audit_log_by_workspace", "workspace_id", "at", "id"),
)

heartbeats = sa.Table(
    "heartbeats",
    metadata,
    Column("process_id", UUID(as_uuid=True), primary_key=True),
    Column("role", sa.Text, nullable=False),
    Column("host", sa.Text, nullable=False),
    Column("pid", sa.Integer, nullable=False),
    Column("release", sa.Text, nullable=False),
    Column("started_at", _TIME, nullable=False, server_default=_NOW),
    Column("beat_at", _TIME, nullable=False, server_default=_NOW),
    Column("details", JSONB, nullable=False, server_default="{}"),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    Column("name", sa.Text, primary_key=True),
    Column("started_at", _TIME, nullable=False),
    Column("finished_at", _TIME),
    Column("counts", JSONB),
)
