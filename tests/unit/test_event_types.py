"""Event types, patterns, and the two ways of matching them, which must agree."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.event_types import (
    MAX_TYPE_LENGTH,
    check_event_type,
    check_pattern,
    is_reserved,
    matches,
    patterns_for,
)

SEGMENTS = st.sampled_from(["relay", "order", "item", "a", "orders", "Relay"])
TYPES = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)
PATTERNS = TYPES | TYPES.map(lambda text: text + ".*") | st.just("*")

GOOD = ["order", "order.paid", "a.b-c.D_9", "relay.endpoint.disabled", "-", "a" * MAX_TYPE_LENGTH]
BAD = ["", ".", "a.", ".a", "a..b", "a b", "a*", "é", "a\n", "a/b", "a\0", "٣", "a" * (MAX_TYPE_LENGTH + 1), None, 3]


@pytest.mark.parametrize("text", GOOD)
def test_types_pass(text: str) -> None:
    """Letters, digits, hyphen and underscore in dotted segments are a type, and a type is a pattern."""
    assert check_event_type(text) == text
    assert check_pattern(text) == text


@pytest.mark.parametrize("text", BAD)
def test_bad_types_are_refused(text: object) -> None:
    """What is no type is refused under the caller's name, as a type and as a pattern."""
    with pytest.raises(InvalidInput) as refused:
        check_event_type(text, "Relay-Event-Type")
    assert refused.value.field == "Relay-Event-Type"
    with pytest.raises(InvalidInput):
        check_pattern(text)


@pytest.mark.parametrize("text", ["*", "order.*", "order.item.*", "relay.*"])
def test_wildcards_pass_as_patterns_only(text: str) -> None:
    """A star is a pattern alone or as the last segment, and never part of a type."""
    assert check_pattern(text) == text
    with pytest.raises(InvalidInput):
        check_event_type(text)


@pytest.mark.parametrize("text", [".*", "*.*", "*.paid", "order.*.added", "order*", "order.**", "order.*.*", "**"])
def test_other_stars_are_refused(text: str) -> None:
    """A star anywhere else is refused, with what would work."""
    with pytest.raises(InvalidInput, match=r"order\.\*"):
        check_pattern(text)


@pytest.mark.parametrize(
    ("patterns", "event_type", "expected"),
    [
        ([], "order.paid", True),
        ([], "relay.delivery.dead", False),
        (["*"], "order.paid", True),
        (["*"], "relay.delivery.dead", False),
        (["order.paid"], "order.paid", True),
        (["order.paid"], "order.paid.late", False),
        (["order.*"], "order.paid", True),
        (["order.*"], "order.item.added", True),
        (["order.*"], "order", False),
        (["order.*"], "orders.paid", False),
        (["relay.*"], "relay.delivery.dead", True),
        (["relay.delivery.*"], "relay.delivery.dead", True),
        (["relay.delivery.dead"], "relay.delivery.dead", True),
        (["relay.*"], "order.paid", False),
        (["*", "relay.*"], "relay.delivery.dead", True),
        (["*"], "relayed.thing", True),
        (["a", "order.paid"], "order.paid", True),
    ],
)
def test_matching(patterns: list[str], event_type: str, expected: bool) -> None:
    """Subscriptions match as B-3 has it: Relay's own types only where a pattern names them."""
    assert matches(patterns, event_type) is expected


def test_reserved_types() -> None:
    """Relay's own are `relay` and what begins with `relay.`, in lower case."""
    assert [t for t in ("relay", "relay.x", "relays", "Relay.x", "a.relay") if is_reserved(t)] == ["relay", "relay.x"]


def test_patterns_of_a_type() -> None:
    """Every pattern of a type is listed, from the type itself to the star, which reserved types lack."""
    assert patterns_for("order.item.added") == ["order.item.added", "order.item.*", "order.*", "*"]
    assert patterns_for("relay.delivery.dead") == ["relay.delivery.dead", "relay.delivery.*", "relay.*"]


@given(st.lists(PATTERNS, max_size=4), TYPES)
@example(["relay"], "relay")
def test_overlap_and_matching_agree(patterns: list[str], event_type: str) -> None:
    """Matching by overlap of lists, as a query does it, gives what `matches` gives."""
    overlap = bool(set(patterns) & set(patterns_for(event_type)))
    assert matches(patterns, event_type) == (overlap or (not patterns and not is_reserved(event_type)))


@given(TYPES)
def test_listed_patterns_are_patterns(event_type: str) -> None:
    """Each listed pattern is one that an endpoint could have."""
    assert [check_pattern(pattern) for pattern in patterns_for(event_type)] == patterns_for(event_type)
