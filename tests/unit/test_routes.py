"""What a send makes of URLs, proxies and answers before anything is dialled."""

from __future__ import annotations

import math

import pytest

from relay.core.errors import InvalidInput
from relay.core.observation import Fault
from relay.core.url import UrlPolicy
from relay.delivery.lookups import Lookups
from relay.delivery.request import SendRequest
from relay.delivery.resolver import MAX_ADDRESSES, vet
from relay.delivery.target import Proxy, Target, target_finder


def test_pins_name_host_port_and_addresses() -> None:
    """An entry ages, names the port that is dialled, and brackets what has colons."""
    named, literal = Target("https://Hooks.Example.com./a?b"), Target("http://[2001:4860::1]:8080/")

    assert (named.url, named.host, named.port) == ("https://hooks.example.com/a?b", "hooks.example.com", 443)
    assert (named.is_literal, literal.is_literal, literal.is_plain) == (False, True, True)
    assert named.pin(["8.8.8.8", "2001:4860::1"]) == "+hooks.example.com:443:8.8.8.8,[2001:4860::1]"
    assert named.tunnel("8.8.8.8") == "hooks.example.com:443:8.8.8.8:443"
    assert literal.tunnel("2001:4860::1") == "[2001:4860::1]:8080:[2001:4860::1]:8080"


def test_targets_are_remembered_and_judged_by_their_policy() -> None:
    """The same text is taken apart once; what the policy refuses never becomes a target."""
    find = target_finder(UrlPolicy())

    assert find("https://example.com/") is find("https://example.com/")
    with pytest.raises(InvalidInput):
        find("http://example.com/")


@pytest.mark.parametrize(
    ("text", "url", "port", "is_literal", "credentials"),
    [
        ("http://proxy", "http://proxy:80", 80, False, ""),
        ("https://proxy.test", "https://proxy.test:443", 443, False, ""),
        ("http://10.0.0.1:3128", "http://10.0.0.1:3128", 3128, True, ""),
        ("http://[fd00::1]:3128", "http://[fd00::1]:3128", 3128, True, ""),
        ("http://us%65r:p%40ss@proxy:3128", "http://proxy:3128", 3128, False, "user:p@ss"),
    ],
)
def test_proxy_is_taken_apart(text: str, url: str, port: int, is_literal: bool, credentials: str) -> None:
    """Credentials are not left in the URL, and the port is always named."""
    proxy = Proxy(text)

    assert (proxy.url, proxy.port, proxy.is_literal, proxy.credentials) == (url, port, is_literal, credentials)


def test_vetted_addresses_take_turns() -> None:
    """Refused ones go, doubled ones go, and neither family crowds the other out."""
    answer = vet(["::1", "::2", "9.9.9.9", "::1", "8.8.8.8"], lambda a: "no" if a == "::2" else None, life=5, now=1)
    assert (answer.fault, answer.addresses) == (None, ("::1", "9.9.9.9", "8.8.8.8"))
    assert (answer.ends_at, answer.pinned) == (6, {})

    many = vet([*(f"2001::{n}" for n in range(50)), *(f"9.9.9.{n}" for n in range(50))], lambda _: None, life=5, now=1)
    assert len(many.addresses) == MAX_ADDRESSES
    assert sum(":" in address for address in many.addresses) == MAX_ADDRESSES // 2

    assert vet(["8.8.8.8"], lambda _: "no", life=5, now=1).fault is Fault.REFUSED


def test_waits_end_once() -> None:
    """A request that waits is taken out by its answer, or by its end, or by a stop, and by one of them only."""

    def request(connect_timeout_ms: int) -> SendRequest:
        return SendRequest(
            key=None,
            url="http://a.test/",
            body=b"",
            headers=[],
            timeout_ms=9_000,
            connect_timeout_ms=connect_timeout_ms,
            idle_timeout_ms=9_000,
            start_by=math.inf,
        )

    lookups = Lookups()
    assert lookups.next_end == math.inf
    first, second, third = request(1_000), request(2_000), request(90_000)
    for sent, name in ((third, "c.test"), (second, "b.test"), (first, "a.test")):
        lookups.add(sent, name, since=100.0)

    assert lookups.next_end == 101.0
    assert [waiting.request for waiting in lookups.arrived("a.test")] == [first]
    assert lookups.arrived("a.test") == []
    assert [waiting.request for waiting in lookups.late(102.0)] == [second]
    assert lookups.arrived("b.test") == []
    assert lookups.next_end == 109.0
    assert [waiting.request for waiting in lookups.take_all()] == [third]
    assert (lookups.next_end, lookups.arrived("c.test")) == (math.inf, [])
