"""Remembers every request the receiver got: the one witness of what was really sent."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relay.testkit.request import Request, header_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.testkit.script import Answer

DEFAULT_KEPT = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as it came, and the answer chosen for it.

    `at` (Unix seconds) and `monotonic` (seconds) are the moment the receiver had read all of it that
    it meant to read; `complete` is false where it answered before the whole body. `head` is exact on
    the wire; `body` is the body without its framing, empty if bodies are not kept. `status` is the
    final status of the answer, None where there is none, and `answer` names it; neither says that the
    client got it. `verified` is None where no secret was set.
    """

    number: int
    connection: int
    nth: int
    at: float
    monotonic: float
    method: str
    target: str
    path: str
    query: str
    head: bytes
    body: bytes
    length: int
    sha256: str | None
    complete: bool
    delivery_id: str | None
    status: int | None
    answer: str
    verified: bool | None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Header pairs in the order and case of the wire."""
        return header_pairs(self.head)

    def header(self, name: str) -> str | None:
        """The first value of a header, whatever the case of its name."""
        return next((value for given, value in self.headers if given.lower() == name.lower()), None)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values; `body` is None where it is not UTF-8, `body_base64` always holds it."""
        try:
            text: str | None = self.body.decode()
        except UnicodeDecodeError:
            text = None
        return {
            "number": self.number,
            "connection": self.connection,
            "nth": self.nth,
            "at": self.at,
            "method": self.method,
            "target": self.target,
            "path": self.path,
            "query": self.query,
            "headers": self.headers,
            "body": text,
            "body_base64": base64.b64encode(self.body).decode(),
            "length": self.length,
            "sha256": self.sha256 or hashlib.sha256(self.body).hexdigest(),
            "complete": self.complete,
            "delivery_id": self.delivery_id,
            "status": self.status,
            "answer": self.answer,
            "verified": self.verified,
        }


class Record:
    """The last `keep` requests, and counts of all since the start or the last `clear()`.

    Counts by one of delivery id or path outlive the requests that fell out; any other combination
    of filters looks at the kept requests alone. A path also stands for what is below it: `/ok` finds
    `/ok/17`. Safe to read from any thread.
    """

    def __init__(self, *, keep: int = DEFAULT_KEPT, keep_bodies: bool = True) -> None:
        self._kept: deque[Received] = deque(maxlen=keep)
        self._keep_bodies = keep_bodies
        self._changed = threading.Condition()
        self._waiters = 0
        self._total = 0
        self._by_id: Counter[str] = Counter()
        self._by_path: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._most_in_flight: dict[str, int] = {}
        self._cut = 0

    def add(self, request: Request, answer: Answer, *, verified: bool | None) -> Received:
        """Note a request that is about to be answered; it is in flight until `finished`."""
        head, body = request.head, request.body
        with self._changed:
            self._total += 1
            received = Received(
                number=self._total,
                connection=request.connection,
                nth=request.nth,
                at=time.time(),
                monotonic=time.monotonic(),
                method=head.method,
                target=head.target,
                path=head.path,
                query=head.query,
                head=head.raw,
                body=body if self._keep_bodies else b"",
                length=len(body),
                sha256=None if self._keep_bodies else hashlib.sha256(body).hexdigest(),
                complete=request.complete,
                delivery_id=head.delivery_id,
                status=answer.status,
                answer=answer.name,
                verified=verified,
            )
            self._kept.append(received)
            self._by_path[head.path] += 1
            self._answers[answer.name] += 1
            if head.delivery_id is not None:
                self._by_id[head.delivery_id] += 1
            self._in_flight[head.path] += 1
            if self._in_flight[head.path] > self._most_in_flight.get(head.path, 0):
                self._most_in_flight[head.path] = self._in_flight[head.path]
            if self._waiters:
                self._changed.notify_all()
        return received

    def finished(self, path: str, *, cut: bool) -> None:
        """A noted request is over; `cut` if the client left first, or the receiver was stopped."""
        with self._changed:
            self._in_flight[path] -= 1
            if not self._in_flight[path]:
                del self._in_flight[path]
            self._cut += cut

    def requests(
        self, delivery_id: str | None = None, path: str | None = None, status: int | None = None
    ) -> list[Received]:
        """The kept requests that fit all filters, oldest first."""
        with self._changed:
            kept = list(self._kept)
        return list(_matching(kept, delivery_id, path, status))

    def count(self, delivery_id: str | None = None, path: str | None = None, status: int | None = None) -> int:
        """How many requests fit all filters."""
        with self._changed:
            return self._count(delivery_id, path, status)

    def wait_for(
        self,
        n: int,
        timeout: float,
        delivery_id: str | None = None,
        path: str | None = None,
        status: int | None = None,
    ) -> list[Received]:
        """Block until at least `n` requests fit the filters and return them; raises TimeoutError after `timeout` s."""
        with self._changed:
            self._waiters += 1
            try:
                if not self._changed.wait_for(lambda: self._count(delivery_id, path, status) >= n, timeout):
                    seen = self._count(delivery_id, path, status)
                    raise TimeoutError(f"{seen} of {n} requests came within {timeout:g} s")
            finally:
                self._waiters -= 1
        return self.requests(delivery_id, path, status)

    def ids(self) -> dict[str, int]:
        """Every delivery id seen and how often it came."""
        with self._changed:
            return dict(self._by_id)

    def most_in_flight(self, path: str) -> int:
        """The largest number of requests to exactly this path that were being answered at one time."""
        with self._changed:
            return self._most_in_flight.get(path, 0)

    def stats(self) -> dict[str, Any]:
        """Counts for `GET /_stats`."""
        with self._changed:
            return {
                "requests": self._total,
                "kept": len(self._kept),
                "delivery_ids": len(self._by_id),
                "answers": dict(self._answers),
                "paths": dict(self._by_path),
                "in_flight": dict(self._in_flight),
                "max_concurrent": dict(self._most_in_flight),
                "cut": self._cut,
            }

    def clear(self) -> None:
        """Forget all requests and counts; what is in flight stays so."""
        with self._changed:
            self._kept.clear()
            self._total = self._cut = 0
            for counter in (self._by_id, self._by_path, self._answers):
                counter.clear()
            self._most_in_flight = dict(self._in_flight)

    def _count(self, delivery_id: str | None, path: str | None, status: int | None) -> int:
        if status is None and path is None:
            return self._total if delivery_id is None else self._by_id.get(delivery_id, 0)
        if status is None and delivery_id is None and path is not None:
            return sum(count for given, count in self._by_path.items() if _is_at(given, path))
        return sum(1 for _ in _matching(self._kept, delivery_id, path, status))


def _matching(
    kept: list[Received] | deque[Received], delivery_id: str | None, path: str | None, status: int | None
) -> Iterator[Received]:
    for one in kept:
        if delivery_id is not None and one.delivery_id != delivery_id:
            continue
        if status is not None and one.status != status:
            continue
        if path is None or _is_at(one.path, path):
            yield one


def _is_at(given: str, path: str) -> bool:
    return given == path or given.startswith(path + "/")
