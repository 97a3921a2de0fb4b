"""Callers' headers: what may be sent goes out as written, what could break the request is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.headers import (
    MAX_HEADERS,
    MAX_NAME_LENGTH,
    MAX_TOTAL_BYTES,
    MAX_VALUE_BYTES,
    check_headers,
    curl_header,
)


def test_order_case_repeats_and_empty_values_stay() -> None:
    """Headers come back as they were given, and so do their spelling, repeats and empty values (B-112)."""
    given_pairs = [
        ("X-B", "1"),
        ("x-a", ""),
        ("X-B", "2"),
        ("Cookie", "a=b"),
        ("X-Tab", "a\tb"),
        ("!#$%&'*+.^_`|~", "x"),
    ]
    assert check_headers(given_pairs) == tuple(given_pairs)
    assert check_headers({"X-B": "1", "Authorization": "Bearer x"}) == (("X-B", "1"), ("Authorization", "Bearer x"))
    assert check_headers([]) == ()


@pytest.mark.parametrize(
    "value",
    [
        "a\r\nX-Evil: 1",
        "a\nb",
        "a\rb",
        "a\r\n b",
        "a\0b",
        "\x7f",
        "é",
        "\x1b[0m",
        " a",
        "a ",
        "\ta",
        " ",
        5,
        None,
        b"x",
    ],
)
def test_values_that_would_not_arrive_are_refused(value: str) -> None:
    """Line breaks, controls, non-ASCII and outer white space are refused; the error names the header only (C-35)."""
    with pytest.raises(InvalidInput) as refused:
        check_headers([("X-Fine", "1"), ("X-Bad", value)])
    assert (refused.value.field, refused.value.code) == ("headers.X-Bad", "invalid_header_value")
    assert "Evil" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\nb", "é", "a\0", "(x)", "x" * (MAX_NAME_LENGTH + 1), None, 1])
def test_names_that_are_no_tokens_are_refused(name: str) -> None:
    """A name outside the token grammar is refused, and shown without its control characters."""
    with pytest.raises(InvalidInput) as refused:
        check_headers([(name, "1")])
    assert refused.value.code == "invalid_header_name"
    assert str(refused.value).isprintable()


FRAMING = [
    *("Host", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "Upgrade", "TE", "Trailer", "Expect"),
    *("Proxy-Authorization", "Proxy-Connection", "HTTP2-Settings", "content_length", "hOST"),
]
SIGNING = ["Relay-Signature", "rElAy-Anything", "relay_signature", "webhook-id", "Webhook-Signature"]


@pytest.mark.parametrize("name", FRAMING)
def test_framing_headers_are_refused(name: str) -> None:
    """What frames the request or concerns the connection is never the caller's, in any spelling (C-36)."""
    for unsigned_job in (False, True):
        with pytest.raises(InvalidInput) as refused:
            check_headers([(name, "1")], unsigned_job=unsigned_job)
        assert (refused.value.field, refused.value.code) == (f"headers.{name}", "forbidden_header")


@pytest.mark.parametrize("name", SIGNING)
def test_signature_headers_are_free_in_unsigned_jobs_only(name: str) -> None:
    """Relay-* and webhook-* are refused wherever Relay may sign, and pass where it does not (B-112)."""
    with pytest.raises(InvalidInput):
        check_headers([(name, "1")])
    assert check_headers([(name, "1")], unsigned_job=True) == ((name, "1"),)


def test_bounds() -> None:
    """The number of headers, a value and the whole are bounded, each exactly at its limit."""
    check_headers([("X", "")] * MAX_HEADERS)
    check_headers([("X", "v" * MAX_VALUE_BYTES)])
    overhead = 4 * (len("X") + len(": \r\n"))
    check_headers(
        [("X", "v" * MAX_VALUE_BYTES)] * 3 + [("X", "v" * (MAX_TOTAL_BYTES - 3 * MAX_VALUE_BYTES - overhead))]
    )
    for too_much in (
        [("X", "")] * (MAX_HEADERS + 1),
        [("X", "v" * (MAX_VALUE_BYTES + 1))],
        [("X", "v" * MAX_VALUE_BYTES)] * 4,
    ):
        with pytest.raises(InvalidInput):
            check_headers(too_much)


@given(st.text(), st.text())
def test_what_passes_is_one_line(name: str, value: str) -> None:
    """Any header that passes makes exactly one printable ASCII line."""
    try:
        pairs = check_headers([(name, value)])
    except InvalidInput:
        return
    line = curl_header(*pairs[0])
    assert line.isascii()
    assert line.replace("\t", " ").isprintable()
    assert line.partition(":" if value else ";")[0] == name


def test_the_form_for_libcurl() -> None:
    """An empty value has the form that libcurl does not drop."""
    assert curl_header("X-A", "b: c") == "X-A: b: c"
    assert curl_header("X-A", "") == "X-A;"
