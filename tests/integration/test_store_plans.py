"""The hot statements' plans: by index and loop, whatever the tables hold and whatever the statistics say."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from relay.store import (
    announcements,
    breakers,
    buckets,
    claims,
    destinations,
    endpoint_minutes,
    events,
    leases,
    results,
    traces,
    wakes,
)
from relay.store.engine import make_engine, run
from relay.store.tables import metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa
    from psycopg import sql

    from tests.rows import Rows

#: Rows of a full table: enough for a sequential scan to look cheap beside a loop with bad estimates.
FULL = 4_000

HOT = {
    "mark": announcements._MARK,
    "unmark": announcements._UNMARK,
    "unmark_overdue": announcements._OVERDUE_ANNOUNCED,
    "due_ids": announcements._DUE,
    "claim": claims._CLAIM,
    "take": buckets._TAKE,
    "take_all": buckets._TAKE_ALL,
    "still_due": claims._STILL_DUE,
    "load": destinations._LOAD,
    "hold": destinations._HOLD,
    "clear_counts": breakers._CLEAR_COUNTS,
    "lock_breakers": breakers._LOCK,
    "save_breakers": breakers._SAVE,
    "try_probe": breakers._TRY_PROBE,
    "hand_back": breakers._HAND_BACK,
    "look_closer": claims._LOOK_CLOSER,
    "count_minutes": endpoint_minutes._ADD,
    "lock_disabled": destinations._STILL_DISABLED,
    "record": results._RECORD,
    "recorded": results._RECORDED,
    "unsent": results._UNSENT,
    "lock_expired": leases._EXPIRED,
    "ingest": events._INGEST,
    "ingest_keyed": events._INGEST_KEYED,
    "ingest_traced": events._INGEST_KEYED_TRACED,
    "traces": traces._OF,
    "wakes_waiting": wakes._WAITING,
    "wakes_move": wakes._MOVE,
    "wakes_end": wakes._END,
    "wakes_ripen": wakes._RIPEN,
}
#: Statements that find deliveries by id: no other index may lead.
BY_ID = {"unmark", "claim", "look_closer", "still_due", "record", "unsent", "wakes_move"}
#: Indexes of a few rows of their table, which a statement may read as a whole.
PARTIAL = {
    index.name
    for table in metadata.tables.values()
    for index in table.indexes
    if index.dialect_options["postgresql"]["where"] is not None
}
#: Statements that lock rows and then update them where they are: no index is asked for them a second time.
BY_PLACE = {"mark", "claim", "unmark_overdue"}


def _plan(connection: sa.Connection, statement: sql.SQL) -> dict[str, Any]:
    """Return the generic plan of a statement, under the session settings that the hot pool has."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match.group(1) or f"#{len(names)}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    text = re.sub(r"%\((\w+)\)s|%s", number, statement.as_string(None))
    run(connection, "deallocate all")
    raw: Any = connection.connection.driver_connection
    raw.execute(f"prepare looked_at as {text}")
    nulls = ", ".join(["null"] * len(names))
    (found,) = raw.execute(f"explain (verbose, format json) execute looked_at({nulls})").fetchone()
    raw.execute("deallocate looked_at")
    plan: dict[str, Any] = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def _faults(name: str, plan: dict[str, Any]) -> list[str]:
    found = []
    for node in _nodes(plan):
        kind, relation = node["Node Type"], node.get("Relation Name", "")
        if kind in {"Seq Scan", "Bitmap Heap Scan"} and relation != "workspaces":
            found.append(f"{kind} on {relation}")
        if kind in {"Hash Join", "Merge Join"}:
            found.append(kind)
        if kind in {"Index Scan", "Index Only Scan"} and "Index Cond" not in node and node["Index Name"] not in PARTIAL:
            found.append(f"all of {node['Index Name']}")
        if re.search(r"\b(id|endpoint_id) >= ", node.get("Index Cond", "")):
            # Taken for a part of the table: at a million rows another index, read whole for each row, looked cheaper.
            found.append(f"{relation} looked up by a range of ids")
        if kind == "Nested Loop":
            inner = node["Plans"][1]
            # A function of the outer row (an array of its own) is no loop over everything; one of a parameter is.
            whole = inner["Node Type"] == "Function Scan" and "$" in inner["Function Call"]
            if whole or inner["Node Type"] in {"CTE Scan", "Materialize"}:
                found.append(f"a loop over {inner['Node Type']} for every row")
        if (
            name in BY_ID
            and relation in {"deliveries", "events", "endpoints"}
            and "Index Name" in node
            and node["Index Name"] != f"{relation}_pkey"
        ):
            found.append(f"{relation} found by {node['Index Name']}")
    if name in BY_PLACE and "Tid Scan" not in {node["Node Type"] for node in _nodes(plan)}:
        found.append("rows that are locked already are looked up again")
    return found


def _empty(rows: Rows) -> None:
    """Leave everything empty."""


def _fill(rows: Rows, count: int = FULL) -> None:
    for table in ("deliveries", "events", "endpoints"):
        rows.connection.execute(f"alter table relay.{table} set (autovacuum_enabled = false)")
    for _ in range(20):
        rows.deliveries(rows.endpoint(), count // 20)


def _never_analysed(rows: Rows) -> None:
    _fill(rows)
    assert rows.value("select reltuples from pg_class where oid = 'relay.deliveries'::regclass") == -1


def _stale_as_empty(rows: Rows) -> None:
    rows.connection.execute("analyze relay.deliveries, relay.events, relay.endpoints, relay.delivery_attempts")
    _fill(rows)


def _small(rows: Rows, endpoints: int, deliveries: int) -> None:
    """Tables that are as small as their statistics say: a plan made now is kept, and soon they are large."""
    for _ in range(endpoints):
        rows.deliveries(rows.endpoint(), deliveries)
    rows.connection.execute(
        "analyze relay.deliveries, relay.events, relay.endpoints, relay.endpoint_buckets, relay.delivery_attempts"
    )


def _of_ten(rows: Rows) -> None:
    # Of one or two rows every path costs the same, and any may be taken.
    _small(rows, 1, 10)


def _of_thirty(rows: Rows) -> None:
    _small(rows, 30, 1)


def _of_three_hundred(rows: Rows) -> None:
    _small(rows, 60, 5)


def _stale_as_all_waiting(rows: Rows) -> None:
    """Statistics of a moment at which no row had a lease and none was announced; then all have, and are in flight."""
    _fill(rows)
    rows.connection.execute("analyze relay.deliveries, relay.events, relay.endpoints")
    rows.sql("update relay.deliveries set status = 1, lease_token = relay.uuid7(), lease_until = now()")


def _stale_as_all_done(rows: Rows) -> None:
    """Statistics of a moment at which every delivery was done; then all wait."""
    _fill(rows)
    rows.sql("update relay.deliveries set status = 2")
    rows.connection.execute("analyze relay.deliveries, relay.events, relay.endpoints")
    rows.sql("update relay.deliveries set status = 0, announced_at = now()")


def _huge(rows: Rows) -> None:
    """What the planner takes for a hundred thousand times as many rows as there are: hundreds of millions."""
    _fresh(rows)
    rows.sql(
        "update pg_class set reltuples = reltuples * 100000 where oid = any(%s::regclass[])",
        [["relay.deliveries", "relay.events", "relay.endpoints"]],
    )
    assert rows.value("select reltuples from pg_class where oid = 'relay.deliveries'::regclass") == FULL * 100_000


def _fresh(rows: Rows) -> None:
    _fill(rows)
    rows.connection.execute("vacuum analyze relay.deliveries, relay.events, relay.endpoints")


@pytest.mark.parametrize(
    "state",
    [
        _empty,
        _of_ten,
        _of_thirty,
        _of_three_hundred,
        _never_analysed,
        _stale_as_empty,
        _stale_as_all_waiting,
        _stale_as_all_done,
        _fresh,
        _huge,
    ],
)
def test_hot_statements_keep_their_plan(hot: sa.Engine, rows: Rows, state: Any) -> None:
    """At every state of tables and statistics: index scans and nested loops, deliveries by their primary key."""
    state(rows)

    with hot.connect() as connection:
        faults = {name: _faults(name, _plan(connection, statement)) for name, statement in HOT.items()}

    assert {name: found for name, found in faults.items() if found} == {}


def test_the_look_at_plans_can_fail(rows: Rows, database: str) -> None:
    """With the sessions of the ordinary pool the same look finds sequential scans: the pinning does something."""
    _stale_as_empty(rows)
    engine = make_engine(database, name="test", size=1)
    try:
        with engine.connect() as connection:
            assert any(_faults(name, _plan(connection, statement)) for name, statement in HOT.items())
    finally:
        engine.dispose()
