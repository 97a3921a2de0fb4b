"""What `relay doctor` asks the database about itself and about what Relay needs of it. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from datetime import datetime

# The clock comes with it: one round trip, timed by the caller.
_FACTS = sa.text("""
select current_setting('server_version_num')::int / 10000 as major,
    current_setting('server_version') as version,
    pg_is_in_recovery() or current_setting('transaction_read_only') = 'on' as read_only,
    current_setting('synchronous_commit') as synchronous_commit,
    current_setting('autovacuum') = 'on' as autovacuum,
    pg_encoding_to_char(d.encoding) as encoding,
    current_setting('max_connections')::int
        - current_setting('superuser_reserved_connections')::int as max_connections,
    (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections
from pg_database d where d.datname = current_database()
""")
_CLOCK = sa.text("select clock_timestamp()")
_URLS = sa.text("""
select url from relay.endpoints
where enabled and deleted_at is null and transport = 'http' order by created_at desc limit :limit
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A Postgres as its settings and catalogue have it."""

    major: int
    version: str
    read_only: bool
    synchronous_commit: str
    autovacuum: bool
    encoding: str
    #: Connections that ordinary roles can have, and those that there are.
    max_connections: int
    connections: int


def server_facts(connection: sa.Connection) -> ServerFacts:
    """Ask the server about itself."""
    return ServerFacts(**connection.execute(_FACTS).mappings().one())


def clock(connection: sa.Connection) -> datetime:
    """Return the server's time at this moment, not at the transaction's begin."""
    now: datetime = connection.execute(_CLOCK).scalar_one()
    return now


def endpoint_urls(connection: sa.Connection, *, limit: int) -> list[str]:
    """Return URLs that deliveries go to, of every workspace: the newest endpoints', those that jobs imply among them.

    For whoever runs the installation; nothing of it is for a workspace's eyes.
    """
    return list(connection.execute(_URLS, {"limit": limit}).scalars())
