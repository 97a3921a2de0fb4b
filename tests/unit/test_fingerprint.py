"""Fingerprints: equal just where the JSON values are, numbers by their spelling."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.fingerprint import check_key, fingerprint

if TYPE_CHECKING:
    import random


class _Number(str):
    """A number by its spelling."""

    __slots__ = ()


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,3})?", fullmatch=True).map(_Number)
STRINGS = st.text(st.characters())  # lone surrogates among them
#: Objects as lists of members in a tuple, so that names can repeat.
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(STRINGS, inner), max_size=4).map(tuple),
    max_leaves=12,
)


def _spelled(value: Any, chance: random.Random) -> str:
    """Write a value as JSON with white space, escapes and order of members by chance."""

    def space() -> str:
        return chance.choice(["", "", " ", "\n\t", "\r "])

    if isinstance(value, _Number):
        return f"{space()}{value!s}{space()}"
    if isinstance(value, str):
        return f"{space()}{_string(value, chance)}{space()}"
    if isinstance(value, list):
        return f"{space()}[{','.join(_spelled(one, chance) for one in value) or space()}]{space()}"
    if isinstance(value, tuple):
        members = list(value)
        chance.shuffle(members)
        # Those of one name keep their order.
        by_name: dict[str, list[Any]] = {}
        for name, member in value:
            by_name.setdefault(name, []).append(member)
        ordered = [(name, by_name[name].pop(0)) for name, _ in members]
        inner = ",".join(f"{space()}{_string(name, chance)}{space()}:{_spelled(one, chance)}" for name, one in ordered)
        return f"{space()}{{{inner or space()}}}{space()}"
    return f"{space()}{json.dumps(value)}{space()}"


def _string(text: str, chance: random.Random) -> str:
    parts = []
    for character in text:
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        escaped = json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"
        is_half = "\ud800" <= character <= "\udfff"
        parts.append(escaped if is_half or chance.random() < 0.3 else plain)
    return '"' + "".join(parts) + '"'


def _joined(value: Any) -> Any:
    """The value as JSON can tell it: two halves of a pair beside each other are one character."""
    if isinstance(value, _Number):
        return value
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, list):
        return [_joined(one) for one in value]
    if isinstance(value, tuple):
        return tuple((_joined(name), _joined(one)) for name, one in value)
    return value


def _normal(value: Any) -> Any:
    """What decides: members sorted by name, kinds told apart."""
    if isinstance(value, _Number):
        return ("number", str(value))
    if isinstance(value, list):
        return ("array", [_normal(one) for one in value])
    if isinstance(value, tuple):
        return ("object", [(name, _normal(one)) for name, one in sorted(value, key=lambda member: member[0])])
    return (type(value).__name__, value)


def _of(text: str) -> bytes:
    return fingerprint(("event", "a"), text.encode(), is_json=True)


@given(VALUES.map(_joined), st.randoms(use_true_random=False))
def test_one_value_has_one_fingerprint(value: Any, chance: random.Random) -> None:
    """B-12: white space, the order of members and escapes do not matter."""
    assert _of(_spelled(value, chance)) == _of(_spelled(value, chance))


@given(VALUES.map(_joined), VALUES.map(_joined), st.randoms(use_true_random=False))
def test_other_values_have_others(one: Any, two: Any, chance: random.Random) -> None:
    """B-12: everything else does: fingerprints are equal just where the values are."""
    assert (_of(_spelled(one, chance)) == _of(_spelled(two, chance))) == (_normal(one) == _normal(two))


@pytest.mark.parametrize(
    "spellings",
    [
        ["1", "1.0", "1e0", "1E0", "1.00", "10e-1", '"1"', "[1]", "true"],
        ["0", "-0", "0.0", "null", "false", '""', "[]", "{}"],
        ['{"a":1,"a":2}', '{"a":2,"a":1}', '{"a":2}', '{"a":1}', '{"a":[1,2]}'],
        ['"\\ud83d\\ude00"', '"\\ud83d"', '"\\ude00"', '"\\ude00\\ud83d"', '"?"', '"\\\\ud83d"'],
        ['{"n":"1"}', '{"n":1}', '{"o":["n",1]}', '[{"n":"1"}]', '["n","1"]', '{"o":["n","1"]}'],
        ["9" * 5000, "9" * 4999 + "8", "1e400", "1e401"],
        ['"\\u0000"', '"0"', '"\\\\u0000"'],
    ],
)
def test_spellings_that_differ(spellings: list[str]) -> None:
    """C-39: numbers of any length are compared as spelled, halves of pairs equal only themselves, kinds are kept."""
    assert len({_of(text) for text in spellings}) == len(spellings)


def test_parts_and_kinds_are_kept_apart() -> None:
    """The parts in front count each for itself, and a body of bytes is never equal to one of JSON."""
    given = [
        fingerprint(parts, b"1", is_json=is_json)
        for parts in ((), ("a",), ("ab",), ("a", "b"), ("", "ab"))
        for is_json in (True, False)
    ]
    assert len(set(given)) == len(given)
    assert fingerprint((), b"1 ", is_json=True) == given[0]
    assert fingerprint((), b"1 ", is_json=False) not in given


def test_large_and_deep_bodies() -> None:
    """100 levels, 50,000 members of one name's beginning, and numbers without end take no more than their share."""
    _of("[" * 100 + "]" * 100)
    _of('{"a":' * 100 + "1" + "}" * 100)
    began = time.process_time()
    _of("{" + ",".join(f'"{"k" * 40}{number}":{number}' for number in range(50_000)) + "}")
    _of("9" * 1_000_000)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("key", ["k", "!", "~" * 255, "a-b_c/d=="])
def test_keys(key: str) -> None:
    """B-10: 1 to 255 visible ASCII characters are a key."""
    assert check_key(key) == key


@pytest.mark.parametrize("key", ["", "a b", " a", "a\t", "k" * 256, "\xe9", "a\x7f", "a\0", None, 5])
def test_no_keys(key: object) -> None:
    """C-30: anything else is not, and the error names the header."""
    with pytest.raises(InvalidInput) as error:
        check_key(key)
    assert error.value.field == "Idempotency-Key"
