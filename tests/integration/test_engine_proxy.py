"""The egress proxy: what is vetted before it is asked, what it is told, and what its failures mean (B-86)."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

import pytest

from relay.core.observation import Fault
from relay.core.url import UrlPolicy
from relay.delivery.resolver import REFUSED_TEXT
from tests.hostile import Peer, Receiver, Sender, keep_answering, request, tunnel
from tests.nameserver import SERVFAIL, NameServer, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD, ALSO_GOOD, BAD = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def only(*allowed: str) -> Callable[[str], str | None]:
    return lambda address: None if address in allowed else "not in the test's list"


def test_proxy_is_told_the_vetted_address() -> None:
    """Through the egress proxy the name is not resolved again: CONNECT names the address, Host the name (B-86)."""
    targets, script = tunnel()

    with Receiver(keep_answering()) as receiver, Receiver(script, host=ALSO_GOOD) as proxy:
        with Sender(policy=only(GOOD), proxy=proxy.url("")) as sender:
            seen = sender.send(
                receiver.url(host="nowhere.invalid"), addresses=(GOOD,), headers=["X-Secret: 1"]
            ).observation

        assert seen is not None
        assert (seen.status, dict(seen.headers).get("x-proxy")) == (200, None)
        assert targets[0].startswith(f"CONNECT {GOOD}:{receiver.port} ")
        assert "x-secret" not in targets[0].lower()
        assert receiver.requests[0].headers["host"] == f"nowhere.invalid:{receiver.port}"


@pytest.mark.parametrize(("status", "fault"), [(403, Fault.CONNECTION), (407, Fault.INTERNAL), (502, Fault.CONNECTION)])
def test_proxy_that_refuses(status: int, fault: Fault) -> None:
    """The proxy's own credentials are ours to mend; what else it refuses is the target's."""
    _, script = tunnel(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)

    with Receiver(script) as proxy, Sender(proxy=proxy.url("")) as sender:
        seen = sender.send("http://target.test/", addresses=(GOOD,)).observation

    assert seen is not None
    assert (seen.fault, seen.status, seen.sends) == (fault, None, 0)


def test_proxy_that_is_away_is_a_fault_of_ours() -> None:
    """A dead proxy says nothing about any endpoint."""
    with Receiver(keep_answering()) as proxy:
        pass
    with Sender(proxy=proxy.url("")) as sender:
        seen = sender.send("http://target.test/", addresses=(GOOD,)).observation

    assert seen is not None
    assert seen.fault is Fault.INTERNAL


NAMES = {
    "proxy.test": Reply((ALSO_GOOD,)),
    "good.test": Reply((GOOD,)),
    "mixed.test": Reply((BAD, "::1", GOOD)),
    "inside.test": Reply((BAD, "::1")),
    "failing.test": Reply(code=SERVFAIL),
}


def test_policy_is_enforced_before_the_proxy_is_asked() -> None:
    """The proxy is told vetted addresses only, and of a refused or unknown target it hears nothing at all."""
    targets, script = tunnel()
    with (
        NameServer(NAMES) as names,
        Receiver(keep_answering()) as receiver,
        Receiver(script, host=ALSO_GOOD) as proxy,
        Sender(
            # The proxy's own address is not asked about: it is the operator's choice.
            policy=only(GOOD),
            proxy=proxy.url("", host="proxy.test"),
            name_servers=[names.address],
            url_policy=UrlPolicy(
                require_https=False,
                allowed_ports=frozenset({receiver.port}),
                allowed_hosts=(".test",),
            ),
        ) as sender,
    ):
        refused = [
            receiver.url(host="inside.test"),
            receiver.url(host=BAD),
            receiver.url(host="[::1]"),
            receiver.url(host="2130706433"),
            receiver.url(host="localhost"),
            "http://good.test:1/",
            "ftp://good.test/",
        ]
        for url in refused:
            seen = sender.send(url).observation
            assert seen is not None
            assert (seen.fault, seen.text, seen.sends, seen.remote_address) == (Fault.REFUSED, REFUSED_TEXT, 0, None)
        unknown = [sender.send(receiver.url(host=host)).observation for host in ("absent.test", "failing.test")]
        assert [one.fault for one in unknown if one] == [Fault.DNS, Fault.DNS_TEMPORARY]
        assert (proxy.accepted, receiver.accepted) == (0, 0)

        hosts = ["mixed.test", "good.test", GOOD, "mixed.test"]
        reached = [sender.send(receiver.url(host=host)).observation for host in hosts]

    assert [one.status for one in reached if one] == [200] * 4
    assert {head.split()[1] for head in targets} == {f"{GOOD}:{receiver.port}"}
    assert [received.headers["host"].partition(":")[0] for received in receiver.requests] == hosts
    assert {names.asked[name, 1] for name in ("proxy.test", "mixed.test")} == {1}


NO_WAY = b"HTTP/1.1 502 No way\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("failure", ["refuses", "closes", "hangs"])
def test_the_next_address_is_tried(failure: str) -> None:
    """Where the proxy gets nowhere with one address it is told the next, in one attempt; the one that works comes first
    from then on, over the tunnel that stands."""
    targets, good = tunnel()

    def script(peer: Peer) -> None:
        if peer.number % 3 == 2:
            good(peer)
            return
        targets.append(peer.socket.recv(65536).decode())
        if failure == "refuses":
            peer.send(NO_WAY)
        elif failure == "hangs":
            peer.hold()

    with (
        NameServer({"many.test": Reply((BAD, "127.0.0.4", GOOD))}) as names,
        Receiver(keep_answering()) as receiver,
        Receiver(script, host=ALSO_GOOD) as proxy,
        Sender(proxy=proxy.url(""), name_servers=[names.address]) as sender,
    ):
        url = receiver.url(host="many.test")
        began = time.monotonic()
        seen = [sender.send(url, connect_timeout_ms=4_000).observation for _ in range(3)]
        took = time.monotonic() - began

    assert [(one.status, one.sends) for one in seen if one] == [(200, 1)] * 3
    asked = [head.split()[1].rpartition(":")[0] for head in targets]
    assert (len(asked), len(set(asked))) == (3, 3)
    # Half of the time to connect, then half of what is left.
    assert (2.9 < took < 4.0 + 1.0) if failure == "hangs" else took < 2.9
    assert [received.connection for received in receiver.requests] == [0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "fault", "tried"),
    [(NO_WAY, Fault.CONNECTION, 2), (b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n", Fault.INTERNAL, 1)],
)
def test_when_no_address_is_left(answer: bytes, fault: Fault, tried: int) -> None:
    """The last address's failure is the attempt's; a proxy that wants other credentials is not asked for the next."""
    targets, script = tunnel(answer)
    with Receiver(script) as proxy, Sender(proxy=proxy.url("")) as sender:
        seen = sender.send("http://target.test/", addresses=(GOOD, "::1")).observation
    assert seen is not None
    assert (seen.fault, seen.status, seen.sends) == (fault, None, 0)
    assert [head.split()[1] for head in targets] == [f"{GOOD}:80", "[::1]:80"][:tried]


def test_credentials_are_for_the_proxy_alone() -> None:
    """The proxy is shown its user and password, the receiver is not; neither is in what is observed."""
    targets, script = tunnel()
    with Receiver(keep_answering()) as receiver, Receiver(script, host=ALSO_GOOD) as proxy:
        url = proxy.url("").replace("://", "://user:s%40crt@")
        with Sender(policy=only(GOOD), proxy=url) as sender:
            seen = sender.send(receiver.url()).observation

    assert seen is not None
    assert seen.status == 200
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'user:s@crt').decode()}" in targets[0]
    assert b"roxy" not in receiver.requests[0].head
    assert b"user" not in receiver.requests[0].head


def test_proxy_whose_name_is_unknown_is_a_fault_of_ours() -> None:
    """It says nothing about any endpoint, and is looked up by the same resolver."""
    with NameServer(NAMES) as names, Sender(proxy="http://absent.test:3128", name_servers=[names.address]) as sender:
        seen = sender.send("http://good.test/").observation

    assert seen is not None
    assert (seen.fault, seen.text) == (Fault.INTERNAL, "the egress proxy's name cannot be resolved")


def test_tunnels_are_kept_for_their_own_target() -> None:
    """A second request to a target rides on its tunnel; another target, or another name of it, gets one of its own."""
    targets, script = tunnel()
    with (
        NameServer(NAMES) as names,
        Receiver(keep_answering()) as receiver,
        Receiver(script, host=ALSO_GOOD) as proxy,
        Sender(proxy=proxy.url(""), name_servers=[names.address]) as sender,
    ):
        for _ in range(3):
            for host in ("good.test", GOOD):
                assert sender.send(receiver.url(host=host)).observation.status == 200  # type: ignore[union-attr]  # it was sent
        began = time.monotonic()
        results = sender.send_all([request(receiver.url(host="good.test")) for _ in range(50)])

    assert len({head.split("\r\n")[0] for head in targets}) == 1
    assert {completed.observation.status for completed in results if completed.observation} == {200}
    assert time.monotonic() - began < 10
    hosts = [received.headers["host"].partition(":")[0] for received in receiver.requests[:6]]
    assert hosts == ["good.test", GOOD] * 3
    assert [received.connection for received in receiver.requests[:6]] == [0, 1] * 3
