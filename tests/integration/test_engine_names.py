"""How names are looked up before a send: by the engine's own resolver, against real DNS answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from relay.core.address import AddressPolicy, refusal
from relay.core.observation import Fault, Observation
from relay.delivery.resolver import REFUSED_TEXT, Resolver
from tests.hostile import OK, Peer, Receiver, Sender, keep_answering, request, wait_until
from tests.nameserver import AAAA, SERVFAIL, A, NameServer, Reply
from tests.nameserver import REFUSED as NAME_REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD, BAD = "127.0.0.1", "127.0.0.3"


def only(*allowed: str) -> Callable[[str], str | None]:
    return lambda address: None if address in allowed else "not in the test's list"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, Fault.DNS),
        (Reply(), Fault.DNS),
        (Reply(code=SERVFAIL), Fault.DNS_TEMPORARY),
        (Reply(code=NAME_REFUSED), Fault.DNS_TEMPORARY),
        (Reply(raw=b"no DNS message"), Fault.DNS_TEMPORARY),
        (Reply(silent=True), Fault.DNS_TEMPORARY),
        ({A: Reply(code=SERVFAIL), AAAA: Reply()}, Fault.DNS_TEMPORARY),
        ({A: Reply(), AAAA: Reply(silent=True)}, Fault.DNS_TEMPORARY),
        (Reply((BAD, "::1", "127.0.0.4")), Fault.REFUSED),
        (Reply(("::ffff:127.0.0.3",)), Fault.REFUSED),
    ],
)
def test_faults_of_names(answer: Reply | dict[int, Reply] | None, fault: Fault) -> None:
    """No such name and no address are the receiver's; a name server's failure is not; refused is refused (B-85)."""
    names = {} if answer is None else {"faulty.test": answer}
    with NameServer(names) as server, Sender(policy=only(GOOD), name_servers=[server.address]) as sender:
        seen = sender.send("http://faulty.test:9/", connect_timeout_ms=400).observation

    assert seen is not None
    assert (seen.fault, seen.sends, seen.remote_address) == (fault, 0, None)
    assert seen.text
    assert seen.text == REFUSED_TEXT or fault is not Fault.REFUSED
    assert "faulty" not in seen.text
    assert 0 < seen.dns_us <= seen.total_us < 1_500_000


@pytest.mark.parametrize(
    "answer",
    [
        Reply((BAD, GOOD)),
        Reply((GOOD, BAD)),
        Reply(("::1", GOOD)),
        Reply((BAD, "127.0.0.4", "127.0.0.5", "::1", GOOD)),
        Reply((GOOD,), alias="another.test"),
        {A: Reply((GOOD,)), AAAA: Reply(code=SERVFAIL)},
        {A: Reply((GOOD,)), AAAA: Reply(silent=True)},
    ],
)
def test_good_address_is_dialled_whatever_else_is_answered(answer: Reply | dict[int, Reply]) -> None:
    """Of mixed answers only the allowed address sees a connection, and half an answer is enough (B-81)."""
    with Receiver(keep_answering()) as good:
        bad = [Receiver(keep_answering(), host=host, port=good.port) for host in (BAD, "::1")]
        for receiver in bad:
            receiver.__enter__()
        with (
            NameServer({"mixed.test": answer}) as server,
            Sender(policy=only(GOOD), name_servers=[server.address]) as sender,
        ):
            seen = sender.send(good.url(host="mixed.test")).observation
        for receiver in bad:
            receiver.__exit__()

    assert seen is not None
    assert (seen.status, seen.remote_address) == (200, GOOD)
    assert [receiver.accepted for receiver in bad] == [0, 0]
    assert good.requests[0].headers["host"] == f"mixed.test:{good.port}"


def test_dead_addresses_do_not_keep_from_the_living_one() -> None:
    """All vetted addresses are kept, both families: the one that answers is found within the time to connect (C-16)."""
    answer = Reply(("::1", "127.0.0.8", "127.0.0.9", GOOD))
    with (
        Receiver(keep_answering()) as good,
        NameServer({"two.test": answer}) as server,
        Sender(name_servers=[server.address]) as sender,
    ):
        seen = sender.send(good.url(host="two.test"), connect_timeout_ms=2_000).observation

    assert seen is not None
    assert (seen.status, seen.remote_address) == (200, GOOD)


def test_hanging_names_hold_up_nobody() -> None:
    """Beside a thousand names that nobody answers for, a good one is answered promptly, and they end in time."""
    names: Callable[[str], Reply] = lambda name: Reply((GOOD,)) if name == "good.test" else Reply(silent=True)  # noqa: E731
    with (
        Receiver(keep_answering()) as good,
        NameServer(names) as server,
        Sender(name_servers=[server.address]) as sender,
    ):
        hanging = [request(f"http://h{n}.test:9/", connect_timeout_ms=3_000, key="hanging") for n in range(1_000)]
        sender.engine.submit(hanging)
        began = time.monotonic()
        sender.engine.submit([request(good.url(host="good.test"), key="good")])
        wait_until(lambda: sender.done)
        took = time.monotonic() - began
        [first] = sender.done
        wait_until(lambda: len(sender.done) == 1_001)

    assert first.request.key == "good"
    assert took < 2.0
    faults = {completed.observation.fault for completed in sender.done[1:] if completed.observation}
    assert faults == {Fault.DNS_TEMPORARY}
    assert all(2.9 < c.observation.total_us / 1e6 < 4.5 for c in sender.done[1:] if c.observation)


def test_one_flight_a_name_and_the_answer_is_kept() -> None:
    """Many requests to a name ask for it once, and later ones use what is known; its time counts for those that wait."""
    names = {"slow.test": Reply((GOOD,), delay=0.2)}
    with (
        Receiver(keep_answering()) as good,
        NameServer(names) as server,
        Sender(name_servers=[server.address]) as sender,
    ):
        url = good.url(host="slow.test")
        first = sender.send_all([request(url) for _ in range(20)])
        then = sender.send_all([request(url) for _ in range(20)])

    seen = [completed.observation for completed in [*first, *then]]
    assert [one.status for one in seen if one] == [200] * 40
    assert all(one.dns_us >= 190_000 and one.total_us > one.dns_us for one in seen[:20] if one)
    assert all(one.dns_us == 0 for one in seen[20:] if one)
    assert server.asked == {("slow.test", A): 1, ("slow.test", AAAA): 1}


def test_lookup_counts_in_the_time_to_connect_and_in_the_total() -> None:
    """A slow name leaves less for the rest: a silent receiver is given up at the total, counted from the start."""

    def script(peer: Peer) -> None:
        peer.read()
        peer.hold()

    names = {"slow.test": Reply((GOOD,), delay=0.3)}
    with Receiver(script) as silent, NameServer(names) as server, Sender(name_servers=[server.address]) as sender:
        late = sender.send(silent.url(host="slow.test"), timeout_ms=150).observation
        wait_until(lambda: server.asked["slow.test", A])
        time.sleep(0.3)  # its answer comes for nobody, and is kept
        sender.send(silent.url(host="other.test"), timeout_ms=150)
        seen = sender.send(silent.url(host="slow.test"), timeout_ms=600).observation

    assert late is not None
    assert (late.fault, late.text) == (Fault.DNS_TEMPORARY, "timed out resolving the name")
    assert 140_000 < late.total_us < 400_000
    assert seen is not None
    assert (seen.fault, seen.sends, seen.dns_us) == (Fault.TIMEOUT, 1, 0)


def test_name_that_turns_inward_is_never_dialled_there() -> None:
    """A name that answers with an allowed address first and a refused one then is refused once it is asked again (C-20)."""
    names = {"turning.test": [Reply((GOOD,), ttl=1), Reply((BAD,), ttl=1)]}
    with (
        Receiver(keep_answering()) as good,
        Receiver(keep_answering(), host=BAD, port=good.port) as inside,
        NameServer(names) as server,
        Sender(policy=only(GOOD), name_servers=[server.address]) as sender,
    ):
        url = good.url(host="turning.test")
        seen: list[Observation] = []
        deadline = time.monotonic() + 10
        while not seen or seen[-1].fault is None:
            assert time.monotonic() < deadline
            observation = sender.send(url).observation
            assert observation is not None
            seen.append(observation)

    assert seen[0].status == 200
    assert (seen[-1].fault, seen[-1].text, seen[-1].remote_address) == (Fault.REFUSED, REFUSED_TEXT, None)
    assert {one.remote_address for one in seen[:-1]} == {GOOD}
    assert inside.accepted == 0


def test_name_that_moved_is_followed_by_new_connections() -> None:
    """What libcurl keeps of a name gives way to the newer answer, on handles that brought the older one, too."""
    names = {"moving.test": [Reply((GOOD,), ttl=1), Reply((BAD,), ttl=1)]}
    close = lambda peer: (peer.read(), peer.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))  # noqa: E731
    with (
        Receiver(close) as old,  # type: ignore[arg-type]  # its result is not used
        Receiver(close, host=BAD, port=old.port) as new,  # type: ignore[arg-type]  # its result is not used
        NameServer(names) as server,
        Sender(name_servers=[server.address]) as sender,
    ):
        url = old.url(host="moving.test")
        # On several handles at once: each brings libcurl the addresses.
        first = sender.send_all([request(url) for _ in range(6)])
        assert {c.observation.remote_address for c in first if c.observation} == {GOOD}
        wait_until(lambda: sender.send(url).observation.remote_address == BAD)  # type: ignore[union-attr]  # it was sent
        before = old.accepted
        for _ in range(4):
            then = sender.send_all([request(url) for _ in range(6)])
            assert {c.observation.remote_address for c in then if c.observation} == {BAD}
        assert old.accepted == before
        assert new.accepted >= 24


def test_new_connection_finds_its_address_again() -> None:
    """libcurl forgets addresses within a second; a connection that has to be made then is made, at no cost of a send."""

    def script(peer: Peer) -> None:
        for _ in range(2):
            peer.read()
            peer.send(OK)

    with (
        NameServer({"good.test": Reply((GOOD,))}) as server,
        Receiver(script) as receiver,
        Sender(name_servers=[server.address]) as sender,
    ):
        url = receiver.url(host="good.test")
        results = sender.send_all([request(url) for _ in range(8)])
        for _ in range(3):
            time.sleep(1.1)  # what libcurl knows of the name is over by then
            results += sender.send_all([request(url) for _ in range(8)])

    seen = [completed.observation for completed in results if completed.observation]
    assert [(one.status, one.fault) for one in seen] == [(200, None)] * 32
    assert sum(one.sends for one in seen) == len(receiver.requests)
    assert server.asked["good.test", A] == 1


@pytest.mark.parametrize("host", ["localhost", "a.localhost"])
def test_hosts_file_and_localhost_are_known(host: str) -> None:
    """These need no name server; what they come to is judged like everything else."""
    with Receiver(keep_answering()) as receiver, NameServer({}) as server:
        with Sender(policy=only(GOOD), name_servers=[server.address]) as sender:
            seen = sender.send(receiver.url(host=host)).observation
        production = AddressPolicy()
        with Sender(policy=lambda a: refusal(a, production), name_servers=[server.address]) as sender:
            refused = sender.send(receiver.url(host=host)).observation

    assert seen is not None
    assert seen.status == 200
    assert refused is not None
    assert (refused.fault, refused.text) == (Fault.REFUSED, REFUSED_TEXT)
    assert receiver.accepted == 1
    assert not server.asked


def test_stop_gives_back_what_waits_for_a_name() -> None:
    """A request whose name is still unknown was not sent: it comes back as such, at once."""
    with NameServer({"never.test": Reply(silent=True)}) as server:
        sender = Sender(name_servers=[server.address])
        with sender:
            waiting = request("http://never.test:9/")
            sender.engine.submit([waiting])
            wait_until(lambda: server.asked["never.test", A])
            began = time.monotonic()
            assert sender.engine.stop(began + 10) == [waiting]
            assert time.monotonic() - began < 5
        assert sender.done == []


def test_answer_that_is_asked_for_anew_in_vain_lasts_until_its_end() -> None:
    """A name server that fails for a moment takes no answer away that is still good."""
    names = {"good.test": [Reply((GOOD,), ttl=60), Reply(code=SERVFAIL)]}
    with NameServer(names) as server:
        arrived: list[float] = []
        resolver = Resolver(policy=lambda _: None, wake=lambda: arrived.append(1), servers=[server.address])
        now = 1_000.0
        assert resolver.find("good.test", now) is None
        wait_until(lambda: len(arrived) == 1)
        assert resolver.collect(now) == ["good.test"]
        first = resolver.find("good.test", now + 10)
        assert first is not None
        assert first.addresses == (GOOD,)
        # Near its end it is used, and asked for again; by then c-ares has been told to forget it.
        assert resolver.find("good.test", now + 18) is first
        wait_until(lambda: len(arrived) == 2)
        resolver.collect(now + 18)
        assert resolver.find("good.test", now + 19) is first
        assert resolver.find("good.test", now + 20.1) is None
        wait_until(lambda: len(arrived) >= 3)
        resolver.collect(now + 20.2)
        last = resolver.find("good.test", now + 20.3)
        assert last is not None
        assert last.fault is Fault.DNS_TEMPORARY
        resolver.close()
