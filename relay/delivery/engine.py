"""The send engine: one thread, one curl-multi loop, any number of requests in flight.

A thread for each send would cost more than the send. Here libcurl says which sockets it wants
watched, epoll watches them, and everything that touches libcurl happens in the loop's own thread;
other threads only hand batches over and are handed batches back.

Every request that is submitted comes back exactly once, through `on_done` or from `stop()`,
whatever fails on the way.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import certifi
import pycurl

from relay.core.errors import InvalidInput, Unavailable
from relay.core.observation import Fault, Observation
from relay.delivery.request import Completed, Limits, SendRequest
from relay.delivery.transfer import Transfer, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.delivery.guard import Policy

__all__ = ["Completed", "Engine", "SendRequest"]

log = logging.getLogger(__name__)

#: Connections that are kept for a next request. 512 idle ones of TLS hold about 40 MB.
KEPT_CONNECTIONS = 512
#: Handles that are kept for a next request.
KEPT_HANDLES = 1024
#: Requests started in one turn, so that a large batch does not hold up replies (about 10 µs each).
STARTS_PER_TURN = 64
#: Events taken in one turn.
EVENTS_PER_TURN = 256
#: Seconds between two looks for silent transfers, at the least.
SWEEP_SECS = 0.02
#: Seconds past its end after which a transfer that libcurl has not ended is ended here.
OVERDUE_SECS = 1.0
#: Seconds that the loop rests after a turn that raised, so that a lasting fault does not spin.
REST_SECS = 0.05
#: Seconds that stop() waits, beyond its deadline, for the thread to end: look-ups may hold it.
JOIN_SECS = 5.0

_NEVER = math.inf

#: libcurl's wishes as epoll's bits.
_WATCH = {
    pycurl.POLL_NONE: 0,
    pycurl.POLL_IN: select.EPOLLIN,
    pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}


class Engine:
    """Sends requests and reports what it saw. One for each process, made after any fork.

    `policy` judges each address at the moment of connecting and must be quick: it runs in the loop.
    `on_done` runs in the loop, too, with what ended in one turn; it should only pass the list on.
    There is no bound on what is in flight: the caller keeps it.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        max_response_bytes: int,
        snippet_bytes: int,
        on_done: Callable[[list[Completed]], None],
        name: str = "relay-engine",
        ca_file: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self._policy = policy
        self._limits = Limits(
            max_response_bytes=max_response_bytes,
            snippet_bytes=snippet_bytes,
            ca_file=ca_file or certifi.where(),
            proxy=proxy or "",
        )
        self._on_done = on_done
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        #: Batches handed over; a deque's ends are safe between threads.
        self._inbox: collections.deque[Sequence[SendRequest]] = collections.deque()
        self._submitted = 0
        self._returned = 0
        self._closed = False
        self._woken = False
        self._stop_at = _NEVER
        self._stopping = False
        self._ended = threading.Event()
        self._unsent: list[SendRequest] = []
        # From here on the loop's own.
        self._waiting: collections.deque[SendRequest] = collections.deque()
        self._active: set[Transfer] = set()
        self._free: list[Transfer] = []
        self._done: list[Completed] = []
        #: Descriptor -> bits that it is registered for, 0 where libcurl has no interest just now.
        self._watched: dict[int, int] = {}
        #: Descriptor -> when it last had input.
        self._heard: dict[int, float] = {}
        self._timer_at = _NEVER
        self._sweep_at = _NEVER
        #: More events were ready than one turn takes.
        self._behind = False

    @property
    def in_flight(self) -> int:
        """Requests that were handed over and have not come back."""
        return self._submitted - self._returned

    def start(self) -> None:
        """Start the loop's thread. Raises OSError where there are no descriptors left."""
        self._multi = self._make_multi()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread.start()

    def submit(self, batch: Sequence[SendRequest]) -> None:
        """Hand a batch over; safe from any thread. Raises Unavailable once the engine stops: nothing was taken."""
        with self._lock:
            if self._closed:
                raise Unavailable("The send engine has stopped.")
            self._submitted += len(batch)
            self._inbox.append(batch)
            self._wake()

    def stop(self, deadline: float) -> list[SendRequest]:
        """Finish what is in flight until `deadline` (`time.monotonic()`), break off the rest, end the thread.

        Returns the requests that were not started; all others have come back through `on_done` by then,
        the broken-off ones as `abandoned`. A second call returns nothing.
        """
        with self._lock:
            self._closed = True
            if not self._thread.ident:
                self._return_waiting()
                self._ended.set()
            elif not self._ended.is_set():
                self._stop_at, self._stopping = deadline, True
                self._wake()
        self._ended.wait(max(0.0, deadline - time.monotonic()) + JOIN_SECS)
        if self._thread.ident:
            self._thread.join(JOIN_SECS)
        with self._lock:
            unsent, self._unsent = self._unsent, []
        return unsent

    # The loop's thread.

    def _run(self) -> None:
        # Each by itself: a fault in one must not keep the others from bringing requests home.
        steps = (self._act, self._start_some, self._reap, self._sweep, self._report)
        try:
            while not (self._stopping and self._wind_down()):
                for step in steps:
                    try:
                        step()
                    except Exception:  # loop boundary: one bad turn must not end all the others
                        log.exception("a turn of the send engine failed", extra={"action": "engine.turn_failed"})
                        time.sleep(REST_SECS)
                        # What it left undone may have no further event: make the next turn come at once.
                        self._timer_at = 0.0
        finally:
            self._shut()

    def _act(self) -> None:
        """Wait for something to happen, and let libcurl act on it."""
        wait = 0.0 if self._waiting else min(self._timer_at, self._sweep_at, self._stop_at) - time.monotonic()
        events = self._epoll.poll(None if wait == _NEVER else max(0.0, wait), EVENTS_PER_TURN)
        self._behind = len(events) == EVENTS_PER_TURN
        now = time.monotonic()
        for descriptor, bits in events:
            self._on_event(descriptor, bits, now)
        if self._timer_at <= now:
            self._on_timer()

    def _on_event(self, descriptor: int, bits: int, now: float) -> None:
        if descriptor == self._wakeup:
            # In this order: a batch handed over after the flag falls rings again.
            os.eventfd_read(self._wakeup)
            self._woken = False
            return
        if not self._watched.get(descriptor):
            # A kept connection that nobody uses: its end, as a rule. libcurl looks when it wants it again.
            self._forget(descriptor)
            return
        action = 0
        if bits & ~select.EPOLLOUT:
            self._heard[descriptor] = now
            action = pycurl.CSELECT_IN
        if bits & ~select.EPOLLIN:
            action |= pycurl.CSELECT_OUT
        if bits & select.EPOLLERR:
            action |= pycurl.CSELECT_ERR
        self._multi.socket_action(descriptor, action)

    def _on_timer(self) -> None:
        self._timer_at = _NEVER
        self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        if self._timer_at == _NEVER and self._active:
            # libcurl names a time again only if it has changed: ask.
            self._set_timer(self._multi.timeout())

    def _start_some(self) -> None:
        """Start what was handed over, a part of it if that is much."""
        if not self._inbox and not self._waiting:
            return
        while self._inbox:
            self._waiting.extend(self._inbox.popleft())
        now = time.monotonic()
        for _ in range(min(len(self._waiting), STARTS_PER_TURN)):
            request = self._waiting.popleft()
            if now > request.start_by:
                self._done.append(Completed(request=request, observation=None, not_sent=True, started_at=now))
            else:
                self._start(request, now)
        if self._timer_at <= now:
            self._on_timer()

    def _start(self, request: SendRequest, now: float) -> None:
        transfer = None
        try:
            transfer = self._free.pop() if self._free else Transfer(self._limits, self._policy)
            transfer.begin(request, now)
            self._multi.add_handle(transfer.curl)
        except Exception as error:  # noqa: BLE001  boundary of one transfer: it ends, the others live
            self._fail_start(request, error, now)
            if transfer is not None:
                transfer.close()
            return
        self._active.add(transfer)
        self._sweep_at = min(self._sweep_at, now + transfer.idle, transfer.ends_at + OVERDUE_SECS)

    def _fail_start(self, request: SendRequest, error: Exception, now: float) -> None:
        if isinstance(error, InvalidInput):
            observation = Observation(fault=Fault.UNBUILDABLE, text=str(error))
        else:
            log.error("a request could not be started", exc_info=error, extra={"action": "engine.start_failed"})
            observation = Observation(fault=Fault.INTERNAL, text=clean(str(error), request.url))
        self._done.append(Completed(request=request, observation=observation, started_at=now))

    def _reap(self) -> None:
        queued = 1
        while queued:
            queued, succeeded, failed = self._multi.info_read(EVENTS_PER_TURN)
            for curl in succeeded:
                self._end(curl.transfer, 0, "")
            for curl, code, text in failed:
                self._end(curl.transfer, code, text)

    def _end(self, transfer: Transfer, code: int, text: str) -> None:
        """Take a transfer that libcurl has ended out of the loop, or send it once more."""
        try:
            self._multi.remove_handle(transfer.curl)
            observation = transfer.finish(code, text)
            if observation is None:
                if transfer.begin_again(time.monotonic()):
                    self._multi.add_handle(transfer.curl)
                    return
                observation = transfer.cut(Fault.TIMEOUT, "no time left to resend", time.monotonic())
        except Exception:  # boundary of one transfer: it ends, the others live
            log.exception("a transfer could not be judged", extra={"action": "engine.finish_failed"})
            self._drop(transfer, Observation(fault=Fault.INTERNAL, text="the result could not be read"))
            return
        self._give_back(transfer, Completed(request=transfer.request, observation=observation))

    def _sweep(self) -> None:
        """Cut transfers whose reply fell silent, and such as libcurl should have ended long ago."""
        now = time.monotonic()
        if self._sweep_at > now or self._behind:
            # Replies that wait to be read are not silent: after a stall there may be many.
            return
        next_at = _NEVER
        for transfer in list(self._active):
            descriptor = transfer.curl.getinfo(pycurl.ACTIVESOCKET)
            heard_at = transfer.heard_at(self._heard.get(descriptor, 0.0))
            # A reply that has not begun may do so at once, and is silent for its idle time from then on.
            silent_at = (now if heard_at is None else heard_at) + transfer.idle
            overdue_at = transfer.ends_at + OVERDUE_SECS
            if silent_at <= now:
                self._cut(transfer, f"the reply fell silent for {round(transfer.idle * 1000)} ms", now)
            elif overdue_at <= now:
                self._cut(transfer, "timed out", now)
            else:
                next_at = min(next_at, silent_at, overdue_at)
        self._sweep_at = max(next_at, now + SWEEP_SECS)

    def _cut(self, transfer: Transfer, text: str, now: float) -> None:
        self._multi.remove_handle(transfer.curl)
        observation = transfer.cut(Fault.TIMEOUT, text, now)
        self._give_back(transfer, Completed(request=transfer.request, observation=observation))

    def _give_back(self, transfer: Transfer, completed: Completed) -> None:
        completed.started_at = transfer.started_at
        self._done.append(completed)
        self._active.discard(transfer)
        transfer.release()
        if len(self._free) < KEPT_HANDLES:
            self._free.append(transfer)
        else:
            transfer.close()

    def _drop(self, transfer: Transfer, observation: Observation) -> None:
        """End a transfer whose handle is in doubt: it is not used again."""
        self._done.append(Completed(request=transfer.request, observation=observation, started_at=transfer.started_at))
        self._active.discard(transfer)
        with contextlib.suppress(pycurl.error):
            transfer.close()

    def _report(self) -> None:
        """Hand over what ended in this turn."""
        if not self._done:
            return
        batch, self._done = self._done, []
        self._returned += len(batch)
        try:
            self._on_done(batch)
        except Exception:  # callback boundary: the loop outlives its listener
            log.exception(
                "the listener for finished requests failed",
                extra={"action": "engine.listener_failed", "count": len(batch)},
            )

    # What libcurl calls to have its sockets and its timer watched. A raise here would break its loop.

    def _make_multi(self) -> pycurl.CurlMulti:
        multi = pycurl.CurlMulti()
        multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        multi.setopt(pycurl.M_MAXCONNECTS, KEPT_CONNECTIONS)
        return multi

    def _on_socket(self, wish: int, descriptor: int, _multi: object, _data: object) -> None:
        """Watch a socket as libcurl wishes.

        A registration outlives the wish's end, because a kept connection is wanted again soon. The number
        may then stand for another socket: `modify` fails for one that epoll does not know, closed ones it forgets.
        """
        if wish == pycurl.POLL_REMOVE:
            if descriptor in self._watched:
                self._watched[descriptor] = 0
            return
        bits = _WATCH[wish]
        try:
            if descriptor in self._watched:
                try:
                    self._epoll.modify(descriptor, bits)
                except FileNotFoundError:
                    self._epoll.register(descriptor, bits)
            else:
                self._epoll.register(descriptor, bits)
            self._watched[descriptor] = bits
        except OSError:
            log.exception("a socket cannot be watched", extra={"action": "engine.watch_failed"})

    def _forget(self, descriptor: int) -> None:
        self._watched.pop(descriptor, None)
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(descriptor)

    def _set_timer(self, wait_ms: int) -> None:
        if wait_ms > 0:
            self._timer_at = time.monotonic() + wait_ms / 1000
        else:
            self._timer_at = 0.0 if wait_ms == 0 else _NEVER

    def _wake(self) -> None:
        if not self._woken and self._thread.ident:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    # The end.

    def _wind_down(self) -> bool:
        """Whether the loop may end: nothing is in flight, or the deadline has passed."""
        self._return_waiting()
        return not self._active or time.monotonic() >= self._stop_at

    def _return_waiting(self) -> None:
        while self._inbox:
            self._waiting.extend(self._inbox.popleft())
        self._unsent.extend(self._waiting)
        self._returned += len(self._waiting)
        self._waiting.clear()

    def _shut(self) -> None:
        """Break off what is in flight, report it, and free everything."""
        with self._lock:
            self._closed = True
            self._return_waiting()
        now = time.monotonic()
        for transfer in list(self._active):
            self._abandon(transfer, now)
        self._report()
        with self._lock:
            self._ended.set()
            os.close(self._wakeup)
        for transfer in self._free:
            transfer.close()
        # After the report: look-ups that hang hold it for seconds. It still has its sockets watched.
        self._multi.close()
        self._epoll.close()

    def _abandon(self, transfer: Transfer, now: float) -> None:
        try:
            self._multi.remove_handle(transfer.curl)
            completed = Completed(request=transfer.request, observation=None, not_sent=True)
            if transfer.sends:
                completed.observation = transfer.cut(Fault.INTERNAL, "stopped before the answer came", now)
                completed.not_sent = False
                completed.abandoned = not completed.observation.complete
        except Exception:  # boundary of one transfer: the others are reported all the same
            log.exception("a transfer could not be broken off", extra={"action": "engine.abandon_failed"})
            self._drop(transfer, Observation(fault=Fault.INTERNAL, text="the result could not be read"))
            return
        self._give_back(transfer, completed)
