"""Sending deliveries again, one or many, and calling them off: what changes, what is refused, and what a crash leaves."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest

from relay.core.model import Status
from relay.store import claims, replay_steps
from relay.store.ids import new_id
from relay.sweeps.replay import Replay
from relay.sweeps.runner import run_sweep
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

MAX_REPLAYS = 3
UNKNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database, RELAY_MAX_REPLAYS=str(MAX_REPLAYS)) as made:
        made.workspace()
        yield made


@pytest.fixture
def key(relay: Instance) -> dict[str, str]:
    """A key with every scope."""
    return relay.key()


def _delivery(relay: Instance, key: dict[str, str], **columns: object) -> str:
    """Make a delivery with these columns; it has an endpoint of its own."""
    event_type = f"t{relay.query('select count(*) from relay.events')[0][0]}"
    relay.endpoint(key, event_types=[event_type])
    sent = relay.event(key, b'{"type":"%s"}' % event_type.encode()).get_json()
    delivery = str(sent["deliveries"][0]["id"])
    if columns:
        sets = ", ".join(f"{name} = %s" for name in columns)
        relay.query(f"update relay.deliveries set {sets} where id = %s", *columns.values(), delivery)
    return delivery


def _row(relay: Instance, delivery: str) -> dict[str, Any]:
    with psycopg.connect(relay.database, row_factory=psycopg.rows.dict_row) as connection:
        row = connection.execute(
            "select *, extract(epoch from due_at - now())::float8 as due_in from relay.deliveries where id = %s",
            [delivery],
        ).fetchone()
    assert row is not None
    return row


def _audited(relay: Instance, action: str) -> list[tuple[Any, ...]]:
    return relay.query(
        "select actor, target, before, after from relay.audit_log where action = %s order by at, id", action
    )


def _replay(relay: Instance, key: dict[str, str], delivery: str, **body: object) -> TestResponse:
    return relay.client.post(f"/v1/deliveries/{delivery}/replay", json=body, headers=key)


def _cancel(relay: Instance, key: dict[str, str], delivery: str) -> TestResponse:
    return relay.client.post(f"/v1/deliveries/{delivery}/cancel", headers=key)


# --- one delivery ---


@pytest.mark.parametrize("status", [Status.DEAD, Status.CANCELED])
def test_a_finished_delivery_starts_anew(relay: Instance, key: dict[str, str], status: Status) -> None:
    """B-120, B-34: same id, next generation, a fresh budget, due now and without expiry; attempt numbers climb on."""
    delivery = _delivery(
        relay,
        key,
        status=int(status),
        reason="expired" if status is Status.DEAD else None,
        attempt_count=5,
        budget_from=2,
        due_at="2020-01-01",
        announced_at="2020-01-01",
        expires_at="2020-01-02",
        finished_at="2020-01-03",
        deferred_reason="slot",
        deferred_since="2020-01-01",
        deferred_count=9,
        last_attempt='{"number": 5, "at": "2020-01-01T00:00:00+00:00"}',
    )
    answer = _replay(relay, key, delivery)
    assert answer.status_code == 202, answer.text
    body = answer.get_json()
    assert (body["id"], body["status"], body["reason"], body["generation"]) == (delivery, "pending", None, 1)
    row = _row(relay, delivery)
    assert (row["attempt_count"], row["budget_from"], row["deferred_count"]) == (5, 5, 0)
    cleared = ("announced_at", "lease_token", "lease_until", "expires_at", "finished_at", "deferred_reason", "reason")
    assert [name for name in cleared if row[name] is not None] == []
    assert abs(row["due_in"]) < 30
    # The evidence stays until a later attempt has its own.
    assert row["last_attempt"]["number"] == 5
    [(actor, target, before, after)] = _audited(relay, "delivery.replayed")
    assert actor.startswith("key:")
    assert target == f"delivery:{delivery}"
    assert (before["status"], before["generation"]) == (status.label, 0)
    assert (after["status"], after["generation"]) == ("pending", 1)


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({}, "delivery_pending"),
        ({"status": 0, "due_at": None}, "delivery_pending"),
        ({"status": 1}, "delivery_in_flight"),
        ({"status": 2}, "delivery_delivered"),
        ({"status": 3, "generation": MAX_REPLAYS}, "replay_limit"),
    ],
)
def test_what_is_not_replayed(relay: Instance, key: dict[str, str], columns: dict[str, object], code: str) -> None:
    """C-41: pending, in flight, delivered without `force` and too often are 409; nothing changes, nothing is audited."""
    delivery = _delivery(relay, key, **columns)
    before = relay.query("select * from relay.deliveries")
    answer = _replay(relay, key, delivery)
    assert (answer.status_code, answer.get_json()["code"]) == (409, code)
    forced = _replay(relay, key, delivery, force=True)
    if code == "delivery_delivered":
        assert (forced.status_code, forced.get_json()["generation"]) == (202, 1)
    else:
        assert (forced.status_code, forced.get_json()["code"]) == (409, code)
        assert relay.query("select * from relay.deliveries") == before
        assert _audited(relay, "delivery.replayed") == []


def test_a_deleted_endpoints_delivery_is_not_replayed(relay: Instance, key: dict[str, str]) -> None:
    """There is nowhere to send it to: 409, by name."""
    delivery = _delivery(relay, key, status=3)
    endpoint = _row(relay, delivery)["endpoint_id"]
    assert relay.client.delete(f"/v1/endpoints/{endpoint}", headers=key).status_code == 204
    answer = _replay(relay, key, delivery)
    assert (answer.status_code, answer.get_json()["code"]) == (409, "endpoint_deleted")
    answer = relay.client.post(f"/v1/endpoints/{endpoint}/replay", headers=key)
    assert (answer.status_code, answer.get_json()["code"]) == (409, "endpoint_deleted")


def test_two_replays_at_once_count_once(relay: Instance, key: dict[str, str]) -> None:
    """C-41: a second click that meets the first one waits for it, and is 409."""
    delivery = _delivery(relay, key, status=3)
    answers: list[int] = []
    with psycopg.connect(relay.database) as holder:
        # Both come to the row while somebody holds it.
        holder.execute("select 1 from relay.deliveries for update")
        threads = [
            threading.Thread(target=lambda: answers.append(_replay(relay, key, delivery).status_code)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        _until(lambda: _waiting_for_locks(relay) == 2)
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == [202, 409]
    assert _row(relay, delivery)["generation"] == 1
    assert len(_audited(relay, "delivery.replayed")) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (f"/v1/deliveries/{UNKNOWN}/replay", {"force": "yes"}, "force"),
        (f"/v1/deliveries/{UNKNOWN}/replay", {"hard": True}, "hard"),
        (f"/v1/deliveries/{UNKNOWN}/cancel", {"force": True}, "force"),
        (f"/v1/endpoints/{UNKNOWN}/replay", {"status": "pending"}, "status"),
        (f"/v1/endpoints/{UNKNOWN}/replay", {"status": "canceled", "reason": "gone"}, "reason"),
        (f"/v1/endpoints/{UNKNOWN}/replay", {"since": 5}, "since"),
        (f"/v1/endpoints/{UNKNOWN}/replay", {"until": "yesterday"}, "until"),
        (f"/v1/endpoints/{UNKNOWN}/replay", {"event_type": "*"}, "event_type"),
        (f"/v1/replays/{UNKNOWN}/cancel", {"x": 1}, "x"),
    ],
)
def test_bad_bodies_are_named(
    relay: Instance, key: dict[str, str], path: str, body: dict[str, object], field: str
) -> None:
    """Unknown members and wrong values are 400 by name; with a good body an id that nobody has is 404."""
    answer = relay.client.post(path, json=body, headers=key)
    assert (answer.status_code, list(fields_of(answer))) == (400, [field])
    assert relay.client.post(path, headers=key).status_code == 404
    assert relay.client.post(path.replace(UNKNOWN, "x"), json={}, headers=key).status_code == 404


def test_cancel(relay: Instance, key: dict[str, str]) -> None:
    """B-121: a pending delivery is canceled, a second call changes nothing; in flight or finished it is too late."""
    delivery = _delivery(relay, key, announced_at="now", deferred_reason="rate", deferred_count=2)
    first = _cancel(relay, key, delivery)
    assert (first.status_code, first.get_json()["status"]) == (200, "canceled")
    assert first.get_json()["finished_at"]
    again = _cancel(relay, key, delivery)
    assert (again.status_code, again.get_json()) == (200, first.get_json())
    assert len(_audited(relay, "delivery.canceled")) == 1
    row = _row(relay, delivery)
    assert (row["status"], row["announced_at"], row["deferred_reason"]) == (4, None, None)
    for status, code in ((1, "delivery_in_flight"), (2, "delivery_delivered"), (3, "delivery_dead")):
        late = _cancel(relay, key, _delivery(relay, key, status=status))
        assert (late.status_code, late.get_json()["code"]) == (409, code)
    assert _replay(relay, key, delivery).status_code == 202


def test_cancel_and_claim_do_not_both_win(relay: Instance, key: dict[str, str]) -> None:
    """After a 200 no worker gets the row, and a cancel that waits for a claim finds it in flight."""
    delivery = _delivery(relay, key)

    def claim() -> int:
        with relay.api.hot.connect() as connection:
            ids = [UUID(delivery)]
            return len(claims.claim(connection, ids, token=new_id(), lease_secs=20.0, max_bytes=1_000_000))

    codes: list[int] = []
    with psycopg.connect(relay.database) as worker:
        # A claim that has the row and did not commit yet.
        worker.execute("update relay.deliveries set status = 1, attempt_count = 1")
        thread = threading.Thread(target=lambda: codes.append(_cancel(relay, key, delivery).status_code))
        thread.start()
        _until(lambda: _waiting_for_locks(relay) == 1)
    thread.join(20)
    assert codes == [409]
    relay.query("update relay.deliveries set status = 0")
    assert _cancel(relay, key, delivery).status_code == 200
    assert claim() == 0


# --- many ---


def _dead(relay: Instance, key: dict[str, str], count: int, **fields: object) -> str:
    """Make an endpoint with `count` dead deliveries, made a minute apart, in workspace acme; return its id."""
    endpoint = str(relay.endpoint(key, event_types=["none"], **fields)["id"])
    relay.query(
        """
        insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, status, reason,
            attempt_count, due_at, created_at, finished_at)
        select relay.uuid7(), p.workspace_id, relay.uuid7(), p.id, case n %% 2 when 0 then 'even' else 'odd' end, 3,
            'attempts_exhausted', 12, null, now() - n * interval '1 minute', now() - interval '1 s'
        from relay.endpoints p, generate_series(1, %s) as n where p.id = %s
        """,
        count,
        endpoint,
    )
    return endpoint


def _ask(relay: Instance, key: dict[str, str], endpoint: str, **body: object) -> str:
    answer = relay.client.post(f"/v1/endpoints/{endpoint}/replay", json=body, headers=key)
    assert answer.status_code == 202, answer.text
    assert answer.headers["Location"] == f"/v1/replays/{answer.get_json()['id']}"
    assert answer.get_json()["state"] == "waiting"
    return str(answer.get_json()["id"])


def _progress(relay: Instance, key: dict[str, str], replay: str) -> tuple[str, int, int, int]:
    body = relay.client.get(f"/v1/replays/{replay}", headers=key).get_json()
    return body["state"], body["matched"], body["replayed"], body["skipped"]


def _sweep(relay: Instance, batch: int = 500) -> int:
    counts = run_sweep(relay.api.engine, Replay(engine=relay.api.engine, max_replays=MAX_REPLAYS, batch=batch))
    assert counts is not None
    return counts["replayed"]


def test_many_come_back_at_the_endpoints_rate_and_once(relay: Instance, key: dict[str, str]) -> None:
    """C-43: 1,000 dead ones are pending, oldest first, 1/rate apart; asked again there is nothing to do."""
    endpoint = _dead(relay, key, 1000, rate_per_second=20)
    relay.query(
        "update relay.deliveries set generation = %s where id in (select id from relay.deliveries limit 7)", MAX_REPLAYS
    )
    replay = _ask(relay, key, endpoint)
    assert _sweep(relay, batch=150) == 993
    assert _progress(relay, key, replay) == ("done", 1000, 993, 7)
    rows = relay.query(
        """
        select extract(epoch from due_at - lag(due_at) over w)::float8,
            extract(epoch from due_at - min(due_at) over ())::float8, generation, attempt_count - budget_from,
            announced_at is null and lease_token is null and finished_at is null and reason is null
        from relay.deliveries where status = 0 window w as (order by created_at, id) order by created_at, id
        """
    )
    assert len(rows) == 993
    assert [gap for gap, *_ in rows[1:] if abs(gap - 0.05) > 0.001] == []
    assert rows[-1][1] == pytest.approx(992 / 20, abs=0.1)
    assert {tuple(row[2:]) for row in rows} == {(1, 0, True)}

    again = _ask(relay, key, endpoint)
    assert _sweep(relay) == 0
    assert _progress(relay, key, again) == ("done", 7, 0, 7)
    created, finished = _audited(relay, "replay.created"), _audited(relay, "replay.finished")
    assert [row[1] for row in created] == [f"replay:{replay}", f"replay:{again}"]
    assert created[0][3] == {"endpoint_id": endpoint, "status": "dead"}
    assert [(row[0], row[3]["replayed"]) for row in finished] == [("relay", 993), ("relay", 0)]


def test_the_filter_decides_what_is_taken(relay: Instance, key: dict[str, str]) -> None:
    """B-120: by time, type, status and reason; delivered ones where the call names them; other endpoints' never."""
    endpoint = _dead(relay, key, 40)
    other = _dead(relay, key, 5)
    relay.query("update relay.deliveries set reason = 'gone' where endpoint_id = %s and event_type = 'odd'", endpoint)
    [(cut,)] = relay.query(
        "select to_char((now() - interval '20.5 min') at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
    )
    for body, expected in (
        ({"since": cut, "event_type": "even"}, 10),
        ({"since": cut}, 10),
        ({"until": cut, "reason": "gone"}, 10),
        ({"reason": "gone"}, 0),
        ({"status": "canceled"}, 0),
        ({"status": "delivered", "event_type": "odd"}, 0),
        ({}, 10),
    ):
        replay = _ask(relay, key, endpoint, **body)
        assert _sweep(relay, batch=9) == expected, body
        assert _progress(relay, key, replay) == ("done", expected, expected, 0)
    relay.query("update relay.deliveries set status = 2, finished_at = now() where endpoint_id = %s", endpoint)
    _ask(relay, key, endpoint, force=True)
    assert _sweep(relay) == 0
    replay = _ask(relay, key, endpoint, status="delivered", force=True)
    assert _sweep(relay, batch=9) == 40
    shown = relay.client.get(f"/v1/replays/{replay}", headers=key).get_json()
    assert (shown["endpoint_id"], shown["status"], shown["since"]) == (endpoint, "delivered", None)
    assert relay.query("select count(*) from relay.deliveries where status <> 3 and endpoint_id = %s", other) == [(0,)]


def test_what_dies_after_it_began_is_not_taken(relay: Instance, key: dict[str, str]) -> None:
    """B-120: a job takes each row once, also one that dies again while it runs."""
    endpoint = _dead(relay, key, 10)
    replay = _ask(relay, key, endpoint)
    relay.query(
        "update relay.deliveries set finished_at = clock_timestamp() where id in (select id from relay.deliveries limit 4)"
    )
    assert _sweep(relay) == 6
    assert _progress(relay, key, replay) == ("done", 6, 6, 0)


def test_a_dead_worker_loses_no_count_and_no_row(relay: Instance, key: dict[str, str]) -> None:
    """Kill -9 between and within batches: another worker goes on when the lease is over, and every count is exact."""
    endpoint = _dead(relay, key, 100, rate_per_second=50)
    replay = _ask(relay, key, endpoint)
    engine = relay.api.engine
    steps = {"batch": 20, "max_replays": MAX_REPLAYS, "lease_secs": 30.0}
    with engine.begin() as connection:
        held = replay_steps.take(connection, lease_secs=30.0)
    assert held is not None
    with engine.begin() as connection:
        step = replay_steps.step(connection, held, **steps)  # type: ignore[arg-type]  # of several types
    assert (step.replayed, _progress(relay, key, replay)) == (20, ("running", 20, 20, 0))
    assert step.held is not None
    # Killed in the middle of a batch: its transaction is gone.
    with engine.connect() as connection:
        assert replay_steps.step(connection, step.held, **steps).replayed == 20  # type: ignore[arg-type]
    # Nobody else has it while the lease runs; then another has, and the first one finds itself shut out.
    assert _sweep(relay) == 0
    relay.query("update relay.replays set lease_until = now() - interval '1 s'")
    assert _sweep(relay, batch=20) == 80
    with engine.begin() as connection:
        late = replay_steps.step(connection, step.held, **steps)  # type: ignore[arg-type]
    assert (late.replayed, late.held) == (0, None)
    assert _progress(relay, key, replay) == ("done", 100, 100, 0)
    spread = (
        "select count(distinct due_at), extract(epoch from max(due_at) - min(due_at))::float8 from relay.deliveries"
    )
    [(times, seconds)] = relay.query(spread)
    assert times == 100
    assert seconds == pytest.approx(99 / 50, abs=0.1)
    assert relay.query("select distinct generation from relay.deliveries") == [(1,)]


def test_a_job_is_stopped_at_a_batchs_end(relay: Instance, key: dict[str, str]) -> None:
    """Cancel ends a job that waits or runs, twice is once, and what it has sent again stays so; then it is too late."""
    endpoint = _dead(relay, key, 30)
    replay = _ask(relay, key, endpoint)
    second = relay.client.post(f"/v1/endpoints/{endpoint}/replay", json={}, headers=key)
    assert (second.status_code, second.get_json()["code"]) == (409, "replay_unfinished")
    assert second.get_json()["replay_id"] == replay
    engine = relay.api.engine
    with engine.begin() as connection:
        held = replay_steps.take(connection, lease_secs=30.0)
    assert held is not None
    with engine.begin() as connection:
        step = replay_steps.step(connection, held, batch=10, max_replays=MAX_REPLAYS, lease_secs=30.0)
    assert step.held is not None
    for _ in range(2):
        answer = relay.client.post(f"/v1/replays/{replay}/cancel", headers=key)
        assert (answer.status_code, answer.get_json()["state"]) == (200, "canceled")
    with engine.begin() as connection:
        step = replay_steps.step(connection, step.held, batch=10, max_replays=MAX_REPLAYS, lease_secs=30.0)
    assert (step.replayed, step.held) == (0, None)
    assert _sweep(relay) == 0
    assert _progress(relay, key, replay) == ("canceled", 10, 10, 0)
    assert relay.query("select status, count(*) from relay.deliveries group by status order by 1") == [(0, 10), (3, 20)]
    assert len(_audited(relay, "replay.canceled")) == 1
    # The endpoint is free for another, which finds the rest; a finished one cannot be stopped.
    last = _ask(relay, key, endpoint)
    assert _sweep(relay) == 20
    late = relay.client.post(f"/v1/replays/{last}/cancel", headers=key)
    assert (late.status_code, late.get_json()["code"]) == (409, "replay_finished")


def test_jobs_are_listed(relay: Instance, key: dict[str, str]) -> None:
    """B-130 to B-132: newest first, by pages, by endpoint, state and time; nothing of another workspace."""
    first, second = _dead(relay, key, 1), _dead(relay, key, 1)
    jobs: list[str] = []
    for endpoint in (first, second, first, second, first):
        jobs.insert(0, _ask(relay, key, endpoint, event_type="odd"))
        assert _sweep(relay) <= 1
    jobs.insert(0, _ask(relay, key, second))
    relay.workspace("other")
    other = relay.key("other")

    def listed(query: str, headers: dict[str, str] = key) -> tuple[list[str], str | None]:
        answer = relay.client.get(f"/v1/replays?{query}", headers=headers)
        assert answer.status_code == 200, answer.text
        body = answer.get_json()
        return [one["id"] for one in body["data"]], body["next_cursor"]

    seen, cursor = listed("limit=4")
    assert seen == jobs[:4]
    _ask(relay, key, first)
    assert listed(f"limit=4&cursor={cursor}") == (jobs[4:], None)
    assert listed(f"endpoint_id={second}") == ([jobs[0], jobs[2], jobs[4]], None)
    assert listed(f"endpoint_id={second}&state=waiting") == ([jobs[0]], None)
    assert listed("state=done") == (jobs[1:], None)
    one = relay.client.get(f"/v1/replays/{jobs[3]}", headers=key).get_json()
    assert one in relay.client.get("/v1/replays", headers=key).get_json()["data"]
    time = one["created_at"].replace("Z", "%2B00:00")
    assert listed(f"until={time}") == (jobs[4:], None)
    assert listed(f"since={time}&state=done") == (jobs[1:4], None)
    assert listed("", other) == ([], None)

    refusals = {
        "state=finished": (400, "not_a_choice"),
        "endpoint_id=x": (400, "invalid_id"),
        "status=dead": (400, "unknown_field"),
        f"state=done&cursor={cursor}": (400, "invalid_cursor"),
    }
    for query, expected in refusals.items():
        answer = relay.client.get(f"/v1/replays?{query}", headers=key)
        assert (answer.status_code, answer.get_json()["errors"][0]["code"]) == expected, query
    stranger = relay.client.get(f"/v1/replays?endpoint_id={first}", headers=other)
    assert (stranger.status_code, stranger.get_json()["code"]) == (404, "unknown_endpoint")


def test_jobs_take_turns_and_a_deleted_endpoints_fails(relay: Instance, key: dict[str, str]) -> None:
    """Several endpoints' jobs are all carried out by one worker; where an endpoint went meanwhile its job fails."""
    first, second, gone = (_dead(relay, key, 12) for _ in range(3))
    jobs = [_ask(relay, key, endpoint) for endpoint in (first, second, gone)]
    assert relay.client.delete(f"/v1/endpoints/{gone}", headers=key).status_code == 204
    assert _sweep(relay, batch=5) == 24
    assert [_progress(relay, key, job)[0] for job in jobs] == ["done", "done", "failed"]
    assert relay.query("select count(*) from relay.deliveries where status = 3 and endpoint_id = %s", gone) == [(12,)]


def test_two_workers_share_the_jobs(relay: Instance, key: dict[str, str]) -> None:
    """A worker that is held up over one job keeps no other worker from another, and one job has one worker."""
    slow, quick = _dead(relay, key, 3), _dead(relay, key, 3)
    jobs = [_ask(relay, key, endpoint) for endpoint in (slow, quick)]
    with psycopg.connect(relay.database) as holder:
        holder.execute("select 1 from relay.deliveries where endpoint_id = %s for update", [slow])
        thread = threading.Thread(target=_sweep, args=(relay,))
        thread.start()
        _until(lambda: _waiting_for_locks(relay) == 1)
        assert _sweep(relay) == 3
        assert [_progress(relay, key, job)[0] for job in jobs] == ["running", "done"]
    thread.join(20)
    assert [_progress(relay, key, job)[:3] for job in jobs] == [("done", 3, 3)] * 2


def _waiting_for_locks(relay: Instance) -> int:
    [(count,)] = relay.query(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    return int(count)


def _until(condition: Any, patience: float = 10.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
