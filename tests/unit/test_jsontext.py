"""JSON as text: what passes is JSON, what is refused says where, and only `type` is read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput, InvalidJson
from relay.core.jsontext import MAX_DEPTH, scan_event

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("type"), inner),
    max_leaves=30,
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"type":"order.paid"}', "order.paid"),
        (b' \t\r\n{ "a": 1, "type" : "x" } \n', "x"),
        (b'{"\\u0074yp\\u0065":"x"}', "x"),
        (b'{"type":""}', ""),
        (b'{"type":"x\\u0000"}', "x\0"),
        (b'{"a":{"type":"x","type":"y"},"type":"z"}', "z"),
        (b'{"data":[{"type":1}]}', None),
        (b'{"Type":"x"}', None),
        (b'[["type","x"]]', None),
        (b'[{"type":"x"}]', None),
        (b"{}", None),
        (b"[]", None),
        (b'"type"', None),
        (b"null", None),
        (b"-0.5e+3", None),
    ],
)
def test_the_type_is_the_top_level_one(body: bytes, expected: str | None) -> None:
    """Only a member of an outermost object is the type, however it is escaped; any other value has none."""
    assert scan_event(body).type == expected


@pytest.mark.parametrize(
    "body",
    [
        b"[1e400, -1e-400, 12345678901234567890123]",
        b"[" + b"7" * 20_000 + b"]",
        b'"\\ud800"',
        b'{"a":1,"a":2}',
        b'"x\\u0000y"',
        '"é\u2028🚀\x7f"'.encode(),
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b'["' + b"[{" * 5000 + b'"]',
        b"[" + b"[{}]," * 5000 + b"1]",
        b'["\\"[[[", "\\\\", ' + b"[]," * 200 + b"{}]",
    ],
    ids=lambda body: ascii(body[:20]),
)
def test_what_is_json_passes(body: bytes) -> None:
    """Big numbers, lone surrogates by escape, duplicate keys and brackets in strings are JSON (C-30, C-31)."""
    scan_event(body)


@pytest.mark.parametrize(
    ("body", "position", "line", "column"),
    [
        (b"", 0, 1, 1),
        (b"  \n ", 4, 2, 2),
        (b'{"type":"x","v":NaN}', 16, 1, 17),
        (b'{"v":"NaN","w":\n -Infinity}', 17, 2, 2),
        (b'["a\\"NaN", Infinity]', 11, 1, 12),
        (b'{"a":1}x', 7, 1, 8),
        (b'{"a":1}\n\n  {}', 11, 3, 3),
        (b'\xef\xbb\xbf{"a":1}', 0, 1, 1),
        (b'{"a":"\xff"}', 6, 1, 7),
        ('{"é":\n"ü'.encode() + b"\xed\xa0\x80", 10, 2, 3),
        ('["é", x]'.encode(), 7, 1, 7),
        (b'{"a":"\n"}', 6, 1, 7),
        (b"{'a':1}", 1, 1, 2),
        (b"[1,]", 3, 1, 4),
        (b"[01]", 2, 1, 3),
        (b"[.5]", 1, 1, 2),
        (b"[+1]", 1, 1, 2),
        (b"\xa0[]", 0, 1, 1),
        ("\u00a0[]".encode(), 0, 1, 1),
        ("[]\u2003".encode(), 2, 1, 3),
        (b'{"a":1', 6, 1, 7),
        ('{"a":1}'.encode("utf-16"), 0, 1, 1),
        (b'["\\x"]', 2, 1, 3),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), MAX_DEPTH, 1, MAX_DEPTH + 1),
        (b'{"a":' * 20_000, 500, 1, 501),
        (b'["[",\n' * 101, 600, 101, 1),
    ],
    ids=lambda value: ascii(value[:20]) if isinstance(value, bytes) else None,
)
def test_what_is_not_json_is_refused_with_its_place(body: bytes, position: int, line: int, column: int) -> None:
    """The error names the byte, the line and the column, counted in characters (B-5, C-31, C-32)."""
    with pytest.raises(InvalidJson) as refused:
        scan_event(body)
    assert (refused.value.position, refused.value.line, refused.value.column) == (position, line, column)
    assert f"line {line}, column {column} (byte {position})" in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [b'{"type":"a","type":"a"}', b'{"type":"a","x":{},"\\u0074ype":"b"}', b'{"t\\u0079pe":1,"typ\\u0065":2}'],
)
def test_a_second_type_is_refused(body: bytes) -> None:
    """Two top-level types are ambiguous, even if they agree or hide behind escapes."""
    with pytest.raises(InvalidInput) as refused:
        scan_event(body)
    assert (refused.value.field, refused.value.code) == ("type", "duplicate_type")


@pytest.mark.parametrize("value", ["null", "5", "1.5", "true", "[]", "{}", '["order.paid"]'])
def test_a_type_that_is_no_string_is_refused(value: str) -> None:
    """A type must be a string; numbers are not taken for one."""
    with pytest.raises(InvalidInput) as refused:
        scan_event(f'{{"type":{value}}}'.encode())
    assert (refused.value.field, refused.value.code) == ("type", "invalid_type")


def test_the_type_can_be_left_unread() -> None:
    """Where the type is known from elsewhere, members of that name are payload; the rest is still judged."""
    assert scan_event(b'{"type":5,"type":6}', read_type=False).type is None
    with pytest.raises(InvalidJson):
        scan_event(b'{"type":NaN}', read_type=False)


@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_agrees_with_the_library(value: Any, indent: int | None, ascii_only: bool) -> None:
    """Whatever Python writes passes, and its type is found."""
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and "type" in value and not isinstance(kind, str):
        with pytest.raises(InvalidInput):
            scan_event(body)
    else:
        assert scan_event(body).type == json.loads(json.dumps(kind).encode("utf-8", "replace"))


@given(st.binary() | st.text(alphabet='{}[]":,\\u0type 1-.eNaIfinity\n').map(str.encode))
def test_never_fails_otherwise(body: bytes) -> None:
    """Any bytes either pass, and then Python reads them too, or are refused as invalid."""
    try:
        scan_event(body)
    except InvalidInput:
        return
    json.loads(body)


@given(st.lists(st.sampled_from(["[", "]", "{", "}", '"', "\\", "[[[[", '"[', "x"]), max_size=300), st.integers(1, 8))
def test_depth_is_that_of_the_brackets_outside_strings(parts: list[str], limit: int) -> None:
    """What is refused for its depth is what a plain reading of the characters finds too deep."""
    text = "".join(parts)
    depth, deepest, in_string, escaped = 0, 0, False, False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    too_deep = False
    try:
        scan_event(text.encode(), max_depth=limit)
    except InvalidInput as error:
        too_deep = "levels deep" in str(error)
    assert too_deep == (deepest > limit)


@pytest.mark.parametrize("limit", [100, 400])
def test_depth_does_not_depend_on_the_stack(limit: int) -> None:
    """A deep body is judged by its depth, not by what is left of Python's recursion limit."""
    before = sys.getrecursionlimit()
    body = b"[" * limit + b"]" * limit
    scan_event(body, max_depth=limit)
    with pytest.raises(InvalidJson):
        scan_event(b"[" * 50_000, max_depth=limit)
    assert sys.getrecursionlimit() == before
