"""Filters of lists and replays, and the times in them: what is taken, what is refused by name, what comes back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.filters import DeliveryFilter, TimeRange, parse_delivery_filter
from relay.core.model import DeadReason, Status
from relay.core.times import parse_time

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31t12:00:00z", NOON),
        ("2026-01-31T13:30:00+01:30", NOON),
        ("2026-01-31T00:00:00-12:00", NOON),
        ("2026-01-31T12:00:00-00:00", NOON),
        ("2026-01-31T12:00:00.5Z", NOON.replace(microsecond=500_000)),
        ("2026-01-31T12:00:00.123456999Z", NOON.replace(microsecond=123_456)),
        ("2024-02-29T12:00:00Z", NOON.replace(year=2024, month=2, day=29)),
    ],
)
def test_times(text: str, expected: datetime) -> None:
    """RFC 3339 with any offset is read into UTC, to the microsecond."""
    found = parse_time(text, "since")
    assert (found, found.tzinfo) == (expected, UTC)


@pytest.mark.parametrize(
    "text",
    [
        None,
        5,
        "",
        "now",
        "2026-01-31",
        "2026-01-31T12:00:00",
        "2026-01-31 12:00:00Z",
        "2026-01-31T12:00Z",
        "2026-01-31T12:00:00 01:00",
        "2026-01-31T12:00:00+0100",
        "2026-01-31T12:00:00+24:00",
        "2026-02-29T12:00:00Z",
        "2026-01-31T24:00:00Z",
        "2026-12-31T23:59:60Z",
        "2026-01-31T12:00:00.Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+01:00",
        "9999-12-31T23:59:59-01:00",
        "٢٠٢٦-01-31T12:00:00Z",
        " 2026-01-31T12:00:00Z",
        "2026-01-31T12:00:00Z\n",
    ],
)
def test_what_is_no_time(text: object) -> None:
    """Anything else is refused under its field's name, and nothing raises another error."""
    with pytest.raises(InvalidInput) as caught:
        parse_time(text, "until")
    assert (caught.value.field, caught.value.code) == ("until", "invalid_time")


_times = st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2999, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(
    st.sampled_from([None, *Status]),
    st.none() | st.from_regex(r"\A[a-z]{1,9}(\.[a-z]{1,9}){0,2}\Z"),
    st.sampled_from([None, *(reason.value for reason in DeadReason)]),
    st.none() | _times,
    st.none() | st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=9000)),
)
def test_a_filter_reads_back_as_itself(
    status: Status | None, event_type: str | None, reason: str | None, since: datetime | None, length: timedelta | None
) -> None:
    """What a job stores of its filter, and a cursor is bound to, says all of it."""
    until = None if length is None else (since or NOON) + length
    wanted = DeliveryFilter(
        status=Status.DEAD if reason is not None else status,
        event_type=event_type,
        reason=reason,
        made=TimeRange(since=since, until=until),
    )
    assert parse_delivery_filter(wanted.to_json()) == wanted
    other = DeliveryFilter(status=Status.CANCELED, event_type=event_type, reason=None, made=wanted.made)
    assert (str(wanted) == str(other)) is (wanted == other)


def test_one_moment_is_one_filter() -> None:
    """A time's offset makes no other filter, so that a cursor holds."""
    zone = timezone(timedelta(hours=1))
    found = [parse_delivery_filter({"since": at.isoformat()}) for at in (NOON, NOON.astimezone(zone))]
    assert found[0] == found[1]
    assert str(found[0]) == str(found[1])


def test_defaults() -> None:
    """Nothing given wants everything, or the default; a reason means dead ones."""
    assert parse_delivery_filter({}) == DeliveryFilter()
    assert parse_delivery_filter({"status": None}, default=Status.DEAD).status is Status.DEAD
    assert parse_delivery_filter({"status": "canceled"}, default=Status.DEAD).status is Status.CANCELED
    assert parse_delivery_filter({"reason": "gone"}).status is Status.DEAD


@pytest.mark.parametrize(
    ("given_", "field", "code"),
    [
        ({"status": "lost"}, "status", "not_a_choice"),
        ({"status": "DEAD"}, "status", "not_a_choice"),
        ({"status": ""}, "status", "not_a_choice"),
        ({"status": 3}, "status", "not_a_choice"),
        ({"status": ["dead"]}, "status", "not_a_choice"),
        ({"status": "pending"}, "status", "not_a_choice"),
        ({"reason": "bored"}, "reason", "not_a_choice"),
        ({"reason": {}}, "reason", "not_a_choice"),
        ({"reason": "gone", "status": "canceled"}, "reason", "contradiction"),
        ({"event_type": "a..b"}, "event_type", "invalid_type"),
        ({"event_type": "a.*"}, "event_type", "invalid_type"),
        ({"since": "2026-01-31T12:00:00Z", "until": "2026-01-31T12:00:00Z"}, "until", "invalid"),
    ],
)
def test_refusals(given_: dict[str, object], field: str, code: str) -> None:
    """Each fault is named by its field; of choices, those that work are named."""
    with pytest.raises(InvalidInput) as caught:
        parse_delivery_filter(given_, statuses=(Status.DEAD, Status.CANCELED))
    assert (caught.value.field, caught.value.code) == (field, code)
    if field == "status":
        assert "dead, canceled" in str(caught.value)
