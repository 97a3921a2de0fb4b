"""Results: written once, under the fence, and always leaving a row that the publisher can see (B-21, B-22)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

import relay.store
from relay.core.model import AttemptClass, Status
from relay.store import announcements, claims, results
from relay.store.results import AttemptRow, UnsentRow

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

    from relay.store.claims import Claimed
    from tests.rows import Rows


def claim_one(hot: sa.Engine, delivery: UUID) -> tuple[Claimed, UUID]:
    """Lease one delivery; return it and the token."""
    token = uuid4()
    with hot.connect() as connection:
        (claimed,) = claims.claim(connection, [delivery], token=token, lease_secs=60.0, max_bytes=1 << 20)
    return claimed, token


def attempt(claimed: Claimed, token: UUID, **changes: Any) -> AttemptRow:
    """Return the row of an attempt that was answered with 500 and is to be retried in 30 s."""
    row = AttemptRow(
        delivery_id=claimed.id,
        lease_token=token,
        next_status=Status.PENDING,
        reason=None,
        wait_secs=30.0,
        at=claimed.claimed_at,
        number=claimed.attempt_count,
        generation=claimed.generation,
        attempt_class=AttemptClass.RETRYABLE_FAILURE,
        code="http_500",
        error="the receiver answered 500",
        http_status=500,
        body_incomplete=True,
        sends=2,
        dns_us=1,
        connect_us=2,
        tls_us=3,
        first_byte_us=4,
        total_us=5,
        bytes_sent=6,
        bytes_received=7,
        remote_address="192.0.2.1",
        worker="worker-1",
        reply_headers="a: b\nc: d",
        snippet="oops é",
    )
    return row._replace(**changes)


def unsent(claimed: Claimed, token: UUID, **changes: Any) -> UnsentRow:
    """Return the row of a deferral for want of a slot, for 10 s."""
    row = UnsentRow(
        delivery_id=claimed.id,
        endpoint_id=claimed.endpoint_id,
        lease_token=token,
        next_status=Status.PENDING,
        reason=None,
        wait_secs=10.0,
        deferred_reason="slot",
        at=claimed.claimed_at,
        generation=claimed.generation,
        worker="worker-1",
    )
    return row._replace(**changes)


def record(hot: sa.Engine, *rows: AttemptRow) -> int:
    """Write attempts."""
    with hot.connect() as connection:
        return results.record(connection, rows)


def defer(hot: sa.Engine, delivery: UUID, reason: str | None, wait: float | None = 0.0) -> None:
    """Claim a delivery and give it back unsent, due again at once."""
    claimed, token = claim_one(hot, delivery)
    with hot.connect() as connection:
        results.record_unsent(connection, [unsent(claimed, token, deferred_reason=reason, wait_secs=wait)])


def announce(hot: sa.Engine) -> list[UUID]:
    """Mark what is due, as the publisher does."""
    with hot.connect() as connection:
        return announcements.mark(connection, after=announcements.START, limit=100).ids


def make_due(rows: Rows, delivery: UUID) -> None:
    """Let the time until a delivery is due pass."""
    rows.sql("update relay.deliveries set due_at = now() where id = %s", [delivery])


def test_a_retry_is_pending_later_with_its_attempt_in_the_log(hot: sa.Engine, rows: Rows) -> None:
    """Every column of the attempt is stored, and the row waits, unannounced and unleased, for its due time."""
    delivery = rows.delivery(rows.endpoint())
    claimed, token = claim_one(hot, delivery)

    assert record(hot, attempt(claimed, token)) == 1

    row = rows.get(delivery)
    assert (row["status"], row["attempt_count"], row["reason"]) == (Status.PENDING, 1, None)
    assert (row["lease_token"], row["lease_until"], row["announced_at"], row["finished_at"]) == (None, None, None, None)
    assert 25 < row["due_in"] <= 30
    (logged,) = rows.attempts(delivery)
    assert logged == {
        "delivery_id": delivery,
        "at": claimed.claimed_at,
        "lease_token": token,
        "number": 1,
        "generation": 0,
        "class": AttemptClass.RETRYABLE_FAILURE,
        "code": "http_500",
        "error": "the receiver answered 500",
        "status": 500,
        "body_incomplete": True,
        "sends": 2,
        "dns_us": 1,
        "connect_us": 2,
        "tls_us": 3,
        "first_byte_us": 4,
        "total_us": 5,
        "bytes_sent": 6,
        "bytes_received": 7,
        "remote_address": "192.0.2.1",
        "worker": "worker-1",
        "reply_headers": "a: b\nc: d",
        "snippet": "oops é",
    }


def test_nullable_columns_may_be_null(hot: sa.Engine, rows: Rows) -> None:
    """An attempt without an answer has no status, no address, no reply."""
    delivery = rows.delivery(rows.endpoint())
    claimed, token = claim_one(hot, delivery)
    nothing: dict[str, Any] = dict.fromkeys(
        ["code", "error", "http_status", "remote_address", "reply_headers", "snippet"], None
    )

    assert record(hot, attempt(claimed, token, **nothing)) == 1

    (logged,) = rows.attempts(delivery)
    assert [logged[name] for name in ("code", "error", "status", "remote_address", "reply_headers", "snippet")] == [
        None
    ] * 6


def test_delivered_rows_keep_no_evidence(hot: sa.Engine, rows: Rows) -> None:
    """A delivered row is finished, and what it was deferred for is forgotten."""
    delivery = rows.delivery(rows.endpoint())
    defer(hot, delivery, "slot")
    claimed, token = claim_one(hot, delivery)

    record(
        hot,
        attempt(claimed, token, next_status=Status.DELIVERED, wait_secs=None, attempt_class=AttemptClass.SUCCESS),
    )

    row = rows.get(delivery)
    assert (row["status"], row["last_attempt"], row["deferred_reason"]) == (Status.DELIVERED, None, None)
    assert (row["deferred_count"], row["deferred_since"]) == (0, None)
    assert row["finished_at"] is not None


def test_dead_rows_keep_their_last_attempt(hot: sa.Engine, rows: Rows) -> None:
    """A dead row holds the evidence of its last attempt itself: it outlives the log's window (B-120)."""
    delivery = rows.delivery(rows.endpoint())
    claimed, token = claim_one(hot, delivery)

    record(hot, attempt(claimed, token, next_status=Status.DEAD, reason="attempts_exhausted", wait_secs=None))
    rows.sql("delete from relay.delivery_attempts")

    row = rows.get(delivery)
    assert (row["status"], row["reason"]) == (Status.DEAD, "attempts_exhausted")
    kept = row["last_attempt"]
    assert {name: kept[name] for name in ("number", "code", "error", "status", "snippet", "reply_headers")} == {
        "number": 1,
        "code": "http_500",
        "error": "the receiver answered 500",
        "status": 500,
        "snippet": "oops é",
        "reply_headers": "a: b\nc: d",
    }


def test_a_stale_token_changes_nothing(hot: sa.Engine, rows: Rows) -> None:
    """The result of a worker that lost its lease writes neither the row nor the log, while its neighbours' do (C-47)."""
    stale, fresh = rows.deliveries(rows.endpoint(), 2)
    lost, old_token = claim_one(hot, stale)
    kept, good_token = claim_one(hot, fresh)
    rows.sql("update relay.deliveries set status = 0, lease_token = null, due_at = now() where id = %s", [stale])
    claim_one(hot, stale)
    before = rows.get(stale)

    done = {"next_status": Status.DELIVERED, "wait_secs": None}
    assert record(hot, attempt(lost, old_token, **done), attempt(kept, good_token, **done)) == 1

    after = rows.get(stale)
    assert {k: v for k, v in after.items() if k != "leased_for" and k != "due_in"} == {
        k: v for k, v in before.items() if k != "leased_for" and k != "due_in"
    }
    assert rows.attempts(stale) == []
    assert rows.get(fresh)["status"] == Status.DELIVERED


@pytest.mark.parametrize("status", [Status.PENDING, Status.DELIVERED, Status.DEAD, Status.CANCELED])
def test_a_result_for_a_row_that_is_not_in_flight_changes_nothing(hot: sa.Engine, rows: Rows, status: Status) -> None:
    """Even with the right token, a row that has left flight is left alone, by results and by releases."""
    delivery = rows.delivery(rows.endpoint())
    claimed, token = claim_one(hot, delivery)
    rows.sql("update relay.deliveries set status = %s where id = %s", [int(status), delivery])

    assert record(hot, attempt(claimed, token)) == 0
    with hot.connect() as connection:
        results.record_unsent(connection, [unsent(claimed, token)])

    assert rows.get(delivery)["status"] == status
    assert rows.get(delivery)["attempt_count"] == 1
    assert rows.attempts(delivery) == []


def test_a_stale_release_gives_no_attempt_back(hot: sa.Engine, rows: Rows) -> None:
    """A deferral or release under a lost lease leaves the new holder's attempt counted."""
    delivery = rows.delivery(rows.endpoint())
    claimed, old_token = claim_one(hot, delivery)
    rows.sql("update relay.deliveries set status = 0, lease_token = null where id = %s", [delivery])
    claim_one(hot, delivery)

    with hot.connect() as connection:
        results.record_unsent(connection, [unsent(claimed, old_token)])

    assert rows.get(delivery)["attempt_count"] == 2
    assert rows.attempts(delivery) == []


def test_a_lost_reply_is_known_by_its_own_rows(hot: sa.Engine, rows: Rows) -> None:
    """After a COMMIT whose reply was lost, the log tells which results were written and which never were (B-28)."""
    written, unwritten = rows.deliveries(rows.endpoint(), 2)
    first = attempt(*claim_one(hot, written))
    second = attempt(*claim_one(hot, unwritten))
    record(hot, first)

    with hot.connect() as connection:
        known = results.recorded(connection, [first, second])
        other_token = results.recorded(connection, [first._replace(lease_token=uuid4())])
    assert known == {(written, first.lease_token)}
    assert other_token == set()
    # To write it again is harmless all the same: the fence is shut behind it.
    assert record(hot, first, second) == 1
    assert len(rows.attempts(written)) == 1


def test_a_deferral_gives_the_attempt_back(hot: sa.Engine, rows: Rows) -> None:
    """Sixty deferrals spend no attempt, and the row says since when and why it waits (B-52, C-65)."""
    delivery = rows.delivery(rows.endpoint())
    for _ in range(60):
        defer(hot, delivery, "slot")

    row = rows.get(delivery)
    assert (row["status"], row["attempt_count"]) == (Status.PENDING, 0)
    assert (row["deferred_reason"], row["deferred_count"]) == ("slot", 60)
    assert row["deferred_since"] is not None
    assert claim_one(hot, delivery)[0].attempt_count == 1


def test_a_run_of_deferrals_is_one_line_in_the_log(hot: sa.Engine, rows: Rows) -> None:
    """The log gets a line, without a number, when a run begins and when its reason changes; none for what goes on."""
    delivery = rows.delivery(rows.endpoint())
    for reason in ("slot", "slot", "slot", "held", "held", "slot"):
        defer(hot, delivery, reason)

    logged = rows.attempts(delivery)
    assert [(line["class"], line["code"], line["number"]) for line in logged] == [
        (AttemptClass.DEFERRED, reason, None) for reason in ("slot", "held", "slot")
    ]
    assert rows.get(delivery)["deferred_count"] == 1


def test_since_when_a_run_lasts_is_kept(hot: sa.Engine, rows: Rows) -> None:
    """The start of a run of deferrals stays while its reason does, and moves when that changes."""
    delivery = rows.delivery(rows.endpoint())
    defer(hot, delivery, "slot")
    first = rows.get(delivery)["deferred_since"]
    defer(hot, delivery, "slot")
    assert rows.get(delivery)["deferred_since"] == first
    defer(hot, delivery, "held")
    assert rows.get(delivery)["deferred_since"] > first


def test_a_release_is_no_deferral(hot: sa.Engine, rows: Rows) -> None:
    """A lease given back at shutdown writes no log line, spends no attempt and is due at once (B-27)."""
    delivery = rows.delivery(rows.endpoint())
    defer(hot, delivery, None)

    row = rows.get(delivery)
    assert (row["status"], row["attempt_count"], row["deferred_reason"]) == (Status.PENDING, 0, None)
    assert row["due_in"] <= 0
    assert rows.attempts(delivery) == []


def test_an_attempt_ends_a_run_of_deferrals(hot: sa.Engine, rows: Rows) -> None:
    """After an attempt the next deferral begins a new run, with a line of its own."""
    delivery = rows.delivery(rows.endpoint())
    defer(hot, delivery, "slot")
    record(hot, attempt(*claim_one(hot, delivery)))
    make_due(rows, delivery)
    defer(hot, delivery, "slot")

    assert [line["code"] for line in rows.attempts(delivery)] == ["slot", "http_500", "slot"]
    assert rows.get(delivery)["deferred_count"] == 1


def test_a_pause_is_neither_due_nor_late(hot: sa.Engine, rows: Rows) -> None:
    """A paused row is pending without a due time: no publisher, poller or lateness sees it (B-121)."""
    delivery = rows.delivery(rows.endpoint())
    defer(hot, delivery, "paused", None)

    row = rows.get(delivery)
    assert (row["status"], row["due_at"], row["attempt_count"]) == (Status.PENDING, None, 0)
    assert announce(hot) == []
    with hot.connect() as connection:
        assert announcements.due_ids(connection, late_secs=0.0, limit=10) == []
        assert announcements.lateness_secs(connection) is None


def test_a_dead_row_that_was_not_sent_says_why(hot: sa.Engine, rows: Rows) -> None:
    """A row that ends without a request keeps its attempts as they were, and has a reason and an end."""
    delivery = rows.delivery(rows.endpoint())
    claimed, token = claim_one(hot, delivery)
    with hot.connect() as connection:
        results.record_unsent(
            connection,
            [
                unsent(
                    claimed,
                    token,
                    next_status=Status.DEAD,
                    reason="endpoint_deleted",
                    wait_secs=None,
                    deferred_reason=None,
                )
            ],
        )

    row = rows.get(delivery)
    assert (row["status"], row["reason"], row["attempt_count"]) == (Status.DEAD, "endpoint_deleted", 0)
    assert row["finished_at"] is not None


@pytest.mark.parametrize("way", ["retry", "deferral", "pause", "release", "unmark"])
def test_whatever_makes_a_row_wait_leaves_it_unannounced(hot: sa.Engine, rows: Rows, way: str) -> None:
    """After each way back to pending the mark and the token are gone, so that the publisher sees the row again."""
    delivery = rows.delivery(rows.endpoint())
    assert announce(hot) == [delivery]
    if way == "unmark":
        with hot.connect() as connection:
            announcements.unmark(connection, [delivery])
    elif way == "retry":
        record(hot, attempt(*claim_one(hot, delivery), wait_secs=0.0))
    else:
        defer(
            hot,
            delivery,
            {"deferral": "slot", "pause": "paused", "release": None}[way],
            None if way == "pause" else 0.0,
        )

    row = rows.get(delivery)
    assert (row["status"], row["announced_at"], row["lease_token"]) == (Status.PENDING, None, None)
    assert announce(hot) == ([] if way == "pause" else [delivery])


def _statements() -> list[tuple[str, str]]:
    """Return (file, text) of every statement of the store that updates deliveries."""
    found = []
    for path in sorted(Path(relay.store.__file__).parent.glob("*.py")):
        for text in re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL):
            found += [(path.name, part) for part in re.split(r"(?=update relay\.deliveries)", text)[1:]]
    return found


def _assignments(statement: str) -> str:
    # From `set` to the clause that follows it at the same depth: `from`, `where` or `returning`.
    body = statement.split(" set ", 1)[1] if " set " in statement else statement.split("\nset ", 1)[1]
    depth = 0
    for match in re.finditer(r"[()]|\b(?:from|where|returning)\b", body):
        if match.group() in "()":
            depth += 1 if match.group() == "(" else -1
        elif depth == 0:
            return body[: match.start()]
    return body


def forgets_to_clear(statement: str) -> bool:
    """Whether an update makes rows pending, or sets their due time, and leaves their mark or their token."""
    assigned = _assignments(statement)
    wakes = re.search(r"\bdue_at\s*=", assigned) or re.search(r"\bstatus\s*=\s*(?:0\b|r\.|%|:)", assigned)
    if not wakes:
        return False
    return not (re.search(r"\bannounced_at\s*=\s*null", assigned) and re.search(r"\blease_token\s*=\s*null", assigned))


def test_every_statement_that_makes_rows_wait_clears_mark_and_token() -> None:
    """The text of the store is searched for an update that would leave a row marked that is not due (B-21)."""
    statements = _statements()

    assert len(statements) >= 4
    assert [text for _, text in statements if forgets_to_clear(text)] == []


@pytest.mark.parametrize(
    ("statement", "forgets"),
    [
        ("update relay.deliveries d set due_at = now() where id = 1", True),
        ("update relay.deliveries set status = 0, announced_at = null where id = 1", True),
        ("update relay.deliveries set status = r.next, lease_token = null from r", True),
        ("update relay.deliveries set due_at = null, announced_at = null, lease_token = null", False),
        ("update relay.deliveries d set announced_at = now() from due where d.due_at = due.due_at", False),
        ("update relay.deliveries d set status = 1, lease_token = %(token)s from b where d.due_at < now()", False),
    ],
)
def test_the_search_finds_what_it_is_for(statement: str, forgets: bool) -> None:
    """The search itself: it finds the statement that forgets, and no other."""
    assert forgets_to_clear(statement) is forgets
