"""What results do to their endpoints: count for the breaker, hold, disable, and bring waiting rows back.

A success on a healthy endpoint writes nothing: one statement a batch looks for counts that are above 0.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relay.core import breaker, notices
from relay.core.auto_disable import fails_for_good
from relay.core.breaker import Summary
from relay.core.model import AttemptClass, BreakerEffect, BreakerState, Status
from relay.store import breakers, destinations, operational, wakes
from relay.store.breakers import Answered
from relay.store.engine import transaction
from relay.store.operational import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import sqlalchemy as sa

    from relay.core.breaker import Breaker, BreakerPolicy
    from relay.core.outcome import Outcome
    from relay.delivery.gate import Leased
    from relay.store.breakers import Standing

log = logging.getLogger(__name__)

#: Seconds by which a hold ends before the waits that were recorded with it.
HOLD_MARGIN_S = 0.005


class Result(Protocol):
    """A recorded attempt, and what it asks of its endpoint."""

    @property
    def leased(self) -> Leased:
        """What was sent."""

    @property
    def verdict(self) -> Outcome:
        """What it came to."""

    @property
    def hold_s(self) -> float | None:
        """Seconds to hold the endpoint for; None for no hold."""


@dataclass(slots=True, kw_only=True)
class _Endpoint:
    """What a batch says of one endpoint."""

    id: UUID
    summaries: dict[int, Summary] = field(default_factory=dict)
    succeeded: bool = False
    #: Attempts after the last success of the batch.
    failed: int = 0
    #: Of the breaker's generations in which a probe of the batch went, those whose probe said nothing.
    unheard: set[int] = field(default_factory=set)
    probed: bool = False
    hold_s: float = 0.0
    #: The delivery that was answered 410.
    gone: UUID | None = None
    #: A verdict that was taken in last, and the breaker's generation: once more the same would change nothing.
    settled: tuple[Outcome, int] | None = None

    @property
    def plain(self) -> bool:
        """Whether all of it was success, and none of it a probe."""
        return not self.failed and not self.probed


class Aftermath:
    """Applies results to endpoints, for one process."""

    def __init__(self, *, policy: BreakerPolicy, auto_disable_after_s: float, on_wake: Callable[[], None]) -> None:
        """`on_wake` is told when rows were asked to be brought forward, so that it need not wait for beat."""
        self._policy = policy
        self._auto_disable_after_s = auto_disable_after_s
        self._on_wake = on_wake

    def apply(self, connection: sa.Connection, results: Sequence[Result], *, since: float) -> None:
        """Apply the results of one recording, in their order. `connection` is in autocommit.

        `since` is `time.monotonic()` before the recording: holds count from then on, so that a delivery which itself
        waits as long does not find its endpoint held for some milliseconds more.
        """
        # By the number within the id, whose hash costs a tenth of the id's.
        found: dict[int, _Endpoint] = {}
        for result in results:
            leased = result.leased
            if leased.test:
                continue
            id_ = leased.row.endpoint_id
            seen = found.get(id_.int)
            if seen is None:
                seen = found[id_.int] = _Endpoint(id=id_)
            settled = seen.settled
            if (
                settled is None
                or settled[0] is not result.verdict
                or settled[1] != leased.breaker_generation
                or leased.probe
            ):
                _take_in(seen, result)
        answered = [
            Answered(seen.id, generation, seen.succeeded)
            for seen in found.values()
            if seen.plain
            for generation in seen.summaries
        ]
        recovered: set[UUID] = set()
        if answered:
            recovered = set(breakers.clear_counts(connection, answered, many=notices.RECOVERS_AFTER))
        moved = {seen.id: seen for seen in found.values() if not seen.plain or seen.id in recovered}
        if not moved:
            return
        passed = time.monotonic() - since + HOLD_MARGIN_S
        holds = {id_: max(0.0, seen.hold_s - passed) for id_, seen in moved.items() if seen.hold_s > 0}
        if holds:
            # Before a breaker closes: what it brings forward comes back when the hold is over.
            destinations.hold(connection, holds)
        with transaction(connection):
            woken = self._move(connection, moved)
        if woken:
            self._on_wake()

    def _move(self, connection: sa.Connection, moved: dict[UUID, _Endpoint]) -> bool:
        """Write the new states of endpoints that failed or were probed; return whether rows are to be brought forward."""
        woken = False
        states: dict[UUID, tuple[Breaker, int, bool]] = {}
        told: list[Notice] = []
        for standing in breakers.lock(connection, list(moved)):
            id_, seen = standing.endpoint_id, moved[standing.endpoint_id]
            after = self._after(standing.breaker, seen)
            begins = seen.failed > 0 and (seen.succeeded or not standing.failing_attempts)
            attempts = seen.failed if seen.succeeded else standing.failing_attempts + seen.failed
            states[id_] = (after, attempts, begins)
            told += _notices(standing, after, seen)
            if after.state is not standing.breaker.state:
                log.warning(
                    "a breaker changed",
                    extra={
                        "endpoint_id": str(id_),
                        "from": standing.breaker.state.name.lower(),
                        "to": after.state.name.lower(),
                        "cooldown_s": after.open_s,
                    },
                )
            if standing.deleted:
                # What is in flight ended after the deletion's sweep, and waits for a retry that nobody wants.
                wakes.ask_to_end(connection, id_, Status.DEAD)
                woken = True
            elif after.state is BreakerState.CLOSED and standing.breaker.state is not BreakerState.CLOSED:
                wakes.ask_to_bring_forward(connection, id_)
                woken = True
            if seen.gone is not None:
                told += self._disable(connection, standing, "gone", seen.gone)
            elif not begins and fails_for_good(attempts, standing.failing_s, self._auto_disable_after_s):
                told += self._disable(connection, standing, "failing", None)
        breakers.save(connection, states)
        operational.tell(connection, told)
        return woken

    def _after(self, before: Breaker, seen: _Endpoint) -> Breaker:
        after = before
        for generation, summary in seen.summaries.items():
            after = breaker.after_report(after, summary.report(generation), self._policy)
        if before.state is BreakerState.HALF_OPEN and before.generation in seen.unheard:
            return breaker.handed_back(before)
        return after

    def _disable(
        self, connection: sa.Connection, standing: Standing, reason: str, delivery_id: UUID | None
    ) -> list[Notice]:
        if not destinations.disable(connection, standing.endpoint_id, reason=reason, delivery_id=delivery_id):
            return []
        log.warning("an endpoint was disabled", extra={"endpoint_id": str(standing.endpoint_id), "reason": reason})
        return [_notice(standing, notices.ENDPOINT_DISABLED, reason=reason)]


def _notices(standing: Standing, after: Breaker, seen: _Endpoint) -> list[Notice]:
    """Say what there is to tell of a change. Nothing of implicit endpoints: nobody made them."""
    before = standing.breaker.state
    told: list[Notice] = []
    if standing.owned and before is BreakerState.CLOSED and after.state is BreakerState.OPEN:
        told.append(_notice(standing, notices.BREAKER_OPENED, cooldown_seconds=after.open_s))
    if standing.owned and before is not BreakerState.CLOSED and after.state is BreakerState.CLOSED:
        told.append(_notice(standing, notices.BREAKER_CLOSED))
    if standing.owned and seen.succeeded and standing.failing_attempts >= notices.RECOVERS_AFTER:
        told.append(_notice(standing, notices.ENDPOINT_RECOVERED, failed_attempts=standing.failing_attempts))
    return told


def _notice(standing: Standing, kind: str, **data: object) -> Notice:
    return Notice(
        workspace_id=standing.workspace_id,
        type=kind,
        endpoint_id=standing.endpoint_id,
        data={"url": standing.url, **data},
    )


def _take_in(seen: _Endpoint, result: Result) -> None:
    leased, verdict = result.leased, result.verdict
    summary = seen.summaries.get(leased.breaker_generation)
    if summary is None:
        summary = seen.summaries[leased.breaker_generation] = Summary()
    summary.add(verdict.breaker)
    if leased.probe:
        seen.probed = True
        if verdict.breaker is BreakerEffect.NONE:
            seen.unheard.add(leased.breaker_generation)
    if verdict.cls is AttemptClass.SUCCESS:
        seen.succeeded, seen.failed = True, 0
        # The one verdict that most results share, and which asks for nothing more than this.
        seen.settled = (verdict, leased.breaker_generation)
    else:
        seen.failed += 1
        seen.settled = None
    if result.hold_s is not None:
        seen.hold_s = max(seen.hold_s, result.hold_s)
    if verdict.disables_endpoint:
        seen.gone = leased.row.id
