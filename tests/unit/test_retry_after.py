"""Retry-After: what counts, and for how many seconds."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.retry_after import LONGEST_S, find, parse

#: Mon, 30 Nov 2026 12:00:00 GMT
NOW = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        ("30", 30.0),
        (" 30\t", 30.0),
        ("007", 7.0),
        ("9999999999", LONGEST_S),
        ("9" * 10_000, LONGEST_S),
        ("0" * 10_000 + "5", 5.0),
        ("Mon, 30 Nov 2026 12:01:30 GMT", 90.0),
        ("Mon, 30 Nov 2026 11:59:59 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_S),
        ("Monday, 30-Nov-26 12:01:30 GMT", 90.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Mon Nov 30 12:01:30 2026", 90.0),
        ("Tue Dec  1 12:00:00 2026", 86_400.0),
        ("Mon, 30 Nov 2026 12:00:60 GMT", 60.0),
    ],
)
def test_what_is_valid_counts(value: str, expected: float) -> None:
    """Digits and the three forms of an HTTP date are read; the past means now."""
    assert parse(value, NOW) == expected


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "5.5", "-5", "+5", "5, 6", "5;", "5s", "0x10", "1e3", "1_000", "٣", "５", "²", "\x0030", "30\n",
        "\u00a030", "soon",
        "Mon, 30 Nov 2026 12:01:30", "Mon, 30 Nov 2026 12:01:30 UTC", "Mon, 30 Nov 2026 12:01:30 +0000",
        "mon, 30 nov 2026 12:01:30 gmt", "30 Nov 2026 12:01:30 GMT", "Mon, 1 Dec 2026 12:01:30 GMT",
        "Mon, 31 Nov 2026 12:01:30 GMT", "Mon, 30 Nov 2026 24:00:00 GMT", "Mon, 30 Nov 2026 12:60:00 GMT",
        "Mon, 30 Nov 2026 12:00:61 GMT", "Mon, 00 Nov 2026 12:00:00 GMT", "Sat, 01 Jan 0000 00:00:00 GMT",
        "Mon, 30-Nov-26 12:01:30 GMT", "Monday, 30-Nov-2026 12:01:30 GMT", "Mon Dec 1 12:00:00 2026",
        "2026-11-30T12:01:30Z", "Mon, 30 Nov 2026 12:01:30 GMT, 5",
    ],
)  # fmt: skip
def test_nonsense_is_ignored(value: str) -> None:
    """What is neither ASCII digits nor a date as the RFC spells it says nothing."""
    assert parse(value, NOW) is None


def test_a_year_of_two_digits_is_at_most_fifty_years_ahead() -> None:
    """RFC 9110 section 5.6.7: a date that looks more than 50 years ahead is of the century before."""
    assert parse("Monday, 30-Nov-76 12:00:00 GMT", NOW) == LONGEST_S
    assert parse("Monday, 30-Nov-76 12:00:01 GMT", NOW) == 0.0
    assert parse("Tuesday, 01-Jan-77 00:00:00 GMT", NOW) == 0.0


def test_a_year_of_two_digits_can_be_of_the_next_century() -> None:
    """Close to a century's end the next one's years are ahead, not far past."""
    now = dt.datetime(2099, 12, 31, 23, 59, tzinfo=dt.UTC).timestamp()

    assert parse("Friday, 01-Jan-00 00:00:00 GMT", now) == 60.0


def test_the_first_valid_line_counts() -> None:
    """Of several lines the first valid one counts, other headers never do."""
    headers = [("x-retry-after", "1"), ("retry-after", "soon"), ("retry-after", "7"), ("retry-after", "3")]

    assert find(headers, NOW) == 7.0
    assert find([("date", "5")], NOW) is None
    assert find([], NOW) is None


@given(
    st.text() | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT") | st.datetimes().map(str)
)
def test_no_value_raises(value: str) -> None:
    """Whatever a receiver writes comes to None or to a wait within bounds."""
    seconds = parse(value, NOW)

    assert seconds is None or 0.0 <= seconds <= LONGEST_S


@given(st.integers(0, 2_082_758_400))
def test_the_date_forms_agree(epoch_s: int) -> None:
    """One moment, from 1970 to 2035, means the same wait in each form."""
    moment = dt.datetime.fromtimestamp(epoch_s, tz=dt.UTC)
    expected = max(epoch_s - NOW, 0.0)

    for form in ("%a, %d %b %Y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"):
        assert parse(moment.strftime(form), NOW) == expected
    if moment.year > 1976:
        assert parse(moment.strftime("%A, %d-%b-%y %H:%M:%S GMT"), NOW) == expected
