"""Workers behind an egress proxy: what is on record of a delivery that went through one, and of one that did not (B-86)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.core.model import AttemptClass, Status
from tests.hostile import Peer, keep_answering, tunnel, wait_until
from tests.hostile import Receiver as Raw

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from relay.bootstrap.worker import Worker
    from tests.rows import Rows

#: Two addresses, as every resolver has them: ::1 and 127.0.0.1 (RFC 6761 section 6.3).
BOTH = "hooks.localhost"


def test_deliveries_go_through_the_proxy_to_the_address_that_answers(
    start_worker: Callable[..., Worker], rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """One attempt, in which the next address is tried where the proxy refuses the first. What the policy refuses never
    reaches the proxy, whose absence then spends no attempt; its login is in no record and no log."""
    targets, join = tunnel()
    refused: list[str] = []

    def script(peer: Peer) -> None:
        # The first one that it is asked for.
        if not refused:
            refused.append(peer.socket.recv(65536).decode("latin-1"))
            peer.send(b"HTTP/1.1 502 No way\r\nContent-Length: 0\r\n\r\n")
            return
        join(peer)

    with Raw(keep_answering(), host="127.0.0.1") as four, Raw(keep_answering(), host="::1", port=four.port) as six:
        with Raw(script) as proxy:
            login = "http://relay:marker-of-the-login@"
            start_worker(RELAY_EGRESS_PROXY=proxy.url("").replace("http://", login))
            sent = rows.delivery(rows.endpoint(four.url(host=BOTH)))
            wait_until(lambda: rows.get(sent)["status"] == Status.DELIVERED)
            # The tunnel that stands is taken again.
            again = rows.delivery(rows.get(sent)["endpoint_id"])
            wait_until(lambda: rows.get(again)["status"] == Status.DELIVERED)
            metadata = rows.delivery(rows.endpoint("http://169.254.169.254/latest"))
            wait_until(lambda: rows.get(metadata)["status"] == Status.DEAD)
            accepted = proxy.accepted
        away = rows.delivery(rows.endpoint(four.url(host="127.0.0.1")))
        wait_until(lambda: rows.get(away)["deferred_reason"] == "internal")

    (line,) = rows.attempts(sent)
    assert (line["class"], line["number"], line["sends"], line["status"]) == (AttemptClass.SUCCESS, 1, 1, 200)
    assert len(four.requests) + len(six.requests) == 2
    asked = [head.split()[1].rpartition(":")[0] for head in (*refused, *targets)]
    assert (accepted, asked) == (2, ["127.0.0.1", "[::1]"])
    assert "marker-of-the-login" not in "".join(targets)
    assert (rows.get(metadata)["reason"], rows.get(away)["attempt_count"]) == ("refused", 0)
    record = str(
        rows.sql("select to_jsonb(a)::text, to_jsonb(d)::text from relay.delivery_attempts a, relay.deliveries d")
    )
    assert "marker-of-the-login" not in record + caplog.text
