"""How long to wait before the next attempt, and how many there are: an endpoint's retry policy.

The default's waits, before jitter: 5 s, 15 s, 45 s, 2 min, 7 min, 20 min, 1 h, 3 h, then 6 h three times: twelve
attempts over about 22 hours and a half.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from relay.core.errors import InvalidInput
from relay.core.numbers import whole

MAX_ATTEMPTS: Final = 50
#: Milliseconds: no single wait is longer than a week, jitter apart.
LONGEST_WAIT_MS: Final = 604_800_000
MAX_FACTOR: Final = 100.0


class Strategy(enum.StrEnum):
    """How waits follow one another."""

    #: `base_ms`, then `factor` times the one before, at most `max_ms`.
    EXPONENTIAL = "exponential"
    #: Always `base_ms`.
    FIXED = "fixed"
    #: As listed in `schedule_ms`.
    SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to try again. The defaults are those of B-30. Made from a caller's values by `parse_retry` only."""

    strategy: Strategy = Strategy.EXPONENTIAL
    max_attempts: int = 12
    base_ms: int = 5_000
    #: The longest wait that the exponential strategy grows to, before jitter.
    max_ms: int = 21_600_000
    factor: float = 3.0
    schedule_ms: tuple[int, ...] = ()
    #: The most by which a wait is lengthened, as a share of it.
    jitter: float = 0.2
    #: 4xx statuses to retry besides those that always are.
    statuses: frozenset[int] = frozenset()


DEFAULT_POLICY: Final = RetryPolicy()
#: For jobs that do not say themselves.
JOB_POLICY: Final = RetryPolicy(max_attempts=5, base_ms=1_000, factor=2.0, max_ms=300_000)

_FIELDS: Final = ("strategy", "max_attempts", "base_ms", "max_ms", "factor", "schedule_ms", "jitter", "statuses")


def parse_retry(value: object) -> RetryPolicy:
    """The policy of a decoded JSON object; a field that is absent or null has its default.

    A schedule of n waits means n + 1 attempts: `max_attempts` may lower that, not raise it. `max_ms` follows a greater
    `base_ms` unless it is given. Fields that the strategy does not use are checked and kept, but `schedule_ms`, which
    would be a mistake without its strategy.

    Raises InvalidInput with `field` such as `retry.base_ms`.
    """
    if not isinstance(value, Mapping):
        raise InvalidInput("retry must be an object", field="retry")
    given = {name: member for name, member in value.items() if member is not None}
    for name in value:
        if name not in _FIELDS:
            raise _wrong(str(name)[:64], f"is unknown: there are {', '.join(_FIELDS)}")

    strategy = given.get("strategy", Strategy.EXPONENTIAL)
    if not isinstance(strategy, str) or strategy not in set(Strategy):
        raise _wrong("strategy", f"must be one of {', '.join(Strategy)}")
    strategy = Strategy(strategy)
    schedule = _schedule(given, strategy)
    most = len(schedule) + 1 if strategy is Strategy.SCHEDULE else MAX_ATTEMPTS
    usual = most if strategy is Strategy.SCHEDULE else DEFAULT_POLICY.max_attempts
    max_attempts = _whole(given, "max_attempts", usual, 1, MAX_ATTEMPTS)
    if max_attempts > most:
        raise _wrong("max_attempts", f"must be at most {most}: the schedule has {len(schedule)} waits")
    base_ms = _whole(given, "base_ms", DEFAULT_POLICY.base_ms, 1, LONGEST_WAIT_MS)
    max_ms = _whole(given, "max_ms", max(DEFAULT_POLICY.max_ms, base_ms), 1, LONGEST_WAIT_MS)
    if max_ms < base_ms:
        raise _wrong("max_ms", f"must be at least base_ms ({base_ms})")
    return RetryPolicy(
        strategy=strategy,
        max_attempts=max_attempts,
        base_ms=base_ms,
        max_ms=max_ms,
        factor=_number(given, "factor", DEFAULT_POLICY.factor, 1.0, MAX_FACTOR),
        schedule_ms=schedule,
        jitter=_number(given, "jitter", DEFAULT_POLICY.jitter, 0.0, 1.0),
        statuses=_statuses(given),
    )


def to_json(policy: RetryPolicy) -> dict[str, object]:
    """The policy as `parse_retry` reads it, for storage and the API. `schedule_ms` only where the strategy has one."""
    members: dict[str, object] = {
        "strategy": policy.strategy.value,
        "max_attempts": policy.max_attempts,
        "base_ms": policy.base_ms,
        "max_ms": policy.max_ms,
        "factor": policy.factor,
        "jitter": policy.jitter,
        "statuses": sorted(policy.statuses),
    }
    if policy.strategy is Strategy.SCHEDULE:
        members["schedule_ms"] = list(policy.schedule_ms)
    return members


def wait_seconds(policy: RetryPolicy, failures: int, random: float) -> float:
    """Seconds to wait after the `failures`-th failed attempt in a row (from 1); `random` is in [0, 1).

    Jitter only lengthens, by less than its share: never early, never above the longest wait times 1 + jitter. Beyond
    its end a schedule stays at its last wait.
    """
    n = max(failures, 1) - 1
    if policy.strategy is Strategy.SCHEDULE:
        wait_ms = float(policy.schedule_ms[min(n, len(policy.schedule_ms) - 1)])
    elif policy.strategy is Strategy.FIXED:
        wait_ms = float(policy.base_ms)
    else:
        try:
            wait_ms = min(policy.base_ms * policy.factor**n, float(policy.max_ms))
        except OverflowError:
            wait_ms = float(policy.max_ms)
    return wait_ms / 1_000 * (1 + policy.jitter * random)


def _wrong(name: str, what: str) -> InvalidInput:
    return InvalidInput(f"retry.{name} {what}", field=f"retry.{name}")


def _whole(given: Mapping[str, object], name: str, default: int, least: int, most: int) -> int:
    value = whole(given.get(name, default))
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"must be a whole number from {least} to {most}")
    return value


def _number(given: Mapping[str, object], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    # NaN fails the comparison, as it should.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"must be a number from {least:g} to {most:g}")
    return float(value)


def _schedule(given: Mapping[str, object], strategy: Strategy) -> tuple[int, ...]:
    waits = given.get("schedule_ms", [])
    if not isinstance(waits, (list, tuple)):
        raise _wrong("schedule_ms", "must be a list of waits in milliseconds")
    if strategy is not Strategy.SCHEDULE:
        if waits:
            raise _wrong("schedule_ms", 'goes with "strategy": "schedule" only')
        return ()
    if not 1 <= len(waits) < MAX_ATTEMPTS:
        raise _wrong("schedule_ms", f"must have 1 to {MAX_ATTEMPTS - 1} waits")
    schedule = []
    for wait in map(whole, waits):
        if not isinstance(wait, int) or isinstance(wait, bool) or not 0 <= wait <= LONGEST_WAIT_MS:
            raise _wrong("schedule_ms", f"must hold whole numbers from 0 to {LONGEST_WAIT_MS}")
        schedule.append(wait)
    return tuple(schedule)


def _statuses(given: Mapping[str, object]) -> frozenset[int]:
    statuses = given.get("statuses", [])
    if not isinstance(statuses, (list, tuple)):
        raise _wrong("statuses", "must be a list of statuses from 400 to 499")
    found = set()
    for status in map(whole, statuses):
        if not isinstance(status, int) or isinstance(status, bool) or not 400 <= status <= 499:
            raise _wrong("statuses", "must hold statuses from 400 to 499")
        if status == 410:
            raise _wrong("statuses", "must not hold 410, which ends deliveries to the endpoint")
        found.add(status)
    return frozenset(found)
