"""Chat transports over real connections, against servers that speak the platforms' own language."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from relay.core.model import AttemptClass
from relay.core.observation import Fault, Observation
from relay.core.outcome import judge
from relay.core.secret import Secret
from relay.core.transports import TOKEN, TRANSPORTS, Built, Transport, redacted
from tests.chat_platforms import PLATFORMS, Answer, Platform
from tests.hostile import OK, Peer, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKUP = "_ * [ ] ( ) ~ > # + - = | { } . ! ` ``` <b>bold</b> &amp; **x* @everyone <!channel> <@U1> || \\ :100:"


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    with Sender(snippet_bytes=2048) as sender:
        yield sender


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    return TRANSPORTS[request.param]


@pytest.fixture
def platform(transport: Transport) -> Iterator[Platform]:
    with PLATFORMS[transport.name]() as platform:
        yield platform


def build(
    transport: Transport,
    platform: Platform,
    payload: bytes = b'{"a":1}',
    *,
    content_type: str = "application/json",
    token: str | None = None,
    base_url: str | None = None,
) -> Built:
    return transport.build(
        event_type="order_item.paid",
        payload=payload,
        content_type=content_type,
        address=transport.check_address(platform.address),
        secret=transport.check_secret(token or platform.token),
        base_url=base_url or platform.url,
    )


def send(sender: Sender, built: Built, **changes: int) -> Observation:
    """Send it and return what was seen, as the engine tells it: nothing is taken out yet."""
    headers = [f"Content-Type: {built.content_type}"]
    seen = sender.send(built.url, body=built.body, headers=headers, **changes).observation
    assert seen is not None
    return seen


def test_a_message_arrives(sender: Sender, transport: Transport, platform: Platform) -> None:
    """B-102, C-69: type and payload are read as they were written, whatever they hold, and nobody is pinged."""
    for payload, content_type, read_as in (
        (MARKUP.encode(), "text/plain", MARKUP),
        (b'{"t":"d\\u00f6ner","n":[1.0]}', "application/json", '{\n  "t": "döner",\n  "n": [\n    1.0\n  ]\n}'),
        (b"\0\1", "image/png", "(2 bytes of image/png, not text)"),
    ):
        seen = send(sender, build(transport, platform, payload, content_type=content_type))
        assert (seen.status, seen.fault) == (200, None), seen.snippet
        assert platform.said.pop() == f"order_item.paid\n{read_as}"
    assert send(sender, build(transport, platform, b"", content_type="text/plain")).status == 200
    assert platform.said == ["order_item.paid"]
    assert platform.pinged == []


@pytest.mark.parametrize("unit", ["a", "&", "`", "👩\u200d👩\u200d👧", "e\u0301"])
def test_a_long_message_is_taken(sender: Sender, transport: Transport, platform: Platform, unit: str) -> None:
    """What is too long is cut so that the platform takes it, and nothing of it is cut once more there."""
    for payload, content_type in (
        ((unit * 60_000).encode(), "text/plain"),
        (json.dumps({"a": [{"b": unit}] * 10_000}).encode(), "application/json"),
    ):
        seen = send(sender, build(transport, platform, payload, content_type=content_type))
        assert seen.status == 200, seen.snippet
        assert platform.said[-1].endswith(f"\n… (cut: the payload has {len(payload)} bytes)")


def test_a_rate_limit_holds_the_endpoint(sender: Sender, transport: Transport, platform: Platform) -> None:
    """B-31, B-102: the platform's wait is read from where it says it, with its fractions, and the retry arrives."""
    platform.waits = [64.5, 3]
    now = time.time()
    waits = []
    for _ in range(2):
        seen = send(sender, build(transport, platform))
        assert seen.status == transport.status(status=429, snippet=seen.snippet) == 429
        waits.append(transport.retry_after(headers=seen.headers, snippet=seen.snippet, now=now))
    assert waits == [64.5 if transport.name == "discord" else 64, 3]
    assert platform.said == []
    assert send(sender, build(transport, platform)).status == 200
    assert len(platform.said) == 1


REFUSALS = {
    "telegram": (401, b'"description": "Unauthorized"'),
    "discord": (401, b'"Invalid Webhook Token"'),
    "slack": (403, b"invalid_token"),
}


def test_a_wrong_token_is_permanent(sender: Sender, transport: Transport, platform: Platform) -> None:
    """A token that the platform does not know is no reason to try again."""
    seen = send(sender, build(transport, platform, token=platform.token[:-1] + "X"))
    status, said = REFUSALS[transport.name]
    assert seen.status == status
    assert said in seen.snippet
    verdict = judge(seen, retry_statuses=frozenset(), now=time.time(), retry_after_max_s=60)
    assert verdict.cls is AttemptClass.PERMANENT_FAILURE


def test_a_token_is_in_nothing_that_is_kept(sender: Sender, transport: Transport, platform: Platform) -> None:
    """C-70: whatever fails (401, DNS, TLS, connection, time-out), and even where the reply repeats the URL."""
    secret = Secret(platform.token)
    echo = build(transport, platform).url
    platform.scripted = [
        Answer(401, f"no such path: {echo}", {"X-Path": echo}),
        # The token is cut off where the snippet ends.
        Answer(404, "x" * 2020 + platform.token),
        Answer(302, "", {"Location": echo}),
    ]
    kept = [send(sender, build(transport, platform)) for _ in range(3)]

    def speak_plainly(peer: Peer) -> None:
        peer.send(OK)
        peer.hold()

    silent, plain = Receiver(lambda peer: peer.hold()), Receiver(speak_plainly)
    with silent, plain:
        for base_url, fault in (
            ("http://nowhere.invalid", Fault.DNS),
            (f"https://127.0.0.1:{plain.port}", Fault.TLS),
            ("http://127.0.0.1:1", Fault.CONNECTION),
            (f"http://127.0.0.1:{silent.port}", Fault.TIMEOUT),
        ):
            seen = send(
                sender,
                build(transport, platform, base_url=base_url),
                timeout_ms=400 if fault is Fault.TIMEOUT else 10_000,
            )
            assert seen.fault is fault
            kept.append(seen)
    for seen in kept:
        assert "marker" not in repr(redacted(seen, secret)).lower()
    for seen in kept[3:]:
        # Faults need no help: an error's text has no URL in it.
        assert "marker" not in repr(seen).lower()
    assert redacted(kept[0], secret).snippet.decode() == f"no such path: {echo.replace(platform.token, TOKEN)}"
