"""Names to vetted addresses, in front of libcurl (B-85).

libcurl's own resolver has twenty threads, so that ten names that hang stop all the others, and it says the same of a
name that does not exist and of a name server that does not answer. Here c-ares asks, without a thread for each name;
answers are vetted before anything is dialled, and kept for a while.
"""

from __future__ import annotations

import collections
import logging
import math
from typing import TYPE_CHECKING, Any

import pycares

from relay.core.observation import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.delivery.guard import Policy

log = logging.getLogger(__name__)

#: What a refusal says, whatever the address was: the text must not map the inside of a network.
REFUSED_TEXT = "refused by the address policy"

#: Seconds that an answer is good for at the most and the least, whatever its TTL says.
KEPT_SECS = 20.0
LEAST_SECS = 1.0
#: The same for "no such name", and for a failure, which may be over at once.
ABSENT_SECS = 5.0
FAILED_SECS = 1.0
#: Of an answer's life the part after which its use has the name asked again, so that few requests wait for a name.
AHEAD = 0.75
#: c-ares keeps answers by their TTL, too, and cannot be told not to: what it has is dropped so many seconds on.
CHANNEL_SECS = 10.0
#: Seconds that a name server has for the first try, and tries; each waits twice as long as the one before.
TRY_SECS = 1.0
TRIES = 4
#: Names kept. Those that are over go first.
KEPT_NAMES = 20_000
#: Addresses of a name that are kept: each may cost a connect within the one attempt.
MAX_ADDRESSES = 8

#: The name does not exist, has no address, or cannot be one. All other failures may be the name server's.
_ABSENT = frozenset(
    {pycares.errno.ARES_ENOTFOUND, pycares.errno.ARES_ENODATA, pycares.errno.ARES_ENONAME, pycares.errno.ARES_EBADNAME}
)


class Route:
    """Vetted addresses in the order to dial, or the fault that a request comes to without any."""

    __slots__ = ("addresses", "fault", "pins", "text")

    def __init__(
        self, addresses: tuple[str, ...], fault: Fault | None, text: str, *, pins: list[str] | None = None
    ) -> None:
        self.addresses = addresses
        self.fault = fault
        self.text = text
        #: RESOLVE entries that libcurl has to be given, if any.
        self.pins = pins


class Answer(Route):
    """What a name came to, for a while."""

    __slots__ = ("again_at", "ends_at", "pinned", "reached")

    def __init__(self, addresses: tuple[str, ...], fault: Fault | None, text: str, *, life: float, now: float) -> None:
        super().__init__(addresses, fault, text)
        #: `time.monotonic()` until which it is good, and after which it is time to ask again.
        self.ends_at = now + life
        self.again_at = now + life * AHEAD
        #: Ports for which libcurl was given the addresses, and how often it wanted them again since.
        self.pinned: dict[int, int] = {}
        #: The address that the egress proxy last got through to, where it was not the first.
        self.reached: str | None = None


class Resolver:
    """Looks names up, once at a time each, and keeps the answers. All calls but the wake-up are its owner's thread's.

    `wake` is called from another thread when an answer waits for `collect`; it must not raise. `servers` are name
    servers, as `address:port`, in place of those in /etc/resolv.conf. The hosts file counts; search domains do not.
    """

    def __init__(self, *, policy: Policy, wake: Callable[[], None], servers: Sequence[str] | None = None) -> None:
        self._policy = policy
        self._wake = wake
        self._servers = servers
        self._kept: dict[str, Answer] = {}
        self._flights: set[str] = set()
        #: (name, c-ares' result, its error number): a deque's ends are safe between threads.
        self._arrived: collections.deque[tuple[str, Any, int | None]] = collections.deque()
        self._channel: pycares.Channel | None = None
        #: The channel before, until its last look-ups are over.
        self._former: pycares.Channel | None = None
        self._channel_ends_at = -math.inf

    def find(self, name: str, now: float) -> Answer | None:
        """Return the answer for a name (lower-case ASCII), or None: it is being looked up and comes with `collect`."""
        answer = self._kept.get(name)
        if answer is not None and now < answer.ends_at:
            if now >= answer.again_at and name not in self._flights:
                self._ask(name, now)
            return answer
        if name not in self._flights:
            self._ask(name, now)
        return None

    def kept(self, name: str) -> Answer | None:
        """Return the last answer for a name, whether it is still good or not."""
        return self._kept.get(name)

    def collect(self, now: float) -> list[str]:
        """Take in the answers that came, and return their names. `find` has them now."""
        names = []
        while self._arrived:
            name, result, error = self._arrived.popleft()
            self._flights.discard(name)
            answer = self._judge(result, error, now)
            former = self._kept.get(name)
            if former is not None and answer.fault is Fault.DNS_TEMPORARY and now < former.ends_at:
                # Asked ahead of its end, in vain: it is good until then, and asked for again before.
                former.again_at = now + FAILED_SECS
            else:
                self._keep(name, answer, now)
            names.append(name)
        return names

    def close(self) -> None:
        """Give up what is being looked up. c-ares ends in a thread of its own; nothing here waits for it."""
        for channel in (self._channel, self._former):
            if channel is not None:
                channel.close()
        self._channel = self._former = None

    def _ask(self, name: str, now: float) -> None:
        self._flights.add(name)

        def on_result(result: Any, error: int | None) -> None:
            self._arrived.append((name, result, error or None))
            self._wake()

        try:
            # Absolute, so that nothing is appended to it; one socket type, or each address comes three times.
            self._open_channel(now).getaddrinfo(name, None, type=1, callback=on_result)
        except (pycares.AresError, RuntimeError, ValueError, OSError) as error:
            log.warning("a name could not be asked for", extra={"action": "resolver.failed", "error": str(error)})
            on_result(None, pycares.errno.ARES_ESERVFAIL)

    def _open_channel(self, now: float) -> pycares.Channel:
        if self._channel is None or now >= self._channel_ends_at:
            # By now the one before the former has no look-up left that anybody waits for.
            if self._former is not None:
                self._former.close()
            self._former = self._channel
            self._channel = pycares.Channel(
                flags=pycares.ARES_FLAG_NOSEARCH, servers=self._servers, timeout=TRY_SECS, tries=TRIES
            )
            self._channel_ends_at = now + CHANNEL_SECS
        return self._channel

    def _judge(self, result: Any, error: int | None, now: float) -> Answer:
        if error is not None:
            text = str(pycares.errno.strerror(error))
            if error in _ABSENT:
                return Answer((), Fault.DNS, f"no address for the name: {text}", life=ABSENT_SECS, now=now)
            return Answer((), Fault.DNS_TEMPORARY, f"the name was not resolved: {text}", life=FAILED_SECS, now=now)
        life = min([KEPT_SECS, *(float(node.ttl) for node in result.nodes)])
        life = max(LEAST_SECS, life)
        found = [node.addr[0].decode("ascii") for node in result.nodes]
        if not found:
            return Answer((), Fault.DNS, "no address for the name", life=ABSENT_SECS, now=now)
        return vet(found, self._policy, life=life, now=now)

    def _keep(self, name: str, answer: Answer, now: float) -> None:
        former = self._kept.pop(name, None)
        if former is not None:
            answer.reached = former.reached
        self._kept[name] = answer
        if len(self._kept) > KEPT_NAMES:
            for kept, old in list(self._kept.items()):
                if now >= old.ends_at:
                    del self._kept[kept]
            while len(self._kept) > KEPT_NAMES:
                del self._kept[next(iter(self._kept))]


def vet(addresses: Iterable[str], policy: Policy, *, life: float, now: float) -> Answer:
    """Keep the addresses that may be dialled, both families in turn; where none may, the answer is a refusal."""
    good = [address for address in addresses if policy(address) is None]
    if not good:
        return Answer((), Fault.REFUSED, REFUSED_TEXT, life=life, now=now)
    return Answer(_interleave(good)[:MAX_ADDRESSES], None, "", life=life, now=now)


def _interleave(addresses: Sequence[str]) -> tuple[str, ...]:
    """Put IPv6 and IPv4 in turn, each in its own order: neither family's dead addresses spend the other's room."""
    six = [address for address in dict.fromkeys(addresses) if ":" in address]
    four = [address for address in dict.fromkeys(addresses) if ":" not in address]
    longest = max(len(six), len(four))
    turns = (pair for place in range(longest) for pair in (six[place : place + 1], four[place : place + 1]))
    return tuple(address for turn in turns for address in turn)
