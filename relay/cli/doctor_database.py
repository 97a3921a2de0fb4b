"""`relay doctor`, the database's part: the server, its clock, the schema, and who is at work."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa

from relay.cli.findings import Finding, fail, ok, warn
from relay.config import require
from relay.core.days import days_ahead, partition_name
from relay.core.errors import ConfigurationError, SchemaMismatch, SchemaTooNew
from relay.store import checkup, heartbeats, partitions, pooler, schema
from relay.store.engine import make_engine, way_to
from relay.web.readiness import Readiness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.config import Settings

#: The oldest Postgres that Relay runs on.
LEAST_MAJOR: Final = 15
#: Seconds that a clock may be away: from the first on it is told, from the second on it does harm (receivers refuse
#: signatures that are 300 s away, and most of what is between is somebody else's clock).
CLOCK_WARN_SECS: Final = 2.0
CLOCK_FAIL_SECS: Final = 60.0
#: The part of its connections at which a server is nearly full.
_NEARLY_FULL: Final = 0.9
#: Endpoints whose names are looked up.
MOST_URLS: Final = 50
#: Seconds since its last beat for which a process counts as running: six beats.
_LIVE_SECS: Final = 30.0

_REMEDIES: Final = {
    "worker": "start `relay worker`; where one runs, its log says what it waits for",
    "publisher": "start `relay publisher`; without one workers find due deliveries themselves, seconds late",
    "beat": "start `relay beat`; its sign of life comes through Redis and a worker, so look at these first",
    "lateness": "add workers, or see which endpoints hold the backlog: docs/running.md, When something is late",
}


def look(settings: Settings, urls: list[str]) -> Iterator[Finding]:
    """Look at the database; puts URLs of endpoints into `urls` for who looks up names."""
    try:
        url = require(settings.database_url, "DATABASE_URL")
    except ConfigurationError as error:
        yield fail("database", "DATABASE_URL is not set", str(error))
        return
    engine = make_engine(url, name="doctor", size=2, patience_secs=5)
    try:
        through = way_to(url)
        with engine.connect() as connection:
            yield from _server(connection)
            yield _clock(connection)
        with engine.connect() as connection:
            found = _schema(connection)
            yield found
            if found.remedy:
                return
            yield _partitions(connection)
            yield from _keys(connection, settings)
            urls += checkup.endpoint_urls(connection, limit=MOST_URLS)
    except ConfigurationError as error:
        yield fail("database", "the connection does not keep what Relay sets", str(error))
        return
    except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        said = " ".join(str(cause).split())
        yield fail(
            "database", f"does not answer: {said}", "start it, or correct DATABASE_URL (host, port, login, name)"
        )
        return
    finally:
        engine.dispose()
    yield ok("pooler", "none" if through is pooler.Way.DIRECT else "one that keeps sessions")
    for check in Readiness(settings).check(ingest_only=False)[1:]:
        if check.fault is not None:
            yield fail(check.name, check.fault, _REMEDIES[check.name])
        elif check.note is not None:
            yield warn(check.name, check.note, _REMEDIES[check.name])
        else:
            yield ok(check.name, "nothing is late" if check.name == "lateness" else "at work")


def judge_clock(check: str, away_secs: float) -> Finding:
    """Judge how far a server's clock is from this machine's: positive where the server is ahead."""
    said = f"{abs(away_secs):.1f} s {'ahead of' if away_secs > 0 else 'behind'} this machine's"
    remedy = "run NTP (chrony, systemd-timesyncd) on both machines"
    if abs(away_secs) >= CLOCK_FAIL_SECS:
        return fail(check, said, remedy + ": receivers refuse signatures that are five minutes away")
    if abs(away_secs) >= CLOCK_WARN_SECS:
        return warn(check, said, remedy)
    return ok(check, "agrees with this machine's")


def _server(connection: sa.Connection) -> Iterator[Finding]:
    facts = checkup.server_facts(connection)
    said = f"Postgres {facts.version}, {facts.connections} of {facts.max_connections} connections"
    if facts.major < LEAST_MAJOR:
        yield fail("database", said, f"Relay needs Postgres {LEAST_MAJOR} or later: upgrade it")
    elif facts.read_only:
        yield fail("database", f"{said}; takes no writes", "it is a standby, or was made read-only: use the primary")
    elif facts.encoding != "UTF8":
        yield fail("database", f"{said}; encoding {facts.encoding}", "make a database with encoding 'UTF8'")
    elif facts.connections >= facts.max_connections * _NEARLY_FULL:
        yield warn("database", said, "raise max_connections, or lower RELAY_DB_POOL")
    else:
        yield ok("database", said)
    if facts.synchronous_commit == "off":
        remedy = "turn it on for Relay's role or database: an accepted event could be lost"
        yield fail("durability", "synchronous_commit is off", remedy)
    if not facts.autovacuum:
        yield warn("autovacuum", "autovacuum is off", "turn it on: tables that Relay writes grow without end")


def _clock(connection: sa.Connection) -> Finding:
    before = datetime.now(UTC)
    there = checkup.clock(connection)
    after = datetime.now(UTC)
    return judge_clock("database's clock", (there - (before + (after - before) / 2)).total_seconds())


def _schema(connection: sa.Connection) -> Finding:
    try:
        schema.check(connection)
    except SchemaTooNew as error:
        return fail("schema", str(error), "run the release here that the other machines run; do not migrate")
    except SchemaMismatch as error:
        return fail("schema", str(error), "run `relay migrate` of the release that is to run")
    except ConfigurationError:
        # That commits are not durable here is told as `durability`, and the schema was judged before it.
        pass
    return ok("schema", f"version {schema.SCHEMA_VERSION}, as this release needs")


def _partitions(connection: sa.Connection) -> Finding:
    wanted = [partition_name(day) for day in days_ahead(partitions.today(connection), partitions.DAYS_AHEAD)]
    missing = set(wanted) - partitions.existing(connection)
    stray = partitions.default_rows(connection)
    if missing or stray:
        said = f"{len(missing)} of the next days lack one, {stray} rows lie in the default one"
        return warn("partitions", said, "beat and a worker mend it within the hour: are both running?")
    return ok("partitions", f"there for the next {len(wanted)} days")


def _keys(connection: sa.Connection, settings: Settings) -> Iterator[Finding]:
    """Master keys of what runs against those of here: what one seals the others must open."""
    here = [[key.id, key.fingerprint] for key in settings.master_keys]
    if not here:
        remedy = "set it where API and workers run: without it secrets are neither sealed nor opened"
        yield warn("master keys", "RELAY_MASTER_KEYS is not set here", remedy)
        return
    others = [
        f"{one.role} {one.host}:{one.pid}"
        for one in heartbeats.live(connection, within_secs=_LIVE_SECS)
        # An API process may do without any: it then makes no secret.
        if (held := one.details.get("master_keys")) != here
        and (one.role == "worker" or (one.role == "api" and held != []))
    ]
    if others:
        remedy = "give all API processes and workers one list, in one order, and restart them"
        yield warn("master keys", f"not those of {', '.join(others)}", remedy)
    else:
        yield ok("master keys", f"{len(here)} here, the same in every process that runs")
