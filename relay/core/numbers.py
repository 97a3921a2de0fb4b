"""Whole numbers as JSON has them: it knows one kind of number, so 5.0 is as whole as 5 (JSON Schema section 4.2.3)."""

from __future__ import annotations


def whole(value: object) -> object:
    """Return a float without a fraction as an int; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
