"""`relay.deliveries`, `relay.events`, `relay.jobs` and `relay.replays`: what became of what was sent, and once more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from relay.client.answers import Delivery, Event, Job, Replay
from relay.client.errors import WaitedTooLong
from relay.client.pages import time_text, walk
from relay.client.reading import read
from relay.client.transport import path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from relay.client.transport import Transport

#: Seconds between two looks at what is waited for: the first, and the longest that they grow to.
FIRST_LOOK_SECS: Final = 0.1
LONGEST_LOOK_SECS: Final = 2.0

T = TypeVar("T")


class Deliveries:
    """The workspace's deliveries. Every call raises ApiError or Unreachable; NotFound for an id that there is not."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, delivery_id: str) -> Delivery:
        """Read one with its attempts, the oldest first."""
        return read(Delivery, self._transport.get(path("v1", "deliveries", delivery_id)))

    def list(
        self,
        *,
        endpoint_id: str | None = None,
        status: str | None = None,
        event_type: str | None = None,
        reason: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        limit: int | None = None,
    ) -> Iterator[Delivery]:
        """Iterate over those that meet the filters, the newest first, without their attempts."""
        query = {
            "endpoint_id": endpoint_id,
            "status": status,
            "event_type": event_type,
            "reason": reason,
            "since": time_text(since),
            "until": time_text(until),
        }
        return walk(self._transport, "/v1/deliveries", Delivery, query, limit=limit)

    def replay(self, delivery_id: str, *, force: bool = False) -> Delivery:
        """Send a dead or canceled one again; with `force` a delivered one, too. Conflict where its state forbids it."""
        body = {"force": True} if force else {}
        return read(Delivery, self._transport.call("POST", path("v1", "deliveries", delivery_id, "replay"), body))

    def cancel(self, delivery_id: str) -> Delivery:
        """Call a pending one off, once or more often. Conflict where it is in flight or finished."""
        found = self._transport.call("POST", path("v1", "deliveries", delivery_id, "cancel"), repeatable=True)
        return read(Delivery, found)

    def wait(self, delivery_id: str, *, timeout: float) -> Delivery:
        """Wait until one has come to rest, and return it; WaitedTooLong after so many seconds."""
        return _settled(
            lambda: self.get(delivery_id), lambda one: one.is_settled, timeout, f"delivery {delivery_id} is under way"
        )


class Events:
    """The workspace's events."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, event_id: str) -> Event:
        """Read one with its deliveries."""
        return read(Event, self._transport.get(path("v1", "events", event_id)))

    def list(
        self,
        *,
        type: str | None = None,  # noqa: A002 - the field's name
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        limit: int | None = None,
    ) -> Iterator[Event]:
        """Iterate over those that meet the filters, the newest first, without their deliveries."""
        query = {"type": type, "since": time_text(since), "until": time_text(until)}
        return walk(self._transport, "/v1/events", Event, query, limit=limit)

    def payload(self, event_id: str) -> bytes:
        """Read one's payload: the bytes as they came."""
        return self._transport.send("GET", path("v1", "events", event_id, "payload")).content


class Jobs:
    """Single requests, as `Relay.enqueue` makes them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, job_id: str) -> Job:
        """Read one with its attempts."""
        return read(Job, self._transport.get(path("jobs", job_id)))

    def cancel(self, job_id: str) -> Job:
        """Call a waiting one off. Conflict where it is in flight or finished."""
        return read(Job, self._transport.call("DELETE", path("jobs", job_id), repeatable=True))

    def replay(self, job_id: str, *, force: bool = False) -> Job:
        """Send a dead or canceled one again; with `force` a delivered one, too."""
        body = {"force": True} if force else {}
        return read(Job, self._transport.call("POST", path("jobs", job_id, "replay"), body))

    def wait(self, job_id: str, *, timeout: float) -> Job:
        """Wait until one has come to rest, and return it; WaitedTooLong after so many seconds."""
        return _settled(lambda: self.get(job_id), lambda one: one.is_settled, timeout, f"job {job_id} is under way")


class Replays:
    """Replays by filter, as `relay.endpoints.replay` starts them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, replay_id: str) -> Replay:
        """Read how far one is."""
        return read(Replay, self._transport.get(path("v1", "replays", replay_id)))

    def list(
        self,
        *,
        endpoint_id: str | None = None,
        state: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        limit: int | None = None,
    ) -> Iterator[Replay]:
        """Iterate over those that meet the filters, the newest first."""
        query = {"endpoint_id": endpoint_id, "state": state, "since": time_text(since), "until": time_text(until)}
        return walk(self._transport, "/v1/replays", Replay, query, limit=limit)

    def cancel(self, replay_id: str) -> Replay:
        """Stop one. What it sent again stays so. Conflict where it is finished."""
        return read(Replay, self._transport.call("POST", path("v1", "replays", replay_id, "cancel"), repeatable=True))

    def wait(
        self, replay_id: str, *, timeout: float | None = None, watch: Callable[[Replay], None] | None = None
    ) -> Replay:
        """Wait until one is finished, and return it; `watch` is called with every look at it.

        Raises WaitedTooLong after `timeout` seconds; None waits for ever.
        """

        def finished(one: Replay) -> bool:
            if watch is not None:
                watch(one)
            return one.is_finished

        return _settled(lambda: self.get(replay_id), finished, timeout, f"replay {replay_id} is under way")


def _settled(look: Callable[[], T], done: Callable[[T], bool], timeout: float | None, said: str) -> T:
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_LOOK_SECS
    while not done(found := look()):
        if deadline is not None and time.monotonic() + pause > deadline:
            raise WaitedTooLong(f"{said} after {timeout:g} s: it goes on, look again later")
        time.sleep(pause)
        pause = min(LONGEST_LOOK_SECS, pause * 1.5)
    return found
