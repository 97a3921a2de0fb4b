"""Group commit: events that wait share a statement, and none pays for its neighbours."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest

from relay.bootstrap import api as api_parts
from relay.store import engine, events
from relay.store.events import NewEvent
from relay.store.idempotency import Claim
from relay.web import together as together_module
from relay.web.parts import new_id
from relay.web.together import ENOUGH, LEADERS, Blocked, Together
from tests.hostile import wait_until
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def relay(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """An API with one workspace, whose pool leaves room for groups, and whose statements may wait as long as a test likes."""
    monkeypatch.setattr(api_parts, "INGEST_PATIENCE_SECS", 60)
    monkeypatch.setattr(engine, "STATEMENT_TIMEOUT_SECS", 60)
    with instance(database, RELAY_DB_POOL="8") as made:
        made.workspace()
        yield made


def _together(relay: Instance) -> Together:
    assert relay.api.grouped is not None
    return Together(relay.api.grouped)


def _event(relay: Instance, event_type: str, *, key: str | None = None, workspace: UUID | None = None) -> NewEvent:
    return NewEvent(
        id=new_id(),
        workspace_id=workspace or UUID(relay.query("select id::text from relay.workspaces")[0][0]),
        type=event_type,
        content_type="text/plain",
        payload=b"p",
        api_key_id=None,
        request_id=None,
        claim=None if key is None else Claim(key=key, fingerprint=event_type.encode()),
    )


def test_events_that_wait_share_a_statement(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-7: while two statements are under way what comes is gathered, and goes in few; each gets its own answer."""
    monkeypatch.setattr(together_module, "LOCK_TIMEOUT_MS", 60_000)
    monkeypatch.setattr(together_module, "SLOW_SECS", 0.0)
    group = _together(relay)
    made = [_event(relay, f"t.{number}") for number in range(20)]
    with ThreadPoolExecutor(20) as pool, psycopg.connect(relay.database) as holder:
        holder.execute("lock table relay.events in share mode")
        leading = [pool.submit(group.ingest, event) for event in made[:LEADERS]]
        wait_until(
            lambda: (
                relay.query(
                    "select count(*) from pg_stat_activity where wait_event = 'relation' and datname = current_database()"
                )
                == [(LEADERS,)]
            )
        )
        following = [pool.submit(group.ingest, event) for event in made[LEADERS:]]
        wait_until(lambda: len(group._queue) == len(following))
        holder.rollback()
        answers = [json.loads(one.result(20) or b"null") for one in leading + following]
    assert [(one["id"], one["type"]) for one in answers] == [(str(event.id), event.type) for event in made]
    [(transactions,)] = relay.query("select count(distinct xmin::text) from relay.events")
    assert transactions <= LEADERS + 2


def test_one_statement_at_a_time_while_that_is_enough(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-7: what comes during a statement waits for the next one, until there is enough of it for another beside it."""
    monkeypatch.setattr(together_module, "LOCK_TIMEOUT_MS", 60_000)
    monkeypatch.setattr(together_module, "SLOW_SECS", 3600.0)
    group = _together(relay)
    made = [_event(relay, f"t.{number}") for number in range(ENOUGH + 2)]
    with ThreadPoolExecutor(len(made)) as pool, psycopg.connect(relay.database) as holder:
        holder.execute("lock table relay.events in share mode")
        going = [pool.submit(group.ingest, made[0])]
        wait_until(lambda: len(group._leading) == 1)
        for event in made[1:-1]:
            going.append(pool.submit(group.ingest, event))
            wait_until(lambda: len(group._queue) == len(going) - 1)
        assert len(group._leading) == 1
        going.append(pool.submit(group.ingest, made[-1]))
        wait_until(lambda: (len(group._leading), len(group._queue)) == (LEADERS, 0))
        holder.rollback()
        assert all(one.result(20) for one in going)
    [(transactions,)] = relay.query("select count(distinct xmin::text) from relay.events")
    assert transactions == 2


def test_nobody_pays_for_a_neighbour(relay: Instance) -> None:
    """B-7, B-11: with one event that cannot be stored the others go alone and are; one whose key is taken, or held by
    an open transaction, leaves its neighbours their statement."""
    group = _together(relay)
    good, bad = _event(relay, "good"), _event(relay, "bad", workspace=new_id())
    waiting = [Blocked(good), Blocked(bad)]
    group._commit(waiting)
    assert [(one.answer, one.error) for one in waiting] == [(None, None)] * 2
    assert relay.query("select count(*) from relay.events") == [(0,)]
    with relay.api.hot.connect() as connection:
        assert not events.take(connection, [good], retention_secs=60)[0].replayed
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            events.take(connection, [bad], retention_secs=60)

    assert group.ingest(_event(relay, "first", key="k")) is not None
    waiting = [Blocked(_event(relay, "plain")), Blocked(_event(relay, "second", key="k"))]
    group._commit(waiting)
    assert [one.answer is None for one in waiting] == [False, True]

    keyed = _event(relay, "other", key="held")
    with psycopg.connect(relay.database) as holder:
        holder.execute(
            "insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response)"
            " values (%s, 'held', '', %s, '')",
            (keyed.workspace_id, keyed.id),
        )
        waiting = [Blocked(_event(relay, "beside")), Blocked(keyed)]
        group._commit(waiting)
        assert [(one.answer, one.error) for one in waiting] == [(None, None)] * 2, "soon given up, to go alone"
        holder.rollback()
    assert group.ingest(keyed) is not None


def test_a_dead_connection_is_noticed(relay: Instance) -> None:
    """B-28: connections that the server closed while nobody used them cost no event."""
    key = relay.key()
    assert relay.event(key, b'{"type":"x"}').status_code == 202
    relay.query(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'relay api%%' and datname = current_database()"
    )
    wait_until(
        lambda: (
            relay.query(
                "select count(*) from pg_stat_activity"
                " where application_name like 'relay api%%' and datname = current_database()"
            )
            == [(0,)]
        )
    )
    assert [relay.event(key, b'{"type":"x"}').status_code for _ in range(3)] == [202] * 3
