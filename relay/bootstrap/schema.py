"""Whether the database is there, and its schema one that this release can run on."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import sqlalchemy as sa

from relay.config import LEASE_SLACK_SECS, require
from relay.core.errors import ConfigurationError
from relay.store import destinations, schema
from relay.store.engine import make_engine

if TYPE_CHECKING:
    from relay.config import Settings

log = logging.getLogger(__name__)

#: Seconds between two looks for a database that does not answer at start.
AWAIT_SECS = 1.0


def check_schema(settings: Settings) -> bool:
    """Refuse a schema that this release cannot run on; return whether the database answered at all.

    Raises SchemaMismatch or ConfigurationError.
    """
    engine = make_engine(require(settings.database_url, "DATABASE_URL"), name="start", size=1)
    try:
        check(engine)
    except (sa.exc.OperationalError, sa.exc.TimeoutError) as error:
        log.warning("the database does not answer yet", extra={"error": str(error.__cause__ or error).strip()[:200]})
        return False
    finally:
        engine.dispose()
    return True


def await_schema(settings: Settings) -> None:
    """Wait until the database answers, however long: a role that starts during an outage needs no help afterwards.

    Raises as `check_schema` does.
    """
    while not check_schema(settings):
        time.sleep(AWAIT_SECS)


def check(engine: sa.Engine, *, lease_of: Settings | None = None) -> None:
    """Check the schema, and the lease where one is taken; what is refused leaves no connection open."""
    try:
        with engine.connect() as connection:
            schema.check(connection)
            if lease_of is not None:
                _check_lease(connection, lease_of)
    except BaseException:
        engine.dispose()
        raise


def _check_lease(connection: sa.Connection, settings: Settings) -> None:
    longest_ms = destinations.longest_timeout_ms(connection)
    if longest_ms > settings.longest_timeout_ms:
        raise ConfigurationError(
            f"RELAY_LEASE_SECS is {settings.lease_secs}, but an endpoint's timeout_ms is {longest_ms}: a lease could run "
            f"out mid-request. Set it to more than {longest_ms // 1000 + LEASE_SLACK_SECS}"
        )
