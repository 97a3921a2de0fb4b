"""Answers' JSON into frozen values: what is unknown is passed over, so that an older client reads a newer Relay."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from datetime import datetime
from typing import Any, TypeVar

from relay.client.errors import UnexpectedAnswer

T = TypeVar("T")


def read(cls: type[T], value: object) -> T:
    """Make a `cls`, a dataclass, of a JSON object.

    Fields are found by name (`class` in JSON is `class_` here), whatever else stands there is passed over, and a field
    with a default may be missing. Raises UnexpectedAnswer for one that is missing without, or is of another type.
    """
    return _convert(cls, value, cls.__name__)  # type: ignore[no-any-return]  # of the type asked for, or it raises


@functools.cache
def _fields(cls: type[Any]) -> list[tuple[str, str, Any, bool]]:
    """Each field's name, its name in JSON, its type, and whether it may be missing."""
    hints = typing.get_type_hints(cls)
    nothing = dataclasses.MISSING
    return [
        (
            one.name,
            one.name.removesuffix("_"),
            hints[one.name],
            one.default is not nothing or one.default_factory is not nothing,
        )
        for one in dataclasses.fields(cls)
    ]


def _convert(kind: Any, value: object, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is types.UnionType or origin is typing.Union:
        # Always `X | None`.
        (inner,) = (one for one in typing.get_args(kind) if one is not type(None))
        return None if value is None else _convert(inner, value, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _wrong(where, value)
        found = {}
        for name, json_name, hint, optional in _fields(kind):  # type: ignore[arg-type]  # a dataclass, and a class
            if json_name in value:
                found[name] = _convert(hint, value[json_name], f"{where}.{json_name}")
            elif not optional:
                raise UnexpectedAnswer(
                    f"the answer has no {where}.{json_name}: is this Relay's API, and of this release?"
                )
        return kind(**found)  # type: ignore[operator]  # the same
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value)
        inner = typing.get_args(kind)[0]
        return tuple(_convert(inner, one, where) for one in value)
    return _plain(kind, origin, value, where)


def _plain(kind: Any, origin: Any, value: object, where: str) -> Any:
    if kind is datetime:
        try:
            return datetime.fromisoformat(str(value))
        except ValueError:
            raise _wrong(where, value) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or kind
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        raise _wrong(where, value)
    return value


def _wrong(where: str, value: object) -> UnexpectedAnswer:
    return UnexpectedAnswer(
        f"the answer's {where} is {type(value).__name__}: is this Relay's API, and of this release?"
    )
