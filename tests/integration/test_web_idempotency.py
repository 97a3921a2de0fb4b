"""Idempotency-Key: one event however often the request comes, and the first answer's bytes for all of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest

from relay.store import idempotency
from relay.store.idempotency import Claim
from tests.hostile import wait_until
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

_WAITING = "select 1 from pg_stat_activity where wait_event = 'transactionid' and datname = current_database()"
REPLAY = "Relay-Idempotent-Replay"


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace and enough connections for a race."""
    with instance(database, RELAY_DB_POOL="12", RELAY_API_THREADS="120") as made:
        made.workspace()
        yield made


def _post(relay: Instance, key: dict[str, str], body: bytes, idempotency_key: str, **headers: str) -> TestResponse:
    return relay.event(key, body, Idempotency_Key=idempotency_key, **headers)


def _counts(relay: Instance) -> tuple[int, int, int]:
    [found] = relay.query(
        "select (select count(*) from relay.events), (select count(*) from relay.deliveries),"
        " (select count(*) from relay.idempotency_keys)"
    )
    return found


def test_a_repeat_gets_the_first_answer(relay: Instance) -> None:
    """B-10, B-12, C-39: the bytes of the first 202 come again, with the header, for the same JSON value in any spelling
    of white space and member order; the event's row keeps the key, and another workspace's key is another key."""
    key = relay.key()
    relay.endpoint(key)
    first = _post(relay, key, b'{"type":"a.b","n":1,"o":{"x":"\\u00e9","y":[1]}}', "k1")
    assert first.status_code == 202
    assert REPLAY not in first.headers
    for body in (
        b'{"type":"a.b","n":1,"o":{"x":"\\u00e9","y":[1]}}',
        b' { "o" : {"y":[ 1 ],"x":"\xc3\xa9"}, "n":1, "type":"a.b"}\n',
    ):
        again = _post(relay, key, body, "k1")
        assert (again.status_code, again.headers[REPLAY], again.data) == (202, "true", first.data)
    assert _counts(relay) == (1, 1, 1)
    assert relay.query("select idempotency_key, payload from relay.events") == [
        ("k1", b'{"type":"a.b","n":1,"o":{"x":"\\u00e9","y":[1]}}')
    ]
    relay.workspace("other")
    other = _post(relay, relay.key("other"), b'{"type":"z"}', "k1")
    assert (other.status_code, REPLAY in other.headers) == (202, False)
    without = [relay.event(key, b'{"type":"a.b"}').get_json()["id"] for _ in range(2)]
    assert without[0] != without[1], "B-13: nothing is deduplicated without the header"


def test_another_request_under_the_key_is_409(relay: Instance) -> None:
    """B-12: another type, number spelling, value or content kind under a used key creates nothing and says so."""
    key = relay.key()
    assert _post(relay, key, b'{"type":"a","n":1}', "k1").status_code == 202
    assert _post(relay, key, b"plain", "k2", Content_Type="text/plain", Relay_Event_Type="a").status_code == 202
    for body, used, headers in (
        (b'{"type":"b","n":1}', "k1", {}),
        (b'{"type":"a","n":1}', "k1", {"Relay_Event_Type": "b"}),
        (b'{"type":"a","n":1.0}', "k1", {}),
        (b'{"type":"a","n":"1"}', "k1", {}),
        (b'{"type":"a","n":1}', "k1", {"Content_Type": "text/plain", "Relay_Event_Type": "a"}),
        (b"plain ", "k2", {"Content_Type": "text/plain", "Relay_Event_Type": "a"}),
    ):
        answer = _post(relay, key, body, used, **headers)
        assert (answer.status_code, answer.get_json()["code"]) == (409, "idempotency_key_reused"), body
    same = _post(relay, key, b"plain", "k2", Content_Type="text/csv", Relay_Event_Type="a")
    assert (same.status_code, same.headers[REPLAY]) == (202, "true")
    assert _counts(relay)[0] == 2


def test_a_hundred_at_once_are_one(relay: Instance) -> None:
    """B-11, C-38: 100 simultaneous identical requests make one event and one delivery an endpoint, and answer alike."""
    key = relay.key()
    for _ in range(2):
        relay.endpoint(key)
    relay.event(key, b'{"type":"warm"}')
    before = _counts(relay)
    barrier = threading.Barrier(100)

    def post(_: int) -> tuple[int, bytes, bool]:
        client = relay.client.application.test_client()
        headers = {**key, "Content-Type": "application/json", "Idempotency-Key": "race"}
        barrier.wait(30)
        answer = client.post("/v1/events", data=b'{"type":"x","n":1}', headers=headers)
        return answer.status_code, answer.data, REPLAY in answer.headers

    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(post, range(100)))
    assert {status for status, _, _ in answers} == {202}
    assert len({body for _, body, _ in answers}) == 1
    assert sum(replayed for _, _, replayed in answers) == 99
    assert tuple(now - then for now, then in zip(_counts(relay), before, strict=True)) == (1, 2, 1)


@pytest.mark.parametrize("rolled_back", [True, False])
def test_the_loser_waits_for_the_winner(relay: Instance, rolled_back: bool) -> None:
    """B-11: a request whose key an open transaction holds waits; it replays what is committed, and takes the key itself
    where the winner was rolled back."""
    key = relay.key()
    body = b'{"type":"x"}'
    workspace = UUID(relay.query("select id::text from relay.workspaces")[0][0])
    made = _post(relay, key, body, "pattern")
    assert made.status_code == 202
    # As the winner's would be, and told from any that the loser could make by its spacing.
    first = made.data + b"\n\n"
    [(fingerprint,)] = relay.query("select fingerprint from relay.idempotency_keys where key = 'pattern'")
    with psycopg.connect(relay.database) as winner, ThreadPoolExecutor(1) as pool:
        winner.execute(
            "insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response)"
            " values (%s, 'k', %s, %s, %s)",
            (workspace, fingerprint, workspace, first),
        )
        waiting = pool.submit(_post, relay, key, body, "k")
        wait_until(lambda: bool(relay.query(_WAITING)))
        assert not waiting.done()
        if rolled_back:
            winner.rollback()
        else:
            winner.commit()
        answer = waiting.result(10)
    assert answer.status_code == 202
    if rolled_back:
        assert (REPLAY in answer.headers, _counts(relay)[0]) == (False, 2)
    else:
        assert (answer.data, answer.headers[REPLAY], _counts(relay)[0]) == (first, "true", 1)


def test_an_expired_key_is_free(relay: Instance) -> None:
    """B-13: a key that is older than its time is free when it is met, with no sweep; one that is younger is not."""
    key = relay.key()
    first = _post(relay, key, b'{"type":"x"}', "k").get_json()["id"]
    relay.query("update relay.idempotency_keys set created_at = now() - interval '86390 seconds'")
    assert _post(relay, key, b'{"type":"y"}', "k").status_code == 409
    relay.query("update relay.idempotency_keys set created_at = now() - interval '86401 seconds'")
    second = _post(relay, key, b'{"type":"y"}', "k")
    assert (second.status_code, REPLAY in second.headers) == (202, False)
    assert second.get_json()["id"] != first
    assert _post(relay, key, b'{"type":"y"}', "k").data == second.data
    assert _counts(relay)[2] == 1


def test_claims_of_other_calls(relay: Instance) -> None:
    """A transaction of another kind can claim a key with an answer of its own, and only its first taker writes."""
    workspace = UUID(relay.query("select id::text from relay.workspaces")[0][0])
    wanted = Claim(key="job", fingerprint=b"f" * 32)
    for taken in (True, False):
        with relay.api.engine.begin() as connection:
            got = idempotency.claim(
                connection, wanted, workspace_id=workspace, event_id=workspace, response=b"answer %d" % taken
            )
            assert got is taken
    other = Claim(key="job", fingerprint=b"g" * 32)
    with relay.api.engine.begin() as connection:
        found = idempotency.answers(connection, {7: wanted}, workspace_id=workspace, retention_secs=60)
        assert found == {7: b"answer 1"}
        with pytest.raises(idempotency.KeyReused) as error:
            idempotency.answers(connection, {0: wanted, 3: other}, workspace_id=workspace, retention_secs=60)
        assert error.value.indexes == (3,)
        assert idempotency.answers(connection, {0: other}, workspace_id=workspace, retention_secs=0) == {}
    assert _counts(relay)[2] == 0
