"""Which addresses the engine dials, and what it says where it dials none."""

from __future__ import annotations

import resource
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pycurl
import pytest

from relay.core.observation import Fault
from relay.delivery.guard import Guard
from relay.delivery.transfer import REFUSED_TEXT
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
    "host", ["127.0.0.1", "127.1", "0x7f.1", "2130706433", "localhost", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_every_spelling_is_judged(host: str) -> None:
    """The policy sees the address that would be dialled, however the URL spells it."""
    judged: list[str] = []

    def policy(address: str) -> str:
        judged.append(address)
        return "test"

    with Sender(policy=policy) as sender:
        seen = sender.send(f"http://{host}:9/").observation

    assert seen is not None
    assert seen.fault is Fault.REFUSED
    assert set(judged) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert judged


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


def tunnel(answer: bytes = b"HTTP/1.1 200 Connected\r\nX-Proxy: 1\r\n\r\n") -> tuple[list[str], Callable[[Peer], None]]:
    """An egress proxy: notes each CONNECT's target and joins the streams."""
    targets: list[str] = []

    def script(peer: Peer) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.socket.recv(65536)
        target = head.split()[1].decode()
        targets.append(head.decode("latin-1"))
        peer.send(answer)
        if not answer.startswith(b"HTTP/1.1 200"):
            return
        host, _, port = target.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port))) as onward:
            back = threading.Thread(target=_pump, args=(onward, peer.socket), daemon=True)
            back.start()
            _pump(peer.socket, onward)
            back.join()

    return targets, script


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


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
