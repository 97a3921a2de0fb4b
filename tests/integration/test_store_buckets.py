"""The shared token buckets: the statement against the pure arithmetic, and against workers that take at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.core.bucket import Bucket, Demand, Grant, take
from relay.store import buckets

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

    from tests.rows import Rows


def put(rows: Rows, endpoint_id: UUID, bucket: Bucket, now: float) -> None:
    """Make the endpoint's bucket what `bucket` says, its times counted from `now`."""
    rows.sql(
        """
        update relay.endpoint_buckets set tokens = %s, refilled_at = now() + make_interval(secs => %s),
            slots_until = now() + make_interval(secs => %s), slots_generation = %s where endpoint_id = %s
        """,
        [
            bucket.tokens,
            bucket.refilled_at - now,
            None if bucket.slots_until is None else bucket.slots_until - now,
            bucket.generation,
            endpoint_id,
        ],
    )


def test_a_new_endpoint_begins_with_a_full_bucket(hot: sa.Engine, rows: Rows) -> None:
    """The first batch gets its burst, and the rest a slot each, one gap after the other."""
    endpoint = rows.endpoint(rate=2.0, burst=3)
    with hot.connect() as connection:
        first = buckets.take(connection, {endpoint: Demand(rate=2.0, burst=3, fresh=5)})[endpoint]
        second = buckets.take(connection, {endpoint: Demand(rate=2.0, burst=3, fresh=1)})[endpoint]

    assert (first.fresh, second.fresh) == (3, 0)
    assert first.slot_s == pytest.approx(0.5, abs=0.01)
    # Two slots are outstanding, so a new row queues behind them, at 1.5 s.
    assert second.slot_s == pytest.approx(1.5, abs=0.1)


def test_a_crash_leaves_buckets_empty_and_not_full(hot: sa.Engine, rows: Rows) -> None:
    """A missing row, which is what a crash of the database leaves, is an empty bucket; a deleted endpoint has none."""
    endpoint, gone = rows.endpoint(), rows.endpoint()
    rows.sql("delete from relay.endpoint_buckets")
    rows.sql("delete from relay.endpoints where id = %s", [gone])
    with hot.connect() as connection:
        grants = buckets.take(
            connection, {id_: Demand(rate=0.5, burst=20, waited=1, fresh=2) for id_ in (endpoint, gone)}
        )

    assert set(grants) == {endpoint}
    assert (grants[endpoint].waited, grants[endpoint].fresh) == (0, 0)
    assert grants[endpoint].slot_s == pytest.approx(2.0, abs=0.1)
    assert rows.value("select relpersistence from pg_class where oid = 'relay.endpoint_buckets'::regclass") == "u"


def test_a_trip_counts_the_slots_anew(hot: sa.Engine, rows: Rows) -> None:
    """Rows held behind an open breaker get slots from the cooldown's end, whatever was outstanding before the trip."""
    endpoint = rows.endpoint(rate=1.0, burst=1)
    held = Demand(rate=1.0, burst=1, held=3, held_s=30.0, generation=1)
    with hot.connect() as connection:
        buckets.take(connection, {endpoint: Demand(rate=1.0, burst=1, fresh=101)})
        first = buckets.take(connection, {endpoint: held})[endpoint]
        second = buckets.take(connection, {endpoint: held})[endpoint]

    assert first.held_s == pytest.approx(30.0, abs=0.1)
    assert second.held_s == pytest.approx(33.0, abs=0.1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bucket=st.builds(
        Bucket,
        tokens=st.floats(0, 30),
        refilled_at=st.floats(-1000, 5),
        slots_until=st.none() | st.floats(-50, 50).filter(lambda secs: abs(secs) > 0.1),
        generation=st.integers(0, 3),
    ),
    demand=st.builds(
        Demand,
        rate=st.floats(0.001, 1000),
        burst=st.integers(1, 40).map(float),
        waited=st.integers(0, 30),
        fresh=st.integers(0, 30),
        held=st.integers(0, 30),
        held_s=st.floats(0, 300),
        generation=st.integers(0, 3),
    ),
)
def test_the_statement_does_what_the_core_says(hot: sa.Engine, rows: Rows, bucket: Bucket, demand: Demand) -> None:
    """Whatever the bucket holds and the batch wants, Postgres and the pure arithmetic come to the same."""
    found = rows.sql("select endpoint_id from relay.endpoint_buckets limit 1")
    endpoint = found[0]["endpoint_id"] if found else rows.endpoint()
    put(rows, endpoint, bucket, 0.0)
    with hot.connect() as connection:
        got = buckets.take(connection, {endpoint: demand})[endpoint]
    # The statement runs some milliseconds after the bucket was put: it may hold that much more.
    _, early = take(bucket, demand, 0.0)
    _, late = take(bucket, demand, 0.5)

    assert early.waited <= got.waited <= late.waited or early.waited >= got.waited >= late.waited
    assert early.waited + early.fresh <= got.waited + got.fresh <= late.waited + late.fresh
    if early == Grant(waited=got.waited, fresh=got.fresh, slot_s=early.slot_s, held_s=early.held_s):
        assert early.slot_s - 0.6 <= got.slot_s <= early.slot_s + 0.01
        assert early.held_s - 0.6 <= got.held_s <= early.held_s + 0.01


def test_workers_that_take_at_once_keep_to_one_bucket(hot: sa.Engine, rows: Rows) -> None:
    """Eight threads taking from two endpoints in either order get what the bucket holds, to the token, no deadlock."""
    one, two = rows.endpoint(rate=0.001, burst=100), rows.endpoint(rate=0.001, burst=57)
    got: dict[UUID, list[int]] = {one: [], two: []}

    def work(number: int) -> None:
        # Fresh rows alone go by a statement of their own, as long as there is a token for all of them.
        waited = number % 3
        demands = {
            one: Demand(rate=0.001, burst=100, fresh=3),
            two: Demand(rate=0.001, burst=57, waited=waited, fresh=3 - waited),
        }
        for _ in range(20):
            with hot.connect() as connection:
                order = (one, two) if number % 2 else (two, one)
                for id_, grant in buckets.take(connection, {id_: demands[id_] for id_ in order}).items():
                    got[id_].append(grant.waited + grant.fresh)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (sum(got[one]), sum(got[two])) == (100, 57)
