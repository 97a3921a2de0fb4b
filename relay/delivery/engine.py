"""The send engine: one thread, one curl-multi loop, any number of requests in flight.

A thread for each send would cost more than the send. Here libcurl says which sockets it wants
watched, epoll watches them, and everything that touches libcurl happens in the loop's own thread;
other threads only hand batches over and are handed batches back.

Every request that is submitted comes back exactly once, through `on_done` or from `stop()`,
whatever fails on the way.

What runs for every request is written out where a call or two could have been saved: the loop is
half of a busy worker's work.
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
from relay.core.url import POLICY_CODES
from relay.delivery.lookups import Lookups
from relay.delivery.request import Completed, Limits, SendRequest
from relay.delivery.resolver import REFUSED_TEXT
from relay.delivery.route import Router
from relay.delivery.target import ANY_URL, Proxy, target_finder
from relay.delivery.transfer import Transfer
from relay.delivery.verdict import clean
from relay.delivery.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.core.url import UrlPolicy
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
#: Seconds after which a transfer that goes on is looked at, and again.
LOOK_SECS = 0.25
#: Seconds past its end after which a transfer that libcurl has not ended is ended here.
OVERDUE_SECS = 1.0
#: Seconds that the loop rests after a turn that raised, so that a lasting fault does not spin.
REST_SECS = 0.05
#: Seconds that stop() waits, beyond its deadline, for the thread to end.
JOIN_SECS = 5.0

_NEVER = math.inf

# Bound once: they are looked up for every transfer.
_EPOLLIN, _CSELECT_IN = select.EPOLLIN, pycurl.CSELECT_IN
_SOCKET_TIMEOUT = pycurl.SOCKET_TIMEOUT
_monotonic = time.monotonic


class Engine:
    """Sends requests and reports what it saw. One for each process, made after any fork.

    `policy` judges each address when its name was looked up and at the moment of connecting, `url_policy` scheme, port
    and name. They must be quick: they run in the loop. `on_done` runs in the loop, too, with what ended in one turn; it
    should only pass the list on. `proxy` is the egress proxy's URL. `name_servers`, as `address:port`, stand in for
    those of /etc/resolv.conf.
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
        name_servers: Sequence[str] | None = None,
        url_policy: UrlPolicy = ANY_URL,
    ) -> None:
        self._policy = policy
        self._limits = Limits(
            max_response_bytes=max_response_bytes,
            snippet_bytes=snippet_bytes,
            ca_file=ca_file or certifi.where(),
            proxy=Proxy(proxy) if proxy else None,
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
        self._router = Router(policy=policy, proxy=self._limits.proxy, wake=self._on_answer, name_servers=name_servers)
        self._find_target = target_finder(url_policy)
        self._lookups = Lookups()
        self._waiting: collections.deque[SendRequest] = collections.deque()
        self._active: set[Transfer] = set()
        self._free: list[Transfer] = []
        self._done: list[Completed] = []
        self._sweep_at = _NEVER
        #: More events were ready than one turn takes.
        self._behind = False
        #: The next turn must come at once.
        self._hurry = False
        #: When the turn under way began, or when the next must, at the latest.
        self._turn_at = _NEVER

    @property
    def in_flight(self) -> int:
        """Requests that were handed over and have not come back."""
        return self._submitted - self._returned

    @property
    def overdue_secs(self) -> float:
        """Seconds that the loop's turn takes so far, or is late; 0.0 while it waits as it may."""
        return max(0.0, _monotonic() - self._turn_at)

    def start(self) -> None:
        """Start the loop's thread. Raises OSError where there are no descriptors left."""
        self._watch = Watch()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch.on_socket)
        self._multi.setopt(pycurl.M_MAXCONNECTS, KEPT_CONNECTIONS)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch.epoll.register(self._wakeup, select.EPOLLIN)
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

        Returns the requests that were not started, those that waited for a name among them; all others have come back
        through `on_done` by then, the broken-off ones as `abandoned`. A second call returns nothing.
        """
        with self._lock:
            self._closed = True
            if not self._thread.ident:
                self._return_waiting()
                self._ended.set()
            elif not self._ended.is_set():
                self._stop_at, self._stopping = deadline, True
                self._wake()
        self._ended.wait(max(0.0, deadline - _monotonic()) + JOIN_SECS)
        if self._thread.ident:
            self._thread.join(JOIN_SECS)
        with self._lock:
            unsent, self._unsent = self._unsent, []
        return unsent

    # The loop's thread.

    def _run(self) -> None:
        # Each by itself: a fault in one must not keep the others from bringing requests home.
        steps = (self._act, self._look_up, self._start_some, self._reap, self._sweep, self._report)
        try:
            while not (self._stopping and self._wind_down()):
                for step in steps:
                    try:
                        step()
                    except Exception:  # loop boundary: one bad turn must not end all the others
                        log.exception("a turn of the send engine failed", extra={"action": "engine.turn_failed"})
                        time.sleep(REST_SECS)
                        # What it left undone may have no further event: make the next turn come at once.
                        self._hurry = True
        finally:
            self._shut()

    def _act(self) -> None:
        """Wait for something to happen, and let libcurl act on it."""
        multi = self._multi
        if self._hurry or self._waiting:
            self._hurry = False
            wait = 0.0
        else:
            # Asked once a turn: to be told of every change of its timer costs more than all of this.
            wait_ms = multi.timeout()
            now = _monotonic()
            wait = max(0.0, min(self._sweep_at, self._stop_at, self._lookups.next_end) - now)
            if 0 <= wait_ms < wait * 1000:
                wait = wait_ms / 1000
            self._turn_at = now + wait
        events = self._watch.epoll.poll(None if wait == _NEVER else wait, EVENTS_PER_TURN)
        self._behind = len(events) == EVENTS_PER_TURN
        self._turn_at = now = _monotonic()
        watched, heard, socket_action = self._watch.watched, self._watch.heard, multi.socket_action
        for descriptor, bits in events:
            if bits == _EPOLLIN and watched.get(descriptor, 0) > 0:
                heard[descriptor] = now
                socket_action(descriptor, _CSELECT_IN)
            else:
                self._on_event(descriptor, bits, now)
        if multi.timeout() == 0:
            socket_action(_SOCKET_TIMEOUT, 0)

    def _on_event(self, descriptor: int, bits: int, now: float) -> None:
        """Act on an event that is not just input on a socket in use."""
        if descriptor == self._wakeup:
            # In this order: a batch handed over after the flag falls rings again.
            os.eventfd_read(self._wakeup)
            self._woken = False
            return
        if self._watch.watched.get(descriptor, 0) <= 0:
            # A kept connection that nobody uses: its end, as a rule. libcurl looks when it wants it again.
            self._watch.forget(descriptor)
            return
        action = 0
        if bits & ~select.EPOLLOUT:
            self._watch.heard[descriptor] = now
            action = pycurl.CSELECT_IN
        if bits & ~select.EPOLLIN:
            action |= pycurl.CSELECT_OUT
        if bits & select.EPOLLERR:
            action |= pycurl.CSELECT_ERR
        self._multi.socket_action(descriptor, action)

    def _look_up(self) -> None:
        """Go on with requests whose name is known by now, and end those that have waited for too long."""
        lookups = self._lookups
        now = _monotonic()
        for name in self._router.collect(now):
            for waiting in lookups.arrived(name):
                self._start(waiting.request, now, since=waiting.since)
                self._hurry = True
        if lookups.next_end <= now:
            for waiting in lookups.late(now):
                self._end_unstarted(waiting.request, Fault.DNS_TEMPORARY, "timed out resolving the name", waiting.since)

    def _start_some(self) -> None:
        """Start what was handed over, a part of it if that is much."""
        waiting = self._waiting
        if self._inbox:
            while self._inbox:
                waiting.extend(self._inbox.popleft())
        elif not waiting:
            return
        now = _monotonic()
        for _ in range(min(len(waiting), STARTS_PER_TURN)):
            request = waiting.popleft()
            if now > request.start_by:
                self._done.append(Completed(request, None, not_sent=True))
            else:
                self._start(request, now)
        self._multi.socket_action(_SOCKET_TIMEOUT, 0)
        self._router.note_pinned()

    def _start(self, request: SendRequest, now: float, since: float | None = None) -> None:
        """Start a request, or have it wait for its name; `since` is when it began to, if it did."""
        transfer = None
        try:
            target = self._find_target(request.url)
            route = self._router.find(request, target, now)
            if isinstance(route, str):
                self._lookups.add(request, route, now if since is None else since)
                return
            if route.fault is not None:
                self._end_unstarted(request, route.fault, route.text, now if since is None else since)
                return
            transfer = self._free.pop() if self._free else Transfer(self._limits, self._policy, self._watch.on_open)
            transfer.begin(request, target, now, since=since, addresses=route.addresses, pins=route.pins)
            self._multi.add_handle(transfer.curl)
        except Exception as error:  # noqa: BLE001  boundary of one transfer: it ends, the others live
            self._fail_start(request, error, now)
            if transfer is not None:
                transfer.close()
            return
        self._active.add(transfer)
        self._sweep_at = min(self._sweep_at, now + LOOK_SECS, now + request.idle_timeout_ms / 1000)

    def _fail_start(self, request: SendRequest, error: Exception, now: float) -> None:
        if isinstance(error, InvalidInput):
            # One text for whatever is refused, as for addresses; what is malformed its owner may know.
            refused = error.code in POLICY_CODES
            fault, text = (Fault.REFUSED, REFUSED_TEXT) if refused else (Fault.UNBUILDABLE, str(error))
            self._end_unstarted(request, fault, text, now)
        else:
            log.error("a request could not be started", exc_info=error, extra={"action": "engine.start_failed"})
            self._end_unstarted(request, Fault.INTERNAL, clean(str(error), request.url), now)

    def _end_unstarted(self, request: SendRequest, fault: Fault, text: str, since: float) -> None:
        took = int((_monotonic() - since) * 1_000_000)
        observation = Observation(fault=fault, text=text, dns_us=took, total_us=took)
        self._done.append(Completed(request, observation))

    def _reap(self) -> None:
        queued = 1
        while queued:
            queued, succeeded, failed = self._multi.info_read(EVENTS_PER_TURN)
            now = _monotonic()
            for curl in succeeded:
                self._end(curl.transfer, 0, "", now)
            for curl, code, text in failed:
                self._end(curl.transfer, code, text, now)

    def _end(self, transfer: Transfer, code: int, text: str, now: float) -> None:
        """Take a transfer that libcurl has ended out of the loop, or start it once more."""
        try:
            self._multi.remove_handle(transfer.curl)
            observation = transfer.finish(code, text, now)
            if observation is None:
                if transfer.begin_again(now, self._router.pins_for(transfer.target, transfer.addresses)):
                    self._multi.add_handle(transfer.curl)
                    return
                observation = transfer.cut(Fault.TIMEOUT, "no time left to resend", now)
            elif transfer.tunnelled and transfer.sends:
                self._router.note_reached(transfer.target, transfer.addresses[transfer.tunnelled])
        except Exception:  # boundary of one transfer: it ends, the others live
            log.exception("a transfer could not be judged", extra={"action": "engine.finish_failed"})
            self._drop(transfer, Observation(fault=Fault.INTERNAL, text="the result could not be read"))
            return
        self._give_back(transfer, Completed(transfer.request, observation))

    def _sweep(self) -> None:
        """Cut transfers whose reply fell silent or does not come to its end, and such as libcurl should have ended."""
        now = _monotonic()
        if self._sweep_at > now or self._behind:
            # Replies that wait to be read are not silent: after a stall there may be many.
            return
        next_at = now + LOOK_SECS if self._active else _NEVER
        for transfer in list(self._active):
            descriptor = transfer.curl.getinfo(pycurl.ACTIVESOCKET)
            heard_at = transfer.heard_at(self._watch.heard.get(descriptor, 0.0))
            idle = transfer.request.idle_timeout_ms / 1000
            # A reply that has not begun may do so at once, and is silent for its idle time from then on.
            silent_at = (now if heard_at is None else heard_at) + idle
            overdue_at = transfer.ends_at + OVERDUE_SECS
            if silent_at <= now:
                self._cut(transfer, f"the reply fell silent for {round(idle * 1000)} ms", now)
            elif overdue_at <= now:
                self._cut(transfer, "timed out", now)
            elif transfer.is_flooded(descriptor):
                self._cut(transfer, "the reply's framing is over the bound", now)
            else:
                next_at = min(next_at, silent_at, overdue_at)
        self._sweep_at = max(next_at, now + SWEEP_SECS)

    def _cut(self, transfer: Transfer, text: str, now: float) -> None:
        self._multi.remove_handle(transfer.curl)
        observation = transfer.cut(Fault.TIMEOUT, text, now)
        self._give_back(transfer, Completed(transfer.request, observation))

    def _give_back(self, transfer: Transfer, completed: Completed) -> None:
        self._done.append(completed)
        self._active.discard(transfer)
        transfer.release()
        if len(self._free) < KEPT_HANDLES:
            self._free.append(transfer)
        else:
            transfer.close()

    def _drop(self, transfer: Transfer, observation: Observation) -> None:
        """End a transfer whose handle is in doubt: it is not used again."""
        self._done.append(Completed(transfer.request, observation))
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

    # What other threads call.

    def _on_answer(self) -> None:
        """A name was looked up: have the loop take it in. Called from the resolver's thread."""
        with self._lock:
            if not self._ended.is_set():
                self._wake()

    def _wake(self) -> None:
        if not self._woken and self._thread.ident:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    # The end.

    def _wind_down(self) -> bool:
        """Whether the loop may end: nothing is in flight, or the deadline has passed."""
        self._return_waiting()
        return not self._active or _monotonic() >= self._stop_at

    def _return_waiting(self) -> None:
        while self._inbox:
            self._waiting.extend(self._inbox.popleft())
        self._waiting.extend(waiting.request for waiting in self._lookups.take_all())
        self._unsent.extend(self._waiting)
        self._returned += len(self._waiting)
        self._waiting.clear()

    def _shut(self) -> None:
        """Break off what is in flight, report it, and free everything."""
        with self._lock:
            self._closed = True
            self._return_waiting()
        now = _monotonic()
        for transfer in list(self._active):
            self._abandon(transfer, now)
        self._report()
        with self._lock:
            self._ended.set()
            os.close(self._wakeup)
        self._router.close()
        for transfer in self._free:
            transfer.close()
        # After the report. It still has its sockets watched.
        self._multi.close()
        self._watch.epoll.close()

    def _abandon(self, transfer: Transfer, now: float) -> None:
        try:
            self._multi.remove_handle(transfer.curl)
            completed = Completed(transfer.request, None, not_sent=True)
            if transfer.sends:
                completed.observation = transfer.cut(Fault.INTERNAL, "stopped before the answer came", now)
                completed.not_sent = False
                completed.abandoned = not completed.observation.complete
        except Exception:  # boundary of one transfer: the others are reported all the same
            log.exception("a transfer could not be broken off", extra={"action": "engine.abandon_failed"})
            self._drop(transfer, Observation(fault=Fault.INTERNAL, text="the result could not be read"))
            return
        self._give_back(transfer, completed)
