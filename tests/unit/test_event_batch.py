"""Batches taken apart: payloads are slices of the body, whatever stands around them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput, InvalidJson
from relay.core.event_batch import MAX_FAULTS, parse_batch

PAYLOADS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.tuples(PAYLOADS, st.booleans(), st.permutations(["type", "payload", "idempotency_key"])), min_size=1),
    st.booleans(),
)
def test_payloads_are_slices(events: list[tuple[Any, bool, list[str]]], lines: bool) -> None:
    """B-6: in whatever order the members come and however they are written, the payload is its very bytes."""
    spelled = [json.dumps(payload, ensure_ascii=plain, indent=None) for payload, plain, _ in events]
    texts = []
    for number, (text, (_, plain, order)) in enumerate(zip(spelled, events, strict=True)):
        members = {"type": '"a.b"', "payload": text, "idempotency_key": f'"k{number}"'}
        gap = "" if plain else " \t"
        name = '"p\\u0061yload"' if number % 3 == 2 else '"payload"'
        inner = ",".join(
            f"{gap}{name if one == 'payload' else json.dumps(one)}{gap}:{gap}{members[one]}{gap}" for one in order
        )
        texts.append("{" + inner + "}")
    body = "\r\n".join(texts) + "\n" if lines else "[" + " ,\n".join(texts) + "]"
    found, faults = parse_batch(body.encode(), lines=lines)
    assert faults == []
    assert [one.payload.decode() for one in found] == spelled
    assert [one.idempotency_key for one in found] == [f"k{number}" for number in range(len(texts))]


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b"", 0),
        (b"[", 1),
        (b"[{", 2),
        (b'[{"type"', 8),
        (b'[{"type":"a" "payload":1}]', 13),
        (b'[{"type":"a",}]', 13),
        (b"[{type:1}]", 2),
        (b'[{"type":"a","payload":1}', 25),
        (b'[{"type":"a","payload":1}]]', 26),
        (b'[{"type":"a","payload":-Infinity}]', 23),
        (b'\xef\xbb\xbf[{"type":"a","payload":1}]', 0),
    ],
)
def test_what_is_not_json_says_where(body: bytes, position: int) -> None:
    """B-5: text that breaks off or goes wrong is refused with the byte at which it does."""
    with pytest.raises(InvalidJson) as error:
        parse_batch(body, lines=False)
    assert error.value.position == position


def test_faults_are_bounded() -> None:
    """However much is wrong, so many faults are told."""
    _, faults = parse_batch(b"[" + b",".join([b"{}"] * 1000) + b"]", lines=False)
    assert len(faults) == MAX_FAULTS


def test_depth_is_the_payloads_own() -> None:
    """B-5: a payload may nest as deep as the body of a single event, in an array and in lines, and no deeper."""
    for lines in (True, False):
        for depth, fits in ((100, True), (101, False)):
            event = b'{"type":"a","payload":' + b"[" * depth + b"]" * depth + b"}"
            body = event if lines else b"[" + event + b"]"
            if fits:
                assert parse_batch(body, lines=lines)[1] == []
            else:
                with pytest.raises(InvalidInput):
                    parse_batch(body, lines=lines)
