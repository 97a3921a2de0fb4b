"""Cursors survive the way out and back, and nothing else passes for one."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core import cursor
from relay.core.errors import InvalidInput

KEY = b"k" * 32
AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


@given(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2999, 1, 1)), st.uuids())  # noqa: DTZ001
def test_round_trip(naive: datetime, row_id: UUID) -> None:
    """A cursor gives back the very microsecond and id that it was made of."""
    at = naive.replace(tzinfo=UTC)
    text = cursor.encode(at, row_id, of="endpoints:w", key=KEY)
    assert cursor.decode(text, of="endpoints:w", key=KEY) == (at, row_id)


def test_two_ids() -> None:
    """A list whose rows stand within other rows has both ids in its cursor, and no list takes the other kind."""
    other = UUID("01890a5d-ac96-774b-bcce-b302099a8058")
    text = cursor.encode(AT, ID, other, of="x", key=KEY)
    assert cursor.decode(text, of="x", key=KEY, ids=2) == (AT, ID, other)
    for asked, ids in ((text, 1), (cursor.encode(AT, ID, of="x", key=KEY), 2)):
        with pytest.raises(InvalidInput):
            cursor.decode(asked, of="x", key=KEY, ids=ids)


@pytest.mark.parametrize(("of", "key"), [("keys:w", KEY), ("endpoints:v", KEY), ("endpoints:w", b"x" * 32)])
def test_another_list_or_key_refuses_it(of: str, key: bytes) -> None:
    """A cursor of another list, workspace or installation is refused."""
    text = cursor.encode(AT, ID, of="endpoints:w", key=KEY)
    with pytest.raises(InvalidInput) as caught:
        cursor.decode(text, of=of, key=key)
    assert (caught.value.field, caught.value.code) == ("cursor", "invalid_cursor")


@given(st.integers(0, 53), st.sampled_from("AZaz09-_="))
def test_tampering_is_refused(place: int, letter: str) -> None:
    """Changing any one character is noticed."""
    text = cursor.encode(AT, ID, of="x", key=KEY)
    changed = text[:place] + letter + text[place + 1 :]
    if changed != text:
        with pytest.raises(InvalidInput):
            cursor.decode(changed, of="x", key=KEY)


@pytest.mark.parametrize("text", ["", "!", "é", "A", "AAAA", "=" * 54, " " * 54, "\0"])
def test_nonsense_is_refused(text: str) -> None:
    """What was never a cursor is refused, not an error of another kind."""
    with pytest.raises(InvalidInput):
        cursor.decode(text, of="x", key=KEY)


def test_one_spelling() -> None:
    """White space and padding, which a lenient decoder skips, make another text and so no cursor."""
    text = cursor.encode(AT, ID, of="x", key=KEY)
    for other in (f"{text}==", f"{text}\n", f"{text[:8]}!{text[8:]}"):
        with pytest.raises(InvalidInput):
            cursor.decode(other, of="x", key=KEY)
