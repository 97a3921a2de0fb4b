"""Identifiers: their bits, their order, and the one spelling that is read."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.ids import RANDOM_BYTES, parse_id, uuid7

TIMES = st.integers(0, (1 << 48) - 1)
RANDOM = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)


def test_the_example_of_the_rfc() -> None:
    """The example in RFC 9562 appendix A.6 comes out: the time and both random parts stand where they should."""
    random = (0xCC3 << 62 | 0x18C4DC0C0C07398F).to_bytes(RANDOM_BYTES, "big")
    assert str(uuid7(0x017F22E279B0, random)) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


@given(TIMES, RANDOM)
def test_version_variant_and_time(now_ms: int, random: bytes) -> None:
    """Whatever the input, the id is a version 7 UUID of that millisecond."""
    made = uuid7(now_ms, random)
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == now_ms


@given(TIMES, TIMES, RANDOM, RANDOM)
def test_ids_sort_by_time(first: int, second: int, one: bytes, other: bytes) -> None:
    """Ids of different milliseconds sort as their times do, as numbers and as text."""
    if first != second:
        a, b = uuid7(first, one), uuid7(second, other)
        assert (a < b) == (str(a) < str(b)) == (first < second)


@given(st.integers(0, (1 << 74) - 1), st.integers(0, (1 << 74) - 1))
def test_every_random_bit_counts(one: int, other: int) -> None:
    """Two ids of one millisecond are equal only if the 74 random bits that they take are."""
    made = [uuid7(1, number.to_bytes(RANDOM_BYTES, "big")) for number in (one, other)]
    assert (made[0] == made[1]) == (one == other)


@pytest.mark.parametrize(("now_ms", "random"), [(-1, bytes(10)), (1 << 48, bytes(10)), (0, bytes(9)), (0, bytes(11))])
def test_impossible_arguments_are_refused(now_ms: int, random: bytes) -> None:
    """A time outside 48 bits and too few or many random bytes are mistakes of the program."""
    with pytest.raises(ValueError, match=r"milliseconds|random bytes"):
        uuid7(now_ms, random)


@given(st.uuids())
def test_the_canonical_form_is_read_in_either_case(value: uuid.UUID) -> None:
    """An id reads back from its text in lower and in upper case."""
    assert parse_id(str(value)) == value == parse_id(str(value).upper())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{01890a5d-ac96-774b-bcce-b302099a8057}",
        "urn:uuid:01890a5d-ac96-774b-bcce-b302099a8057",
        "01890a5dac96774bbcceb302099a8057",
        "01890a5d-ac96-774b-bcce-b302099a805",
        "01890a5d-ac96-774b-bcce-b302099a8057\n",
        "01890a5d-ac96-774b-bcce-b302099a80５7",
        "01890a5dac-96-774b-bcce-b302099a8057",
        "0x890a5d-ac96-774b-bcce-b302099a8057",
        None,
        7,
    ],
)
def test_other_spellings_are_refused(text: object) -> None:
    """Anything but the canonical form is refused, under the caller's name for it."""
    with pytest.raises(InvalidInput) as refused:
        parse_id(text, "endpoint_id")
    assert (refused.value.field, refused.value.code) == ("endpoint_id", "invalid_id")
