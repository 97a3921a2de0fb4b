"""Days and partitions of the attempt log."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.days import bounds, day_of, days_ahead, parse_partition_name, partition_name


def test_a_day_is_a_utc_day() -> None:
    """A moment's day is that of UTC, whatever zone it is told in."""
    west = dt.timezone(dt.timedelta(hours=-8))

    assert day_of(dt.datetime(2026, 11, 30, 23, 59, 59, tzinfo=dt.UTC)) == dt.date(2026, 11, 30)
    assert day_of(dt.datetime(2026, 11, 30, 16, 0, tzinfo=west)) == dt.date(2026, 12, 1)


def test_a_moment_without_a_zone_is_refused() -> None:
    """A naive moment has no day: it would depend on the machine."""
    with pytest.raises(ValueError, match="zone"):
        day_of(dt.datetime(2026, 11, 30))  # noqa: DTZ001  # what is tested


def test_partitions_are_named_and_bounded_by_day() -> None:
    """Name and bounds of a day, across a month's end, offset and all."""
    day = dt.date(2026, 11, 30)

    assert partition_name(day) == "delivery_attempts_20261130"
    assert bounds(day) == ("2026-11-30 00:00:00+00", "2026-12-01 00:00:00+00")


@pytest.mark.parametrize(
    "name",
    [
        "delivery_attempts",
        "delivery_attempts_default",
        "delivery_attempts_20261131",
        "delivery_attempts_2026113",
        "delivery_attempts_202611300",
        "delivery_attempts_20261130\n",
        "delivery_attempts_２０２６１１３０",
        "xdelivery_attempts_20261130",
        "",
    ],
)
def test_other_tables_are_no_partitions(name: str) -> None:
    """Only the names that Relay gives are read as days: nothing else may be dropped by age."""
    assert parse_partition_name(name) is None


@given(st.dates(max_value=dt.date(9999, 12, 30)))
def test_names_come_back_as_their_day_and_days_join(day: dt.date) -> None:
    """Every day's name reads back, and its upper bound is the next day's lower one."""
    assert parse_partition_name(partition_name(day)) == day
    assert bounds(day)[1] == bounds(day + dt.timedelta(days=1))[0]


def test_days_ahead_begin_today() -> None:
    """Today counts in, and a year's end is no gap."""
    assert days_ahead(dt.date(2026, 12, 30), 2) == [dt.date(2026, 12, 30), dt.date(2026, 12, 31), dt.date(2027, 1, 1)]
