"""Token buckets and the queue behind them: who may go now, and when the others come back.

A continuous bucket, not a window: `burst` tokens at most, `rate` new ones a second, so never more than `burst` sends
at once and no more than `burst + rate * t` in any span t. What gets no token gets a slot: a time to come back, one
after the other at the rate, so that a backlog of n costs n deferrals and not n a poll. A slot is no token: that is
taken on return, or a fleet that was away would release its whole backlog at once.

The arithmetic runs inside one statement on a row that all workers share (relay/store/buckets.py); `take` says what it
must come to, and the tests hold the one against the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

#: What a bucket may lack for a whole token because seconds are stored in microseconds. Owed, and paid by the next.
ROUNDING: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket at one moment. Times are seconds on any one clock."""

    tokens: float
    refilled_at: float
    #: The last slot that was given out; rows queue while it is ahead.
    slots_until: float | None = None
    #: The breaker's generation in which slots are counted.
    generation: int = 0


class Demand(NamedTuple):
    """What a batch wants of one endpoint's bucket."""

    rate: float
    burst: float
    #: Rows that were held back before: they go first.
    waited: int = 0
    #: Rows that come for the first time: they queue while slots are outstanding.
    fresh: int = 0
    #: Rows that may not go before `held_s` seconds from now, and want slots from then on.
    held: int = 0
    held_s: float = 0.0
    generation: int = 0


class Grant(NamedTuple):
    """What it gets."""

    waited: int
    fresh: int
    #: Seconds to the first slot of those without a token; each further one is `1 / rate` later.
    slot_s: float
    #: The same for the held rows.
    held_s: float


def take(bucket: Bucket, demand: Demand, now: float) -> tuple[Bucket, Grant]:
    """Take tokens and slots at `now`; return the bucket after that and what was got."""
    gap = 1.0 / demand.rate
    level = min(demand.burst, bucket.tokens + demand.rate * max(0.0, now - bucket.refilled_at))
    until = bucket.slots_until
    if demand.generation > bucket.generation or (until is not None and until <= now):
        until = None
    whole = max(0, math.floor(level + ROUNDING))
    waited = min(demand.waited, whole)
    fresh = 0 if until is not None else min(demand.fresh, whole - waited)
    level -= waited + fresh
    queued = demand.waited + demand.fresh - waited - fresh
    slot_s = max(max(0.0, 1.0 - level) * gap, -math.inf if until is None else until - now + gap)
    if queued:
        until = now + slot_s + (queued - 1) * gap
    held_s = max(demand.held_s, -math.inf if until is None else until - now + gap)
    if demand.held:
        until = now + held_s + (demand.held - 1) * gap
    return (
        replace(
            bucket,
            tokens=level,
            refilled_at=max(now, bucket.refilled_at),
            slots_until=until,
            generation=max(demand.generation, bucket.generation),
        ),
        Grant(waited=waited, fresh=fresh, slot_s=slot_s, held_s=held_s),
    )
