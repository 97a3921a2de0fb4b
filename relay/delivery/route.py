"""What a request needs to know of addresses before libcurl may start it: vetted ones, and who tells libcurl of them.

libcurl is never left to look a name up. It keeps one table of addresses for all handles, takes an entry in with the
transfer that brings it, and forgets it soon. Only a new connection needs it, and most requests ride on a kept one. So a
request to a name that was just looked up brings the entry along, later ones do not, and one that turns out to need it
is started once more with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.core.observation import Fault
from relay.delivery.resolver import MAX_ADDRESSES, Answer, Resolver, Route, vet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.delivery.guard import Policy
    from relay.delivery.request import SendRequest
    from relay.delivery.target import Proxy, Target

#: Times that libcurl may lack the addresses of an answer before every request brings them: its receiver keeps no
#: connections.
LOSSES = 4

#: libcurl dials the literal in the URL; the guard judges it.
_DIRECT = Route((), None, "")


class Router:
    """Finds the way to each target. All calls are the engine's thread's; `wake` comes from another (see Resolver)."""

    def __init__(
        self,
        *,
        policy: Policy,
        proxy: Proxy | None,
        wake: Callable[[], None],
        name_servers: Sequence[str] | None = None,
    ) -> None:
        self._policy = policy
        self._proxy = proxy
        self._resolver = Resolver(policy=policy, wake=wake, servers=name_servers)
        # The operator chose the proxy, and it may well be private: the policy is not asked.
        self._proxy_resolver = Resolver(policy=lambda _: None, wake=wake, servers=name_servers)
        self._proxy_pins: list[str] = []
        #: Answers that this turn's transfers bring libcurl, and for which port.
        self._pinning: list[tuple[Answer, int]] = []

    def find(self, request: SendRequest, target: Target, now: float) -> Route | str:
        """Return the route, or the name that has to be known first: it comes with `collect`.

        Raises ValueError where the request brings no address although it says that it does.
        """
        if request.addresses is not None:
            if not request.addresses:
                raise ValueError("no address to dial")
            route: Route = Route(request.addresses[:MAX_ADDRESSES], None, "")
        elif target.is_literal:
            if self._proxy is None:
                return _DIRECT
            # The guard sees the proxy's address only.
            route = vet([target.host], self._policy, life=0.0, now=now)
        else:
            answer = self._resolver.find(target.host, now)
            if answer is None:
                return target.host
            losses = answer.pinned.get(target.port)
            if losses is not None and losses < LOSSES:
                return answer
            if self._proxy is None and answer.fault is None:
                self._pinning.append((answer, target.port))
            route = answer
        if route.fault is not None:
            return route
        if self._proxy is not None:
            return self._find_proxy(self._proxy, route, now)
        return Route(route.addresses, None, "", pins=[target.pin(route.addresses)])

    def pins_for(self, target: Target, addresses: Sequence[str]) -> list[str] | None:
        """Return the entries for one more start of a transfer, which brings them along whatever is there."""
        if self._proxy is not None:
            return self._proxy_pins or None
        answer = self._resolver.kept(target.host)
        if answer is not None and target.port in answer.pinned:
            answer.pinned[target.port] += 1
        return [target.pin(addresses)] if addresses else None

    def note_reached(self, target: Target, address: str) -> None:
        """Take note that the egress proxy got through to this address, and not to those before it."""
        answer = self._resolver.kept(target.host)
        if answer is not None:
            answer.reached = address

    def note_pinned(self) -> None:
        """Take note that libcurl has started, and so taken in, what was found since the last call."""
        for answer, port in self._pinning:
            answer.pinned.setdefault(port, 0)
        self._pinning.clear()

    def collect(self, now: float) -> list[str]:
        """Take in what was looked up, and return the names."""
        names = self._resolver.collect(now)
        return names + self._proxy_resolver.collect(now) if self._proxy is not None else names

    def close(self) -> None:
        """Give up what is being looked up."""
        self._resolver.close()
        self._proxy_resolver.close()

    def _find_proxy(self, proxy: Proxy, route: Route, now: float) -> Route | str:
        if not proxy.is_literal:
            answer = self._proxy_resolver.find(proxy.host, now)
            if answer is None:
                return proxy.host
            if answer.fault is not None:
                return Route((), Fault.INTERNAL, "the egress proxy's name cannot be resolved")
            self._proxy_pins = [proxy.pin(answer.addresses)]
        reached = route.reached if isinstance(route, Answer) else None
        return Route(_by_ease(route.addresses, reached), None, "", pins=self._proxy_pins or None)


def _by_ease(addresses: tuple[str, ...], reached: str | None) -> tuple[str, ...]:
    """The proxy is told one address at a time: IPv4 ones first, since fewer proxies have a way to IPv6.

    Before all comes the one that was reached: it is where a tunnel may stand, and the others cost a time-out each.
    """
    return tuple(sorted(addresses, key=lambda address: (address != reached, ":" in address)))
