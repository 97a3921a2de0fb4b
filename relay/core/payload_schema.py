"""JSON Schema (draft 2020-12) for payloads, safe for schemas and payloads that strangers wrote.

The jsonschema package does the work, but for what would let a schema stall the process or reach out of it: patterns run
on RE2, in linear time; uniqueItems does not compare each with each; nothing is fetched; and every keyword looks at the
clock, so that a schema that branches without end comes to one.
"""

from __future__ import annotations

import functools
import json
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import attrs
import jsonschema
import re2
import referencing
import referencing.exceptions
from jsonschema import Draft202012Validator, validators
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing.jsonschema import DRAFT202012

from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

#: Bytes of a schema as JSON without white space.
MAX_SCHEMA_BYTES: Final = 65_536
#: Levels of a schema: the library calls itself several times for each.
MAX_SCHEMA_DEPTH: Final = 32
#: Characters of a pattern.
MAX_PATTERN_LENGTH: Final = 500
#: Seconds of processor time that one payload may take.
MAX_CHECK_SECS: Final = 0.25
#: Violations that are told at once.
MAX_VIOLATIONS: Final = 10

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
#: Keywords that hold a schema, a list of schemas, and schemas by name.
_ONE: Final = frozenset(
    {"additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "contentSchema"}
)
_LIST: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: The library's way with these is quadratic and uses Python's own regular expressions.
_REFUSED: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
#: Digits of a whole number that is compared as one.
_MAX_DIGITS: Final = 1_000
#: Characters of a message, and of a member's name in a path.
_MAX_MESSAGE: Final = 200
_MAX_NAME: Final = 80
#: Keywords whose own message names members, and not values.
_NAMING: Final = frozenset({"required", "additionalProperties", "dependentRequired"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A place in the payload that the schema does not allow: `path` is empty for the whole, else like `.items[2].sku`."""

    path: str
    message: str
    #: The keyword, or what kept the check from its end.
    code: str


class PayloadSchema:
    """A schema, ready to check payloads with."""

    def __init__(self, schema: Any) -> None:
        """Take a schema that `check_schema` has passed."""
        self._validator = _Validator(schema, registry=referencing.Registry())

    def violations(self, payload: bytes, clock: Callable[[], float]) -> list[Violation]:
        """Check a payload that is JSON; return what is wrong with it, up to `MAX_VIOLATIONS`: nothing, for a good one.

        `clock` tells the seconds that this thread has worked: after `MAX_CHECK_SECS` of them the payload counts as
        refused. Of members of one name the last counts. `format` is not checked (RFC-wise it is an annotation).
        """
        found: list[Violation] = []
        try:
            with _within(clock):
                for error in self._validator.iter_errors(_value(payload)):
                    found.append(_violation(error))
                    if len(found) == MAX_VIOLATIONS:
                        break
        except _TooCostlyError:
            return [_failed("Checking the payload against its schema takes too long: simplify either.", "too_costly")]
        except RecursionError:
            return [_failed("The payload is nested too deeply for its schema: flatten either.", "too_deep")]
        except (ArithmeticError, ValueError):
            return [_failed("The payload has a number that cannot be compared: shorten it.", "incomparable_number")]
        except (referencing.exceptions.Unresolvable, re2.error):
            return [_failed("The type's schema is at fault (a reference or pattern): mend it.", "bad_schema")]
        return found


def check_schema(schema: object, clock: Callable[[], float], field: str = "json_schema") -> None:
    """Raise InvalidInput, which names the place, unless `schema` is one that `PayloadSchema` takes.

    That is a valid schema of draft 2020-12 within the bounds above, whose references lead to itself and not in a circle,
    whose patterns RE2 knows, and which has no `unevaluated…` in it. `clock` is as for `PayloadSchema.violations`.
    """
    if not isinstance(schema, (dict, bool)):
        raise InvalidInput("A schema is a JSON object, or true or false.", field=field, code="invalid_schema")
    if len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode()) > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            f"The schema is more than {MAX_SCHEMA_BYTES} bytes as JSON: shorten it.", field=field, code="too_long"
        )
    _check_depth(schema, field)
    try:
        with _within(clock):
            error = next(_DIALECT_ITSELF.iter_errors(schema), None)
    except (RecursionError, _TooCostlyError):
        raise InvalidInput("The schema is too intricate: simplify it.", field=field, code="too_costly") from None
    if error is not None:
        message = f"The schema is not valid here: {error.message}"[:_MAX_MESSAGE]
        raise InvalidInput(message, field=field + _path(error.absolute_path), code="invalid_schema")
    if isinstance(schema, dict):
        own_id = str(schema.get("$id", ""))
        registry: referencing.Registry[Any] = referencing.Registry().with_resource(
            own_id, DRAFT202012.create_resource(schema)
        )
        _check_part(schema, field, registry.resolver(own_id), is_root=True)
        _try_out(schema, field, clock)


class _TooCostlyError(Exception):
    """The check has used up its time."""


#: The clock of the check under way, and when its time is up.
_clock: ContextVar[tuple[Callable[[], float], float]] = ContextVar("payload_schema_clock")


@contextmanager
def _within(clock: Callable[[], float]) -> Iterator[None]:
    """Give what is checked inside `MAX_CHECK_SECS`."""
    token = _clock.set((clock, clock() + MAX_CHECK_SECS))
    try:
        yield
    finally:
        _clock.reset(token)


def _timed(check: Callable[..., Any]) -> Callable[..., Any]:
    """Make a keyword's check look at the clock first."""

    def run(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        clock, end = _clock.get()
        if clock() > end:
            raise _TooCostlyError
        return check(validator, value, instance, schema)

    return run


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    return re2.compile(pattern, options)


def _matches(pattern: str, text: str) -> bool:
    # Half a surrogate pair, which JSON can spell, is no text to RE2.
    return _compiled(pattern).search(text.encode("utf-8", "replace").decode()) is not None


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield jsonschema.ValidationError("does not match")


def _pattern_properties(validator: Any, by_pattern: Mapping[str, Any], instance: Any, _schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, inner in by_pattern.items():
            for name, member in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(member, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, inner: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    named = schema.get("properties", {})
    patterns = list(schema.get("patternProperties", {}))
    more = [name for name in instance if name not in named and not any(_matches(one, name) for one in patterns)]
    if inner is False:
        if more:
            shown = ", ".join(_shown(name) for name in more[:5])
            yield jsonschema.ValidationError(f"The schema has no such members: {shown}")
        return
    for name in more:
        yield from validator.descend(instance[name], inner, path=name)


def _unique_items(_validator: Any, wanted: bool, instance: Any, _schema: Any) -> Iterator[Any]:  # noqa: FBT001 - the library's signature
    if wanted and isinstance(instance, list) and len({_frozen(item) for item in instance}) < len(instance):
        yield jsonschema.ValidationError("has equal items")


def _multiple_of(_validator: Any, factor: Any, instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    # As spelled in decimals: to the doubles 19.99 is no multiple of 0.01.
    if isinstance(instance, bool) or not isinstance(instance, (int, float)):
        return
    if not math.isfinite(instance):
        raise OverflowError("no decimal to compare")
    if Fraction(repr(instance)) % Fraction(repr(factor)):
        yield jsonschema.ValidationError(f"is not a multiple of {factor}")


def _frozen(value: Any) -> object:
    """Make something hashable that equals another's just where the values are equal, to JSON Schema: 1 and 1.0 are, 1
    and true are not."""
    if isinstance(value, dict):
        return ("o", frozenset((name, _frozen(member)) for name, member in value.items()))
    if isinstance(value, list):
        return ("a", tuple(_frozen(item) for item in value))
    return ("b", value) if isinstance(value, bool) else value


_OWN: Final = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "multipleOf": _multiple_of,
}
_Validator: Final[Any] = validators.extend(
    Draft202012Validator,
    {name: _timed(check) for name, check in ({**Draft202012Validator.VALIDATORS, **_OWN}).items()},
)
# The library's own lets a `$schema` in any part bring back the class that it knows by that name, and what that does.
_Validator.evolve = attrs.evolve
_DIALECT_ITSELF: Final[Any] = _Validator(Draft202012Validator.META_SCHEMA, registry=SPECIFICATIONS)


def _value(payload: bytes) -> Any:
    return json.loads(payload, parse_int=_whole)


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("too long to compare")
    return int(digits)


def _violation(error: Any) -> Violation:
    keyword = str(error.validator)
    if keyword in _NAMING:
        message = error.message
    elif keyword == "None":
        message = "The schema allows nothing here."
    else:
        message = f"The value does not meet the schema's {keyword}: {json.dumps(error.validator_value)}"
    return Violation(
        path=_path(error.absolute_path),
        message=message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…",
        code="schema" if keyword == "None" else keyword,
    )


def _failed(message: str, code: str) -> Violation:
    return Violation(path="", message=message, code=code)


def _path(steps: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in steps)


def _shown(name: str) -> str:
    """A member's name as a path has it: bounded, and plain where it is odd."""
    return name[:_MAX_NAME].encode("ascii", "backslashreplace").decode()


def _check_depth(value: object, field: str) -> None:
    level: list[object] = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise InvalidInput(
        f"The schema nests more than {MAX_SCHEMA_DEPTH} levels deep: flatten it, with $defs.",
        field=field,
        code="too_deep",
    )


def _check_part(schema: Any, field: str, resolver: Any, *, is_root: bool = False) -> None:
    """Check what the dialect's own schema says nothing of, in one schema and those within it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        place = f"{field}.{_shown(keyword)}"
        if keyword in _REFUSED:
            _refuse(f"{keyword} is not supported: use additionalProperties or items.", place)
        elif keyword == "$schema" and value.removesuffix("#") != _DIALECT:
            _refuse(f"Only draft 2020-12 is supported: leave it out, or make it {_DIALECT}.", place)
        elif keyword == "$id" and not is_root:
            _refuse("Only the whole schema may have an $id: use $defs and $anchor.", place)
        elif keyword in {"$ref", "$dynamicRef"}:
            _check_reference(value, place, resolver)
        elif keyword == "pattern":
            _check_pattern(value, place)
        elif keyword in _ONE:
            _check_part(value, place, resolver)
        elif keyword in _LIST:
            for index, inner in enumerate(value):
                _check_part(inner, f"{place}[{index}]", resolver)
        elif keyword in _BY_NAME and isinstance(value, dict):
            for name, inner in value.items():
                if keyword == "patternProperties":
                    _check_pattern(name, f"{place}.{_shown(name)}")
                _check_part(inner, f"{place}.{_shown(name)}", resolver)


def _check_reference(reference: str, place: str, resolver: Any) -> None:
    if not reference.startswith("#"):
        _refuse("A reference must lead to this schema itself: put what it needs into $defs, as #/$defs/name.", place)
    try:
        resolver.lookup(reference)
    except referencing.exceptions.Unresolvable:
        _refuse("The reference leads nowhere: it must name a part of this schema, such as #/$defs/name.", place)


def _check_pattern(pattern: str, place: str) -> None:
    if len(pattern) > MAX_PATTERN_LENGTH:
        _refuse(f"A pattern has at most {MAX_PATTERN_LENGTH} characters: shorten it.", place)
    try:
        _compiled(pattern)
    except re2.error:
        _refuse("RE2 does not know this pattern: leave out look-around and back references.", place)


def _try_out(schema: Any, field: str, clock: Callable[[], float]) -> None:
    """Find references that go in circles, or branch without end, by a value of each kind."""
    trial = PayloadSchema(schema)
    for value in (b"null", b"{}", b"[]", b'""', b"0"):
        codes = {one.code for one in trial.violations(value, clock)}
        if "too_deep" in codes:
            _refuse("The schema's references go in a circle: let each lead to a part of the value.", field)
        if "too_costly" in codes:
            _refuse("The schema branches too often: simplify it.", field)


def _refuse(message: str, place: str) -> None:
    raise InvalidInput(message, field=place, code="invalid_schema")
