"""The verdict on an attempt: every row of the outcome table that a request can come to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.model import AttemptClass, BreakerEffect, DeadReason
from relay.core.observation import Fault, Observation
from relay.core.outcome import (
    PAYLOAD_TOO_LARGE,
    REFUSED_TEXT,
    WORKER_LOST,
    Outcome,
    internal_wait_seconds,
    judge,
)

SUCCESS, RETRYABLE, PERMANENT, DEFERRED = AttemptClass
NONE, ANSWERED, FAILED = BreakerEffect


def verdict(*, retry_statuses: frozenset[int] = frozenset(), **seen: Any) -> Outcome:
    return judge(Observation(**seen), retry_statuses=retry_statuses, now=0.0, retry_after_max_s=3_600.0)


def asking(seconds: str) -> list[tuple[str, str]]:
    return [("content-type", "text/plain"), ("retry-after", seconds)]


@pytest.mark.parametrize("status", range(200, 300))
def test_every_2xx_is_success(status: int) -> None:
    """B-40: each 2xx is success, and says nothing more."""
    outcome = verdict(status=status)

    assert outcome == Outcome(cls=SUCCESS, breaker=ANSWERED)


@pytest.mark.parametrize("fault", [None, Fault.TIMEOUT, Fault.CONNECTION, Fault.PROTOCOL])
def test_a_2xx_stands_whatever_becomes_of_its_body(fault: Fault | None) -> None:
    """B-40: once the header block was complete, a broken body is noted but changes nothing."""
    assert verdict(status=200, fault=fault, body_incomplete=True) == Outcome(
        cls=SUCCESS, breaker=ANSWERED, body_incomplete=True
    )


def test_success_makes_no_new_value() -> None:
    """The common case costs one comparison: the same constant each time."""
    assert verdict(status=200) is verdict(status=204)


@pytest.mark.parametrize(
    ("status", "asked_s", "waits"), [(429, 2.5, 2.5), (503, 9_999.0, 3_600.0), (429, 0.0, 0.0), (500, 2.5, None)]
)
def test_a_platforms_own_wait_counts_in_the_headers_place(status: int, asked_s: float, waits: float | None) -> None:
    """B-102: what a chat platform asks for in its body counts as Retry-After does, with its fractions, cut the same."""
    outcome = judge(
        Observation(status=status, headers=asking("60")),
        retry_statuses=frozenset(),
        now=0.0,
        retry_after_max_s=3_600.0,
        asked_s=asked_s,
    )

    assert (outcome.cls, outcome.retry_after_s) == (RETRYABLE, waits)


@pytest.mark.parametrize("status", range(300, 400))
def test_every_3xx_is_permanent(status: int) -> None:
    """B-40: redirects are an answer, never followed, and say so."""
    outcome = verdict(status=status)

    assert (outcome.cls, outcome.code, outcome.breaker) == (PERMANENT, "redirect", ANSWERED)
    assert outcome.dead_reason is DeadReason.PERMANENT_FAILURE
    assert outcome.text == f"the receiver answered {status}; redirects are not followed"


@pytest.mark.parametrize("status", sorted(set(range(400, 500)) - {408, 410, 421, 425, 429}))
def test_other_4xx_are_permanent_unless_named(status: int) -> None:
    """B-40: a 4xx is permanent, retryable where the policy names it, and an answer either way."""
    outcome = verdict(status=status)
    named = verdict(status=status, retry_statuses=frozenset({status}))

    assert (outcome.cls, outcome.code, outcome.breaker) == (PERMANENT, f"http_{status}", ANSWERED)
    assert outcome.dead_reason is DeadReason.PERMANENT_FAILURE
    assert (named.cls, named.code, named.breaker, named.dead_reason) == (RETRYABLE, f"http_{status}", ANSWERED, None)


@pytest.mark.parametrize("status", [408, 421, 425, 429])
def test_some_4xx_are_always_retried(status: int) -> None:
    """B-40: late, early and misdirected requests and a plea to slow down are retried, and count as answers."""
    outcome = verdict(status=status)

    assert (outcome.cls, outcome.breaker, outcome.dead_reason) == (RETRYABLE, ANSWERED, None)
    assert not outcome.holds_endpoint


def test_410_ends_the_endpoint() -> None:
    """B-40: 410 is dead with `gone` and disables the endpoint, whatever the policy names."""
    for outcome in (verdict(status=410), verdict(status=410, retry_statuses=frozenset({410}))):
        assert (outcome.cls, outcome.code, outcome.breaker) == (PERMANENT, "http_410", ANSWERED)
        assert outcome.dead_reason is DeadReason.GONE
        assert outcome.disables_endpoint


@pytest.mark.parametrize("status", range(500, 1000))
def test_every_status_from_500_is_retried_and_counts(status: int) -> None:
    """B-40: 5xx, and 600 to 999 as 5xx, are retryable and a failure to the breaker."""
    outcome = verdict(status=status)

    assert (outcome.cls, outcome.code, outcome.breaker) == (RETRYABLE, f"http_{status}", FAILED)
    assert not outcome.disables_endpoint


@pytest.mark.parametrize(
    ("status", "retry_after", "cls", "wait_s", "holds"),
    [
        (429, "30", RETRYABLE, 30.0, True),
        (503, "30", RETRYABLE, 30.0, True),
        (413, "30", RETRYABLE, 30.0, False),
        (413, "0", RETRYABLE, 0.0, False),
        (429, "0", RETRYABLE, 0.0, False),
        (429, "Thu, 01 Jan 1970 00:01:30 GMT", RETRYABLE, 90.0, True),
        (429, "Fri, 31 Dec 9999 23:59:59 GMT", RETRYABLE, 3_600.0, True),
        (503, "9999999999", RETRYABLE, 3_600.0, True),
        (429, "-5", RETRYABLE, None, False),
        (429, "soon", RETRYABLE, None, False),
        (413, "soon", PERMANENT, None, False),
        (500, "30", RETRYABLE, None, False),
        (502, "30", RETRYABLE, None, False),
        (404, "30", PERMANENT, None, False),
        (301, "30", PERMANENT, None, False),
        (200, "30", SUCCESS, None, False),
    ],
)
def test_retry_after_counts_where_it_may(
    status: int, retry_after: str, cls: AttemptClass, wait_s: float | None, holds: bool
) -> None:
    """B-31: Retry-After is heard on 429 and 503, which hold the endpoint, and on 413, which does not."""
    outcome = verdict(status=status, headers=asking(retry_after))

    assert (outcome.cls, outcome.retry_after_s, outcome.holds_endpoint) == (cls, wait_s, holds)


@pytest.mark.parametrize(
    ("fault", "cls", "code", "breaker", "dead_reason"),
    [
        (Fault.TIMEOUT, RETRYABLE, "timeout", FAILED, None),
        (Fault.CONNECTION, RETRYABLE, "connection", FAILED, None),
        (Fault.TLS, RETRYABLE, "tls", FAILED, None),
        (Fault.DNS, RETRYABLE, "dns", FAILED, None),
        (Fault.DNS_TEMPORARY, RETRYABLE, "dns_temporary", NONE, None),
        (Fault.PROTOCOL, RETRYABLE, "protocol", FAILED, None),
        (Fault.UPGRADE, PERMANENT, "protocol", ANSWERED, DeadReason.PERMANENT_FAILURE),
        (Fault.REFUSED, PERMANENT, "refused", NONE, DeadReason.REFUSED),
        (Fault.UNBUILDABLE, PERMANENT, "unbuildable", NONE, DeadReason.PERMANENT_FAILURE),
        (Fault.INTERNAL, DEFERRED, "internal", NONE, None),
    ],
)
def test_every_fault_has_its_row(
    fault: Fault, cls: AttemptClass, code: str, breaker: BreakerEffect, dead_reason: DeadReason | None
) -> None:
    """B-40, B-41: without an answer the fault decides."""
    outcome = verdict(fault=fault)

    assert (outcome.cls, outcome.code, outcome.breaker, outcome.dead_reason) == (cls, code, breaker, dead_reason)
    assert outcome.text


def test_no_fault_is_forgotten() -> None:
    """A fault that is added later has a verdict too."""
    assert all(verdict(fault=fault).code for fault in Fault)


def test_what_the_sender_cannot_explain_is_a_fault_of_ours() -> None:
    """Neither an answer nor a fault never ends a delivery."""
    assert verdict().code == "internal"
    assert verdict().cls is DEFERRED


def test_the_senders_text_is_kept_but_a_refusals() -> None:
    """The operator reads the sender's words; a refusal's are always the same, and tell nothing of our networks."""
    assert verdict(fault=Fault.TLS, text="certificate has expired").text == "certificate has expired"
    assert verdict(fault=Fault.REFUSED, text="10.0.0.7 is private").text == REFUSED_TEXT


@pytest.mark.parametrize(
    ("location", "host"),
    [
        ("https://user:pass@Other.Example:8443/path?token=1#x", "other.example"),
        ("//cdn.example/x", "cdn.example"),
        ("https://[2001:db8::1]/", "2001:db8::1"),
        ("/elsewhere?token=1", None),
        ("", None),
        ("https://", None),
        ("https://[::1", None),
        ("https://ex\u00e4mple/", None),
        ("https://a b/", None),
        ("https://\x1b[31mred/", None),
        ("https://" + "a" * 300, None),
        ("\xff\xfe\x00", None),
    ],
)
def test_a_redirects_text_names_the_targets_host_only(location: str, host: str | None) -> None:
    """The hint shows where a redirect points to, without what may be secret in it; what is malformed shows nothing."""
    text = verdict(status=302, headers=[("location", location)]).text

    suffix = f" (to {host})" if host else ""
    assert text == "the receiver answered 302; redirects are not followed" + suffix


def test_rows_that_no_request_comes_to() -> None:
    """B-4, B-24: an oversized payload is dead under its own reason; a lost worker is a retry that blames nobody."""
    assert (PAYLOAD_TOO_LARGE.cls, PAYLOAD_TOO_LARGE.breaker) == (PERMANENT, NONE)
    assert PAYLOAD_TOO_LARGE.dead_reason is DeadReason.PAYLOAD_TOO_LARGE
    assert (WORKER_LOST.cls, WORKER_LOST.code, WORKER_LOST.breaker) == (RETRYABLE, "worker_lost", NONE)


def test_the_wait_after_our_own_fault_grows_to_five_minutes() -> None:
    """Waits double from 5 s and stay at 300 s, however often."""
    assert [internal_wait_seconds(n) for n in (0, 1, 2, 5, 6, 7, 10**9)] == [5, 10, 20, 160, 300, 300, 300]


@given(
    st.none() | st.sampled_from(Fault),
    st.none() | st.integers(100, 999),
    st.lists(st.tuples(st.sampled_from(["location", "retry-after", "x"]), st.text(st.characters(max_codepoint=255)))),
    st.frozensets(st.integers(400, 499)),
    st.floats(0, 86_400),
)
def test_every_observation_has_a_consistent_verdict(
    fault: Fault | None, status: int | None, headers: list[tuple[str, str]], named: frozenset[int], cap: float
) -> None:
    """Nothing that a receiver does raises; a reason stands exactly with permanent failures; waits keep to the cap."""
    observation = Observation(fault=fault, status=status, headers=headers)
    outcome = judge(observation, retry_statuses=named, now=1.8e9, retry_after_max_s=cap)

    assert (outcome.dead_reason is not None) == (outcome.cls is PERMANENT)
    assert (outcome.code is None) == (outcome.cls is SUCCESS)
    assert outcome.retry_after_s is None or 0 <= outcome.retry_after_s <= cap
    assert not outcome.holds_endpoint or outcome.cls is RETRYABLE
    assert outcome.text is None or outcome.text.isprintable()
