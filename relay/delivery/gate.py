"""The gates between a claim and a send: what holds a delivery back, and until when.

In this order: the endpoint is deleted, the delivery expired, the endpoint is disabled, held by a Retry-After, or cannot
be sent to from here; its breaker is open; its slots in this process are taken; its bucket is empty. Every deferral
moves the due time once, to when the row should go; where many rows of an endpoint wait, each gets a time of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from relay.core import breaker
from relay.core.bucket import Demand, Grant
from relay.core.model import DeadReason, DeferReason, EventSource, Status
from relay.core.observation import Observation
from relay.core.outcome import PAYLOAD_TOO_LARGE, Outcome, internal_wait_seconds
from relay.store import breakers, buckets, claims
from relay.store.results import UnsentRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import sqlalchemy as sa
    from opentelemetry.trace import Span

    from relay.core.breaker import Breaker, BreakerPolicy
    from relay.delivery.destinations import Destination
    from relay.delivery.permits import Slots
    from relay.store.claims import Circumstances, Claimed


# These two are made for every delivery, by place: by name it would cost twice as much.


@dataclass(slots=True)
class Leased:
    """A claimed delivery on its way through the process: what the recorder needs to end it."""

    row: Claimed
    token: UUID
    destination: Destination
    claim_us: int = 0
    gate_us: int = 0
    #: The breaker's, when it passed: its report counts only while that is the current one.
    breaker_generation: int = 0
    #: The one delivery that tries whether an endpoint is back.
    probe: bool = False
    #: One attempt for its owner to see: no retries, and nothing is counted.
    test: bool = False
    #: `destination` is its own, and not its endpoint's.
    job: bool = False
    #: How often in a row it was deferred for a fault of ours.
    internal_deferrals: int = 0
    #: Where it is traced: the claim's context, and then the send's span.
    claim_trace: str | None = None
    span: Span | None = None


@dataclass(slots=True)
class Finished:
    """An attempt that came to its end, judged or still to be judged."""

    leased: Leased
    observation: Observation
    verdict: Outcome | None = None


@dataclass(slots=True, kw_only=True)
class Gated:
    """What became of a batch at the gates."""

    #: With a slot taken each, and a token paid.
    sends: list[Leased] = field(default_factory=list)
    unsent: list[UnsentRow] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Turn:
    """The rows of one endpoint in a batch, none of which is ended or paused."""

    destination: Destination
    workspace_id: UUID
    #: The breaker's.
    generation: int
    #: Those that would go: `waited_wants` that were held back before, then the others.
    wants: list[Leased] = field(default_factory=list)
    waited_wants: int = 0
    #: Those that go past every gate but the slots.
    tests: list[Leased] = field(default_factory=list)
    #: Those that come back from `held_s` seconds on, and why.
    held: list[Leased] = field(default_factory=list)
    held_s: float = 0.0
    held_reason: DeferReason = DeferReason.BREAKER
    #: As the closer look found it; None where none was needed, as it was closed.
    breaker: Breaker | None = None
    #: Taken of this process's.
    slots: int = 0

    def hold_back(self, wait: float, reason: DeferReason, *, but: Leased | None = None) -> None:
        """Have all that would go come back from `wait` seconds on, `but` one."""
        self.held += [leased for leased in self.wants if leased is not but]
        self.held_s, self.held_reason = max(self.held_s, wait), reason
        if but is None:
            self.wants, self.waited_wants = [], 0
        else:
            self.waited_wants = min(1, self.waited_wants)
            self.wants = [but]

    def demand(self) -> Demand:
        """Say what is wanted of the endpoint's bucket."""
        waited = min(self.waited_wants, len(self.wants))
        # By place, as there is one for each endpoint of each batch: by name it would cost twice as much.
        return Demand(
            self.destination.rate_per_second,
            float(self.destination.burst),
            waited,
            len(self.wants) - waited,
            len(self.held),
            self.held_s,
            self.generation,
        )


#: Of an endpoint that is gone: its rows come back soon, and the next claim sees why.
_NOTHING: Final = Grant(waited=0, fresh=0, slot_s=1.0, held_s=1.0)


class Gate:
    """The gates of one process."""

    def __init__(self, *, slots: Slots, breaker_policy: BreakerPolicy, max_payload_bytes: int, worker: str) -> None:
        """Take the sizes in bytes; `worker` names this process in the log of attempts."""
        self._slots = slots
        self._policy = breaker_policy
        self._max_payload_bytes = max_payload_bytes
        self._worker = worker

    def admit(self, connection: sa.Connection, batch: Sequence[Leased]) -> Gated:
        """Let through what may go, each with its slot taken and its token paid.

        Takes statements of its own on `connection`, which is in autocommit. On an error no slot is kept, and a row of
        the batch that had become its endpoint's probe says so.
        """
        gated = Gated()
        closer = [leased.row.id for leased in batch if leased.row.closer]
        circumstances = claims.look_closer(connection, closer) if closer else {}
        turns: dict[int, _Turn] = {}
        for leased in batch:
            seen = circumstances.get(leased.row.id) if leased.row.closer else None
            if seen is not None and not self._clear(leased, seen, gated):
                continue
            if self._sendable(leased, gated):
                _queue(turns, leased, seen)
        try:
            for turn in turns.values():
                if turn.breaker is not None:
                    self._pass_breaker(connection, turn)
                self._take_slots(turn, gated)
            self._take_tokens(connection, turns, gated)
        except BaseException:
            for turn in turns.values():
                self._slots.give_back(turn.destination.id, turn.workspace_id, turn.slots)
            raise
        return gated

    def _clear(self, leased: Leased, seen: Circumstances, gated: Gated) -> bool:
        """Note what the circumstances say; False where they end or pause the row here."""
        if seen.deferred_reason == DeferReason.INTERNAL:
            leased.internal_deferrals = seen.deferred_count
        leased.test = seen.source is EventSource.TEST
        if seen.endpoint_deleted:
            gated.unsent.append(self.unsent(leased, status=Status.DEAD, reason=DeadReason.ENDPOINT_DELETED))
        elif seen.expired:
            gated.unsent.append(self.unsent(leased, status=Status.DEAD, reason=DeadReason.EXPIRED))
        elif not seen.endpoint_enabled and not leased.test:
            # No wait: the recorder pauses it, if the endpoint is still disabled then.
            gated.unsent.append(self.unsent(leased, deferred=DeferReason.PAUSED))
        else:
            return True
        return False

    def _sendable(self, leased: Leased, gated: Gated) -> bool:
        """False where no request can be made of the row: that ends it, or makes it wait."""
        destination = leased.destination
        if destination.fault is not None:
            gated.unsent.append(self.internal(leased))
        elif len(leased.row.payload) > self._max_payload_bytes:
            gated.finished.append(Finished(leased=leased, observation=Observation(), verdict=PAYLOAD_TOO_LARGE))
        else:
            return True
        return False

    def _pass_breaker(self, connection: sa.Connection, turn: _Turn) -> None:
        """Hold an endpoint's rows back while its breaker is open; let one of them probe when it may."""
        assert turn.breaker is not None
        wait = breaker.wait_s(turn.breaker, self._policy)
        if wait is None and breaker.may_probe(turn.breaker, self._policy) and turn.wants:
            prober = turn.wants[0]
            secs = turn.destination.timeout_ms / 1000
            generation = breakers.try_probe(
                connection, prober.destination.id, delivery_id=prober.row.id, secs=secs + breaker.PROBE_SLACK_S
            )
            # Another got there first, or the cooldown began anew: whichever, it takes about so long to be decided.
            wait = secs
            if generation is not None:
                prober.probe, prober.breaker_generation = True, generation
                turn.generation = generation
                turn.hold_back(wait, DeferReason.BREAKER, but=prober)
                return
        if wait is not None:
            turn.hold_back(wait, DeferReason.BREAKER)

    def _take_slots(self, turn: _Turn, gated: Gated) -> None:
        """Take a slot for each row that wants to go and for each test; those in vain come back after a while."""
        limit = turn.destination.max_in_flight
        turn.slots = self._slots.take(
            turn.destination.id, turn.workspace_id, limit=limit, want=len(turn.tests) + len(turn.wants)
        )
        going = (turn.tests + turn.wants)[: turn.slots]
        for leased in (turn.tests + turn.wants)[turn.slots :]:
            wait = self._slots.wait_secs(turn.destination.id, limit=limit, random=random.random())
            gated.unsent.append(self.unsent(leased, deferred=DeferReason.SLOT, wait=wait))
        tests = len(turn.tests)
        gated.sends += going[:tests]
        turn.wants = going[tests:]

    def _take_tokens(self, connection: sa.Connection, turns: Mapping[int, _Turn], gated: Gated) -> None:
        """Pay a token for each row that goes; what gets none, and what is held, gets a time of its own."""
        demands = {turn.destination.id: turn.demand() for turn in turns.values() if turn.wants or turn.held}
        grants = buckets.take(connection, demands) if demands else {}
        for turn in turns.values():
            grant = grants.get(turn.destination.id, _NOTHING)
            split = turn.waited_wants
            going = turn.wants[: min(grant.waited, split)] + turn.wants[split : split + grant.fresh]
            gated.sends += going
            gap = 1.0 / turn.destination.rate_per_second
            if len(going) < len(turn.wants):
                queued = turn.wants[grant.waited : split] + turn.wants[split + grant.fresh :]
                self._slots.give_back(turn.destination.id, turn.workspace_id, len(queued))
                turn.slots -= len(queued)
                for place, leased in enumerate(queued):
                    wait = grant.slot_s + place * gap
                    gated.unsent.append(self.unsent(leased, deferred=DeferReason.RATE, wait=wait))
            for place, leased in enumerate(turn.held):
                wait = max(turn.held_s, grant.held_s) + place * gap
                gated.unsent.append(self.unsent(leased, deferred=turn.held_reason, wait=wait))

    def internal(self, leased: Leased) -> UnsentRow:
        """Return the row that makes a delivery wait for a fault of ours to be mended."""
        return self.unsent(leased, deferred=DeferReason.INTERNAL, wait=internal_wait_seconds(leased.internal_deferrals))

    def unsent(
        self,
        leased: Leased,
        *,
        status: Status = Status.PENDING,
        reason: DeadReason | None = None,
        deferred: DeferReason | None = None,
        wait: float | None = None,
    ) -> UnsentRow:
        """Return the row that gives a lease back unsent, and the probe with it."""
        released = self.release(leased.row, leased.token, probe=leased.probe)
        return released._replace(next_status=status, reason=reason, wait_secs=wait, deferred_reason=deferred)

    def release(self, row: Claimed, token: UUID, *, probe: bool) -> UnsentRow:
        """Return the row that gives a lease back for somebody else to take at once."""
        return UnsentRow(
            delivery_id=row.id,
            endpoint_id=row.endpoint_id,
            lease_token=token,
            next_status=Status.PENDING,
            reason=None,
            wait_secs=0.0,
            deferred_reason=None,
            at=row.claimed_at,
            generation=row.generation,
            worker=self._worker,
            probe=probe,
        )


def _queue(turns: dict[int, _Turn], leased: Leased, seen: Circumstances | None) -> None:
    """Put a row into its endpoint's turn."""
    row = leased.row
    turn = turns.get(row.endpoint_id.int)
    if turn is None:
        turn = turns[row.endpoint_id.int] = _Turn(
            destination=leased.destination, workspace_id=row.workspace_id, generation=row.breaker_generation
        )
    leased.breaker_generation = row.breaker_generation
    if seen is None:
        turn.wants.append(leased)
        return
    turn.generation = leased.breaker_generation = seen.breaker.generation
    turn.breaker = seen.breaker
    if leased.test:
        turn.tests.append(leased)
    elif seen.held_s is not None and seen.held_s > 0:
        turn.held_s, turn.held_reason = seen.held_s, DeferReason.HELD
        turn.held.append(leased)
    elif seen.deferred_reason is not None:
        turn.wants.insert(turn.waited_wants, leased)
        turn.waited_wants += 1
    else:
        turn.wants.append(leased)
