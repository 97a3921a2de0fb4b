"""Events sent while something breaks, and the account afterwards: what was accepted, what arrived, what is on record."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import requests

from relay.core.model import Status
from relay.core.outcome import WORKER_LOST
from relay.store import events
from relay.store.events import NewEvent
from relay.store.ids import new_id
from tests.stack import Stack, wait_until

if TYPE_CHECKING:
    from types import TracebackType

#: Printed, so that a failure can be had again; RELAY_SEED sets it.
SEED = int(os.environ.get("RELAY_SEED") or random.SystemRandom().randrange(2**32))

_DELIVERIES = """
select d.id::text, d.event_type, d.status, d.reason, d.attempt_count, d.lease_token is null,
    coalesce(array_agg(a.number order by a.number) filter (where a.number is not null), '{}'),
    count(a.status), count(*) filter (where a.code = %s), count(a.number) filter (where a.status is null)
from relay.deliveries d left join relay.delivery_attempts a on a.delivery_id = d.id
group by d.id
"""


class Traffic:
    """Senders that post events over HTTP until told to stop, and what became of each post.

    With `count` 0 it sends nothing by itself: `ingest` puts events in directly.
    """

    def __init__(self, stack: Stack, *, senders: int = 8, event_type: str = "test.event", pause: float = 0.05) -> None:
        print(f"seed {SEED} (RELAY_SEED)")
        self._stack = stack
        self._event_type = event_type
        self._pause = pause
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(number,), name=f"sender-{number}") for number in range(senders)
        ]
        #: Delivery ids of events answered 202.
        self.accepted: set[str] = set()
        #: Statuses that were answered.
        self.answers: Counter[int] = Counter()
        #: Posts whose fate the sender does not know, as the connection broke; and those that found nobody to connect to.
        self.unknown: list[str] = []
        self.not_connected = 0
        #: (when, on the monotonic clock; seconds that it took) for each 202.
        self.waits: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more, and wait for what is under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a post never ended"

    def ingest(self, count: int, *, event_type: str | None = None) -> list[str]:
        """Commit events without HTTP; return their deliveries' ids."""
        batch = [self._event(event_type or self._event_type) for _ in range(count)]
        with self._stack.parts.hot.connect() as connection:
            stored = events.ingest(connection, batch)
        ids = [delivery["id"] for answer in stored if answer for delivery in json.loads(answer)["deliveries"]]
        self.accepted |= set(ids)
        return ids

    def wait_accepted(self, more: int, timeout: float = 30.0) -> None:
        """Wait until `more` events have been accepted from now on."""
        goal = len(self.accepted) + more
        wait_until(lambda: len(self.accepted) >= goal, timeout, f"{more} more events are accepted")

    def slowest(self, begin: float, end: float) -> float:
        """Return the longest that a 202 took between two moments."""
        return max((secs for at, secs in self.waits if begin <= at <= end), default=0.0)

    def _event(self, event_type: str) -> NewEvent:
        return NewEvent(
            id=new_id(),
            workspace_id=self._stack.workspace_id,
            type=event_type,
            content_type="application/json",
            payload=json.dumps({"type": event_type, "nonce": new_id().hex}).encode(),
            api_key_id=None,
            request_id=None,
        )

    def _send(self, number: int) -> None:
        chance = random.Random(SEED + number)
        with requests.Session() as session:
            session.headers.update(self._stack.headers | {"Content-Type": "application/json"})
            while not self._stop.wait(self._pause * (0.5 + chance.random())):
                body = {
                    "type": self._event_type,
                    "number": chance.randrange(10**9),
                    "pad": "x" * chance.randrange(2000),
                }
                began = time.monotonic()
                try:
                    answer = session.post(f"{self._stack.url}/v1/events", json=body, timeout=30)
                except requests.RequestException as error:
                    with self._lock:
                        if "Failed to establish a new connection" in str(error):
                            self.not_connected += 1
                        else:
                            self.unknown.append(str(error))
                    continue
                with self._lock:
                    self.answers[answer.status_code] += 1
                    if answer.status_code == 202:
                        self.waits.append((began, time.monotonic() - began))
                        self.accepted.update(one["id"] for one in answer.json()["deliveries"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A delivery as the database has it, beside what the receiver saw."""

    id: str
    event_type: str
    status: Status
    reason: str | None
    attempts: int
    #: Attempts with an answer on record, those that ended with their worker, and all that have no answer.
    answered: int
    lost: int
    unanswered: int
    receipts: int


def settle(stack: Stack, timeout: float = 60.0) -> None:
    """Wait until no delivery is pending or in flight."""
    try:
        wait_until(lambda: not unsettled(stack), timeout, "all deliveries are settled")
    except AssertionError as error:
        raise AssertionError(f"{error}; left are {unsettled(stack)}") from None


def unsettled(stack: Stack) -> list[tuple[object, ...]]:
    """Count pending and in-flight deliveries by what they may be waiting for."""
    return stack.rows("""
        select status, event_type, announced_at is null as unannounced, due_at <= now() as due, lease_until < now() as
            expired, count(*), max(attempt_count) from relay.deliveries where status in (0, 1) group by 1, 2, 3, 4, 5
    """)


def check(stack: Stack, traffic: Traffic) -> dict[str, Account]:
    """Hold the record against the receiver, once all is settled; return the accounts for what a test wants besides.

    Nothing accepted is lost, nothing came that was not committed, each receipt has its attempt and each answer its
    receipt, attempts are numbered without a gap, a delivery's bytes never change, and no lease is left.
    """
    seen = stack.receiver.ids()
    accounts: dict[str, Account] = {}
    for row in stack.rows(_DELIVERIES, WORKER_LOST.code):
        id_, event_type, status, reason, attempts, free, numbers, answered, lost, unanswered = row
        assert free, f"{id_} still has a lease"
        assert numbers == list(range(1, attempts + 1)), f"{id_}: {attempts} attempts, on record {numbers}"
        accounts[id_] = Account(
            id=id_,
            event_type=event_type,
            status=Status(status),
            reason=reason,
            attempts=attempts,
            answered=answered,
            lost=lost,
            unanswered=unanswered,
            receipts=seen.get(id_, 0),
        )
    lost_ids = traffic.accepted - accounts.keys()
    assert not lost_ids, f"accepted and gone: {lost_ids}"
    assert not seen.keys() - accounts.keys(), "the receiver got what was never committed"
    for one in accounts.values():
        assert one.status in (Status.DELIVERED, Status.DEAD), one
        assert (one.reason is None) == (one.status is Status.DELIVERED), one
        assert one.answered <= one.receipts <= one.answered + one.unanswered, one
    bodies: defaultdict[str | None, set[bytes]] = defaultdict(set)
    for request in stack.receiver.requests():
        bodies[request.delivery_id].add(request.body)
        assert request.verified, f"a signature was wrong: {request.head!r}"
    assert all(len(different) == 1 for different in bodies.values()), "a delivery's bytes changed"
    return accounts


def duplicates(accounts: dict[str, Account]) -> list[Account]:
    """Deliveries that came more than once: where no answer asks for a retry, each needs an attempt that was lost."""
    return [one for one in accounts.values() if one.receipts > 1]


def at_rest(stack: Stack, timeout: float = 20.0) -> None:
    """Wait until live workers hold nothing and the stream is empty."""
    for role in stack.live("worker"):
        wait_until(
            lambda: role.metrics()["relay_sends_in_flight"] == role.metrics()["relay_results_waiting"] == 0,  # noqa: B023
            timeout,
            f"{role.name} holds nothing",
        )
    wait_until(lambda: stack.tidy_stream() == 0, timeout, "the stream is empty")


def still_works(stack: Stack, traffic: Traffic, *, timeout: float = 20.0) -> None:
    """Deliver three times a worker's room once more: what leaked would be missed now."""
    before = time.monotonic()
    traffic.ingest(3 * 64 * max(1, len(stack.live("worker"))))
    settle(stack, timeout)
    print(f"afterwards: {time.monotonic() - before:.1f} s")
