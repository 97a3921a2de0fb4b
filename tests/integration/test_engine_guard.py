"""Which addresses the engine dials, and what it says where it dials none."""

from __future__ import annotations

import resource
import socket
from collections import Counter
from typing import TYPE_CHECKING

import pycurl
import pytest

from relay.core.observation import Fault
from relay.delivery.guard import Guard
from relay.delivery.resolver import REFUSED_TEXT
from tests.hostile import OK, Peer, Receiver, Sender, keep_answering, request

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD, ALSO_GOOD = "127.0.0.1", "127.0.0.2"


def only(*allowed: str) -> Callable[[str], str | None]:
    return lambda address: None if address in allowed else "not in the test's list"


@pytest.mark.parametrize(
    "addresses",
    [
        [GOOD],
        ["127.0.0.3", GOOD],
        [GOOD, "127.0.0.3"],
        ["::1", GOOD],
        ["127.0.0.3", "127.0.0.4", "127.0.0.5", "::1", GOOD],
    ],
)
def test_name_with_bad_and_good_addresses_reaches_the_good_one(addresses: list[str]) -> None:
    """Whatever the order, refused addresses see no connection and the allowed one does (B-81)."""
    with Receiver(keep_answering()) as good:
        bad = [Receiver(keep_answering(), host=a, port=good.port) for a in addresses if a != GOOD]
        for receiver in bad:
            receiver.__enter__()
        with Sender(policy=only(GOOD)) as sender:
            seen = sender.send(good.url(host="mixed.test"), addresses=tuple(addresses)).observation
        for receiver in bad:
            receiver.__exit__()

        assert seen is not None
        assert (seen.status, seen.remote_address) == (200, GOOD)
        assert [receiver.accepted for receiver in bad] == [0] * len(bad)
        assert good.requests[0].headers["host"] == f"mixed.test:{good.port}"


@pytest.mark.parametrize("addresses", [["127.0.0.3"], ["127.0.0.3", "::1", "127.0.0.4"]])
def test_name_with_bad_addresses_alone_is_refused(addresses: list[str]) -> None:
    """Where the policy refused every address nothing is dialled, and the text gives nothing away."""
    with Sender(policy=only(GOOD)) as sender:
        seen = sender.send("http://inside.test:8080/", addresses=tuple(addresses)).observation

    assert seen is not None
    assert (seen.fault, seen.text, seen.sends) == (Fault.REFUSED, REFUSED_TEXT, 0)
    assert seen.remote_address is None


@pytest.mark.parametrize(
    ("host", "judged"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.1", None),
        ("0x7f.1", None),
        ("2130706433", None),
        ("0177.0.0.1", None),
        ("0", None),
        ("%31%32%37.0.0.1", None),
    ],
)
def test_every_spelling_is_judged(host: str, judged: str | None) -> None:
    """The policy sees the address that would be dialled; a spelling that only some read as one is refused by itself."""
    seen_by_policy: list[str] = []

    def policy(address: str) -> str:
        seen_by_policy.append(address)
        return "test"

    with Sender(policy=policy) as sender:
        seen = sender.send(f"http://{host}:9/").observation

    assert seen is not None
    assert (seen.fault, seen.text, seen.sends) == (Fault.REFUSED, REFUSED_TEXT, 0)
    assert (judged in seen_by_policy) if judged else not seen_by_policy


def test_dead_address_is_passed_over() -> None:
    """An address that does not answer is followed by the next (B-81)."""
    with Receiver(keep_answering(), host=ALSO_GOOD) as receiver, Sender() as sender:
        seen = sender.send(receiver.url(host="two.test"), addresses=(GOOD, ALSO_GOOD)).observation

    assert seen is not None
    assert (seen.status, seen.remote_address) == (200, ALSO_GOOD)


def test_refused_and_dead_addresses_are_a_connection_fault() -> None:
    """Refused means that every answer was: one that was allowed and is dead makes it a connection fault."""
    with Receiver(keep_answering()) as receiver:
        url = receiver.url(host="two.test")
    with Sender(policy=only(GOOD)) as sender:
        seen = sender.send(url, addresses=("127.0.0.3", GOOD)).observation

    assert seen is not None
    assert (seen.fault, seen.remote_address) == (Fault.CONNECTION, GOOD)


def test_resend_is_judged_again() -> None:
    """The new connection of a resend asks the policy, which may have changed its mind."""
    verdicts = iter([None])

    def script(peer: Peer) -> None:
        peer.read()
        peer.send(OK)
        peer.read()

    with Sender(policy=lambda _: next(verdicts, "moved")) as sender, Receiver(script) as receiver:
        assert sender.send(receiver.url()).observation.status == 200  # type: ignore[union-attr]  # never None here
        seen = sender.send(receiver.url()).observation

        assert seen is not None
        assert seen.status is None
        assert receiver.accepted == 1


def test_policy_that_raises_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the policy opens nothing, and is ours, not the endpoint's."""

    def policy(address: str) -> None:
        raise ZeroDivisionError(address)

    with Sender(policy=policy) as sender, Receiver(keep_answering()) as receiver:
        seen = sender.send(receiver.url()).observation

        assert seen is not None
        assert (seen.fault, seen.sends, receiver.accepted) == (Fault.INTERNAL, 0, 0)
    assert "the address policy failed" in caplog.text


def test_no_descriptors_left_is_a_fault_of_ours() -> None:
    """Out of descriptors is internal, and the engine sends again once there are some."""
    with Receiver(keep_answering()) as receiver, Sender() as sender:
        # The lowest free number: below it all are taken.
        used = socket.socket().detach()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            seen = sender.send(receiver.url()).observation
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            socket.close(used)
        after = sender.send(receiver.url()).observation

        assert seen is not None
        assert after is not None
        assert (seen.fault, seen.text) == (Fault.INTERNAL, "no socket: EMFILE")
        assert after.status == 200


def test_other_address_families_are_refused() -> None:
    """A Unix socket, say, is never opened."""
    guard = Guard(lambda _: None)

    assert guard.open_socket(0, _Address()) == pycurl.SOCKET_BAD
    assert (guard.refused, guard.allowed) == (1, 0)


class _Address:
    family, socktype, protocol, addr = socket.AF_UNIX, socket.SOCK_STREAM, 0, b"/run/docker.sock"


def test_pinned_name_makes_no_lookup_of_its_own() -> None:
    """With addresses handed over the name itself is never resolved: it need not even exist."""
    with Receiver(keep_answering()) as receiver, Sender() as sender:
        seen = sender.send(receiver.url(host="nowhere.invalid"), addresses=(GOOD,)).observation

    assert seen is not None
    assert (seen.status, seen.remote_address) == (200, GOOD)


@pytest.mark.parametrize(("host", "address"), [(GOOD, GOOD), ("::1", "::1")])
def test_literal_is_pinned_to_itself(host: str, address: str) -> None:
    """A literal address can be handed over like a name's."""
    with Receiver(keep_answering(), host=host) as receiver, Sender(policy=only(address)) as sender:
        url = receiver.url(host=f"[{host}]" if ":" in host else host)
        seen = sender.send(url, addresses=(address,)).observation

    assert seen is not None
    assert (seen.status, seen.remote_address) == (200, address)


def test_no_address_to_hand_over_is_not_looked_up() -> None:
    """An empty list of vetted addresses does not fall back to libcurl's own look-up."""
    with Receiver(keep_answering()) as receiver, Sender() as sender:
        seen = sender.send(receiver.url(host="localhost"), addresses=()).observation

        assert seen is not None
        assert seen.status is None
        assert receiver.accepted == 0


def test_hundreds_to_many_hosts_at_once() -> None:
    """Each request of a large batch reaches its own host, also beyond the kept connections."""
    with Receiver(keep_answering()) as receiver, Sender() as sender:
        hosts = [f"h{n % 50}.test" for n in range(600)]
        batch = [request(receiver.url(host=host), addresses=(GOOD,), key=host) for host in hosts]
        results = sender.send_all(batch)

        assert {c.observation.status for c in results if c.observation} == {200}
        assert Counter(r.headers["host"].partition(":")[0] for r in receiver.requests) == Counter(hosts)
