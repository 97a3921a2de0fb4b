"""Claims: the lease is taken in one statement, by one worker, within a bound of bytes (B-21, B-22)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg

from relay.core.model import BreakerState, EventSource, Status
from relay.store import claims

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa

    from relay.store.claims import Claimed
    from tests.rows import Rows

MIB = 1024 * 1024


def claim(hot: sa.Engine, ids: Sequence[UUID], *, token: UUID | None = None, max_bytes: int = 8 * MIB) -> list[Claimed]:
    """Claim `ids` for a minute."""
    with hot.connect() as connection:
        return claims.claim(connection, ids, token=token or uuid4(), lease_secs=60.0, max_bytes=max_bytes)


def still_due(hot: sa.Engine, ids: Sequence[UUID]) -> set[UUID]:
    """Ask which of `ids` wait all the same."""
    with hot.connect() as connection:
        return set(claims.still_due(connection, ids))


def test_claim_leases_counts_and_returns_what_a_send_needs(hot: sa.Engine, rows: Rows) -> None:
    """A claimed row is in flight under the token, its attempt counted, its mark gone, its lease on the database's clock."""
    endpoint = rows.endpoint()
    payload = b'{"a": 1, "a": 2}\x00\xff'
    delivery = rows.delivery(endpoint, payload=payload, announced_ago=1.0, event_type="order.paid", content_type="x/y")
    token = uuid4()

    (claimed,) = claim(hot, [delivery], token=token)
    row = rows.get(delivery)

    assert (claimed.id, claimed.endpoint_id, claimed.workspace_id) == (delivery, endpoint, rows.workspace_id)
    assert (claimed.payload, claimed.content_type, claimed.event_type) == (payload, "x/y", "order.paid")
    assert (claimed.attempt_count, claimed.spent, claimed.closer, claimed.endpoint_version) == (1, 1, 0, 1)
    assert (row["status"], row["lease_token"], row["attempt_count"]) == (Status.IN_FLIGHT, token, 1)
    assert row["announced_at"] is None
    assert 55 < row["leased_for"] <= 60
    assert abs((rows.value("select clock_timestamp()") - claimed.claimed_at).total_seconds()) < 30


def test_only_pending_and_due_rows_are_claimed(hot: sa.Engine, rows: Rows) -> None:
    """Rows that are leased, finished, paused or not due yet are passed over, and are not called due either."""
    endpoint = rows.endpoint()
    due, later, paused, *finished = rows.deliveries(endpoint, 6)
    rows.sql("update relay.deliveries set due_at = now() + interval '1 hour' where id = %s", [later])
    rows.sql("update relay.deliveries set due_at = null where id = %s", [paused])
    for status, id_ in enumerate(finished, start=2):
        rows.sql("update relay.deliveries set status = %s where id = %s", [status, id_])
    everything = [due, later, paused, *finished, uuid4()]

    assert [row.id for row in claim(hot, everything)] == [due]
    assert claim(hot, everything) == []
    assert still_due(hot, everything) == set()


def test_a_row_is_claimed_once_by_many_at_once(hot: sa.Engine, rows: Rows) -> None:
    """Four workers that get the same hints at the same moment share the rows out, none twice (C-46)."""
    ids = rows.deliveries(rows.endpoint(), 400)
    got: list[list[Claimed]] = []
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        got.append(claim(hot, ids))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    claimed = [row.id for batch in got for row in batch]
    # A row that one had locked when another came by is for a later look: none is lost.
    claimed += [row.id for row in claim(hot, list(still_due(hot, ids)))]
    assert sorted(claimed) == sorted(ids)
    assert rows.value("select max(attempt_count) from relay.deliveries") == 1


def test_bytes_of_a_claim_are_bounded_and_the_rest_is_found(hot: sa.Engine, rows: Rows) -> None:
    """A claim takes the longest due up to the bound of bytes, leaves the rest untouched, and tells which they are."""
    endpoint = rows.endpoint()
    ids = [rows.delivery(endpoint, payload=b"x" * 1000, due_in=-10.0 + n) for n in range(5)]

    got = [row.id for row in claim(hot, ids, max_bytes=2500)]

    assert sorted(got) == sorted(ids[:2])
    assert still_due(hot, ids) == set(ids[2:])
    assert [rows.get(id_)["attempt_count"] for id_ in ids] == [1, 1, 0, 0, 0]


def test_a_payload_over_the_bound_goes_alone(hot: sa.Engine, rows: Rows) -> None:
    """The first row is taken however large it is: a bound that nothing fits under would stop delivery."""
    endpoint = rows.endpoint()
    large = rows.delivery(endpoint, payload=b"x" * 5000, due_in=-10.0)
    small = rows.delivery(endpoint, payload=b"x", due_in=-5.0)

    assert [row.id for row in claim(hot, [small, large], max_bytes=1000)] == [large]
    assert still_due(hot, [small, large]) == {small}


def test_a_locked_row_is_passed_over_and_found(hot: sa.Engine, rows: Rows, database: str) -> None:
    """Somebody's lock on a row holds up neither the claim nor the look that finds the row still due."""
    locked, free = rows.deliveries(rows.endpoint(), 2)
    with psycopg.connect(database) as other:
        other.execute("select from relay.deliveries where id = %s for update", [locked])

        assert [row.id for row in claim(hot, [locked, free])] == [free]
        assert still_due(hot, [locked, free]) == {locked}

    assert [row.id for row in claim(hot, [locked, free])] == [locked]


def test_an_ingest_that_holds_the_endpoint_holds_up_no_claim(hot: sa.Engine, rows: Rows, database: str) -> None:
    """The foreign key lock of a transaction that inserts a delivery, and a change of the endpoint, block no claim."""
    endpoint = rows.endpoint()
    delivery = rows.delivery(endpoint)
    with psycopg.connect(database) as other:
        other.execute("update relay.endpoints set description = 'new' where id = %s", [endpoint])

        assert [row.id for row in claim(hot, [delivery])] == [delivery]


def test_spent_counts_this_generation_alone(hot: sa.Engine, rows: Rows) -> None:
    """After a replay the attempt number climbs on while the budget starts anew (C-4)."""
    delivery = rows.delivery(rows.endpoint())
    rows.sql("update relay.deliveries set attempt_count = 7, budget_from = 7, generation = 2 where id = %s", [delivery])

    (claimed,) = claim(hot, [delivery])

    assert (claimed.attempt_count, claimed.spent, claimed.generation) == (8, 1, 2)


def test_a_claim_tells_what_holds_its_endpoint(hot: sa.Engine, rows: Rows) -> None:
    """A row that something may hold back says so, and a closer look tells what; any other says 0."""
    endpoint = rows.endpoint()
    delivery = rows.delivery(endpoint)
    rows.sql(
        "update relay.endpoints set enabled = false, deleted_at = now(), held_until = now() + interval '9 s', url = 'http://x'"
        " where id = %s",
        [endpoint],
    )

    (claimed,) = claim(hot, [delivery])
    with hot.connect() as connection:
        seen = claims.look_closer(connection, [delivery])[delivery]

    assert claimed.endpoint_version == 2
    assert claimed.closer != 0
    assert (seen.endpoint_enabled, seen.endpoint_deleted, seen.expired) == (False, True, False)
    assert seen.held_s is not None
    assert 0 < seen.held_s <= 9


def test_each_circumstance_asks_for_a_closer_look(hot: sa.Engine, rows: Rows) -> None:
    """An open breaker, an earlier deferral, an expiry that has come and a test each make the number another than 0."""
    opened, plain = rows.endpoint(), rows.endpoint()
    rows.sql("update relay.endpoints set breaker_state = 1, breaker_generation = 4 where id = %s", [opened])
    ids = {
        name: rows.delivery(opened if name == "breaker" else plain)
        for name in ("breaker", "deferred", "expired", "test")
    }
    rows.sql(
        "update relay.deliveries set deferred_reason = 'internal', deferred_count = 3 where id = %s", [ids["deferred"]]
    )
    rows.sql("update relay.deliveries set expires_at = now() where id = %s", [ids["expired"]])
    rows.sql(
        "update relay.events set source = 3 where id = (select event_id from relay.deliveries where id = %s)",
        [ids["test"]],
    )

    got = {row.id: row.closer for row in claim(hot, list(ids.values()))}
    with hot.connect() as connection:
        seen = claims.look_closer(connection, list(ids.values()))

    assert all(got[id_] for id_ in ids.values())
    assert len(set(got.values())) == 4
    assert (seen[ids["breaker"]].breaker.state, seen[ids["breaker"]].breaker.generation) == (BreakerState.OPEN, 4)
    assert (seen[ids["deferred"]].deferred_reason, seen[ids["deferred"]].deferred_count) == ("internal", 3)
    assert seen[ids["expired"]].expired
    assert seen[ids["test"]].source is EventSource.TEST


def test_version_moves_with_settings_and_not_with_deliveries(rows: Rows) -> None:
    """What workers keep of an endpoint is thrown away by a new URL, not by a hold or a count of failures."""
    endpoint = rows.endpoint()
    for change in ("held_until = now()", "breaker_failures = 3", "enabled = false", "description = 'x'"):
        rows.connection.execute(f"update relay.endpoints set {change} where id = '{endpoint}'")
    assert rows.value("select version from relay.endpoints") == 1

    for change in ("url = 'http://x'", "secret = 'x'", "headers = '{}'", "retry = '{}'", "timeout_ms = 500"):
        rows.connection.execute(f"update relay.endpoints set {change} where id = '{endpoint}'")
    assert rows.value("select version from relay.endpoints") == 6
