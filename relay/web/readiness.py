"""Whether this installation can do its work, found out within a deadline whatever hangs."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import psycopg
import sqlalchemy as sa

from relay.config import require
from relay.core.errors import ConfigurationError
from relay.store import announcements, heartbeats, schema
from relay.store.engine import make_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.config import Settings
    from relay.store.heartbeats import LiveProcess

#: Seconds in which an answer comes.
DEADLINE_SECS: Final = 1.5
#: Seconds after which a look that does not end is given up and its connection torn down.
_GIVE_UP_SECS: Final = 10.0
#: Seconds after which a role that has not beaten counts as gone: six beats.
BEAT_TOO_OLD_SECS: Final = 30.0
#: Seconds without any publisher's look after which none counts as working. Longer than another needs to take over.
LOOK_TOO_OLD_SECS: Final = 15.0
#: The roles without which nothing is delivered.
_ROLES: Final = ("worker", "publisher", "beat")

_log = logging.getLogger(__name__)

# A standby answers reads, and so does a primary that was told to take no writes.
_TAKES_WRITES: Final = sa.text("select not pg_is_in_recovery() and current_setting('transaction_read_only') = 'off'")
_SHORT: Final = sa.text("set local statement_timeout = '1s'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. `fault` is None where it is well; `note` is worth knowing all the same."""

    name: str
    fault: str | None
    note: str | None = None

    @property
    def text(self) -> str:
        """What is said of it."""
        return self.fault or ("ok" if self.note is None else f"ok, but {self.note}")


class Readiness:
    """Looks at the database on a thread of its own, one look at a time: who asks meanwhile waits for the same one.

    So a database that hangs costs a thread and a connection, however often a load balancer asks.
    """

    def __init__(self, settings: Settings) -> None:
        self._url = require(settings.database_url, "DATABASE_URL")
        self._max_lateness_secs = settings.ready_max_lateness_secs
        self._lock = threading.Lock()
        self._look: _Look | None = None

    def check(self, *, ingest_only: bool) -> list[Check]:
        """Return what is well and what is not, within `DEADLINE_SECS`: all of it, or the database alone."""
        with self._lock:
            look = self._look
            if look is None or look.ended.is_set() or look.is_too_old():
                if look is not None and not look.ended.is_set():
                    look.tear_down()
                look = self._look = _Look(self._url)
        if not look.ended.wait(DEADLINE_SECS):
            return [Check(name="database", fault=f"does not answer within {DEADLINE_SECS:g} s")]
        checks = [Check(name="database", fault=look.fault)]
        if look.fault is not None or ingest_only:
            return checks
        checks += [_role(role, look) for role in _ROLES]
        late = look.lateness_secs or 0.0
        fault = f"the oldest due delivery is {late:.0f} s late" if late > self._max_lateness_secs else None
        return [*checks, Check(name="lateness", fault=fault)]


class _Look:
    """One look at the database, under way on its own thread from the start, over a connection of its own.

    A kept connection would be tried before use, and that try could hang where nothing reaches it.
    """

    def __init__(self, url: str) -> None:
        self.ended = threading.Event()
        self.fault: str | None = None
        self.ages: dict[str, float] = {}
        self.live: list[LiveProcess] = []
        self.lateness_secs: float | None = None
        self._started = time.monotonic()
        self._url = url
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None
        threading.Thread(target=self._run, name="relay-readiness", daemon=True).start()

    def is_too_old(self) -> bool:
        return time.monotonic() - self._started > _GIVE_UP_SECS

    def tear_down(self) -> None:
        """End a look that waits for what does not come, by way of its socket: nothing else is for other threads."""
        connection = self._connection
        if connection is not None:
            try:
                with socket.socket(fileno=os.dup(connection.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
            except (OSError, psycopg.Error):
                # It ended by itself just now.
                return

    def _run(self) -> None:
        engine = make_engine(self._url, name="readiness", size=1)
        try:
            with engine.begin() as connection:
                self._connection = cast(
                    "psycopg.Connection[tuple[object, ...]]", connection.connection.driver_connection
                )
                connection.execute(_SHORT)
                if not connection.execute(_TAKES_WRITES).scalar_one():
                    self.fault = "takes no writes: it is a standby, or was made read-only"
                    return
                schema.check(connection)
                self.ages = heartbeats.youngest_ages(connection)
                self.live = heartbeats.live(connection, within_secs=BEAT_TOO_OLD_SECS)
                self.lateness_secs = announcements.lateness_secs(connection)
        except ConfigurationError as error:
            self.fault = str(error)
        except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            # Its text may name hosts and users: for the log alone, as readiness is told to anybody.
            self.fault = f"does not answer ({type(cause).__name__})"
            said = f"{type(cause).__name__}: {str(cause).strip()[:200]}"
            _log.warning("the readiness check met a fault", extra={"error": said})
        finally:
            self._connection = None
            engine.dispose()
            self.ended.set()


def _role(role: str, look: _Look) -> Check:
    age = look.ages.get(role)
    if age is None:
        return Check(name=role, fault="none is running")
    if age > BEAT_TOO_OLD_SECS:
        return Check(name=role, fault=f"last seen {age:.0f} s ago")
    details = [process.details for process in look.live if process.role == role]
    return _publisher(details) if role == "publisher" else _progress(role, details)


def _publisher(details: Sequence[Mapping[str, object]]) -> Check:
    """One leads and the others wait: what counts is that somebody looked."""
    waits = [secs for one in details if isinstance(secs := one.get("looked_secs"), int | float)]
    if waits and min(waits) > LOOK_TOO_OLD_SECS:
        return Check(name="publisher", fault=f"stalled: none has looked for due deliveries for {min(waits):.0f} s")
    return Check(name="publisher", fault=None)


def _progress(role: str, details: Sequence[Mapping[str, object]]) -> Check:
    """A fault where every process of `role` is stuck; a note where some are."""
    stuck = [one for one in details if one.get("stalled") or one.get("dead")]
    if not stuck:
        return Check(name=role, fault=None)
    parts: dict[str, None] = {}
    for one in stuck:
        stalled, dead = one.get("stalled"), one.get("dead")
        if isinstance(stalled, dict):
            parts |= dict.fromkeys(f"{name} for {secs:.0f} s" for name, secs in stalled.items())
        if isinstance(dead, list):
            parts |= dict.fromkeys(f"{name} is dead" for name in dead)
    said = f"{len(stuck)} of {len(details)} stalled ({', '.join(parts)})"
    return Check(name=role, fault=said) if len(stuck) == len(details) else Check(name=role, fault=None, note=said)
