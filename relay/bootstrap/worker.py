"""The worker's parts, and the order in which they start and stop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from relay import metrics
from relay.bootstrap.policies import held_keys, make_address_policy, make_platform_urls, make_url_policy, make_vault
from relay.bootstrap.roles import arm, consumer_name, note_pools, tracing_of
from relay.bootstrap.schema import check
from relay.config import require
from relay.core.address import refusal
from relay.core.breaker import BreakerPolicy
from relay.delivery.aftermath import Aftermath
from relay.delivery.destinations import Destinations
from relay.delivery.dispatch import Dispatcher, Limits
from relay.delivery.engine import Engine
from relay.delivery.gate import Gate
from relay.delivery.intake import Batch, Intake
from relay.delivery.jobs import JobDestinations
from relay.delivery.permits import Room, Slots
from relay.delivery.recorder import Recorder
from relay.outbox.stream import Stream, connect
from relay.process.heart import Heart
from relay.process.prompt import Prompt
from relay.process.vitals import Vitals
from relay.store import destinations as destination_rows
from relay.store.engine import make_engine, make_hot_engine
from relay.sweeps.partitions_ahead import PartitionsAhead
from relay.sweeps.reap import OVERDUE_SECS, Reap
from relay.sweeps.reconcile import Reconcile
from relay.sweeps.replay import Replay
from relay.sweeps.retention import Retention, Windows
from relay.sweeps.runner import Sweep, run_sweep
from relay.sweeps.stream_upkeep import StreamUpkeep
from relay.sweeps.wake import Sleepers, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import sqlalchemy as sa

    from relay.config import Settings

#: Seconds of the lease kept back for recording: a request starts only with its time-out and this left.
LEASE_MARGIN_SECS = 5.0
#: The threads without which a worker delivers nothing, or is taken for dead.
WORKER_THREADS = ("relay-reader", "relay-poller", "relay-settler", "relay-engine", "relay-recorder", "relay-heart")
#: Seconds of the shutdown's grace, at most a quarter of it, kept for recording.
RECORD_SECS = 3.0


@dataclass(slots=True, kw_only=True)
class Worker:
    """The worker process's parts, and the order in which they start and stop."""

    settings: Settings
    engine: sa.Engine
    hot: sa.Engine
    room: Room
    slots: Slots
    recorder: Recorder
    sender: Engine
    dispatcher: Dispatcher
    intake: Intake
    waker: Prompt
    replayer: Prompt
    heart: Heart
    vitals: Vitals
    sweeps: Mapping[str, Sweep]
    _drained: bool | None = None

    def start(self, deliver: Callable[[Batch], None] | None = None) -> None:
        """Start, what receives first; `deliver` as for `Intake.start`."""
        self.recorder.start()
        self.sender.start()
        self.intake.start(deliver)
        self.waker.start()
        self.replayer.start()
        self.heart.start()
        self.vitals.watch()

    def drain(self, deadline: float) -> bool:
        """Stop reading, finish what is in flight, record it, release what was not sent; return whether all was.

        Bounded by `deadline` (monotonic) whatever does not answer. Only the first call works; later ones repeat its
        answer.
        """
        if self._drained is None:
            # Of the grace, so much is kept for recording what the sender gives back at its own end.
            kept = min(RECORD_SECS, (deadline - time.monotonic()) / 4)
            self.vitals.leave()
            self.intake.stop_reading()
            self.intake.join(min(deadline - kept, time.monotonic() + 4.0))
            self.dispatcher.close(deadline - kept)
            not_started = self.sender.stop(deadline - kept)
            self.recorder.release([request.key for request in not_started])
            self._drained = self.recorder.stop(deadline)
            self.waker.stop()
            self.replayer.stop()
            self.heart.stop(deadline)
        return self._drained

    def run_sweep(self, name: str) -> Mapping[str, int] | None:
        """Run one sweep by its name, under its lock."""
        return run_sweep(self.engine, self.sweeps[name])

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date for a scrape."""
        metrics.IN_FLIGHT.set(self.sender.in_flight)
        metrics.IN_FLIGHT_LIMIT.set(self.settings.max_in_flight)
        metrics.UNRECORDED.set(self.recorder.waiting)
        note_pools({"main": self.engine, "hot": self.hot})


def make_worker(settings: Settings) -> Worker:
    """Wire a worker, the schema and the lease checked; make it after any fork."""
    arm(settings)
    url = require(settings.database_url, "DATABASE_URL")
    broker = require(settings.broker_url, "RELAY_BROKER_URL")
    engine = make_engine(url, name="worker", size=4)
    check(engine, lease_of=settings)
    # Claims run in the pool's threads, beside the recorder, the poller and the reaper's stand-in.
    hot = make_hot_engine(url, name="worker", size=settings.worker_threads + 4)
    name = consumer_name()
    reading = Stream(connect(broker, block_secs=1.0), prefix=settings.prefix, consumer=name)
    settling = Stream(connect(broker), prefix=settings.prefix, consumer=name)
    room = Room(settings.max_in_flight)
    slots = Slots(settings.max_in_flight)
    breaker_policy = BreakerPolicy(
        enabled=settings.breaker,
        threshold=settings.breaker_threshold,
        cooldown_s=settings.breaker_cooldown_secs,
        max_cooldown_s=settings.breaker_max_cooldown_secs,
    )
    gate = Gate(slots=slots, breaker_policy=breaker_policy, max_payload_bytes=settings.max_payload_bytes, worker=name)
    tracing = tracing_of(settings, "worker")
    wake = Wake(hot=hot)
    replay = Replay(engine=engine, max_replays=settings.max_replays)
    replayer = Prompt(lambda: run_sweep(engine, replay) is not None, name="relay-replayer", wanted=replay.is_wanted)
    waker = Prompt(lambda: run_sweep(engine, wake) is not None, name="relay-waker", wanted=wake.is_wanted)
    recorder = Recorder(
        hot,
        room=room,
        slots=slots,
        gate=gate,
        aftermath=Aftermath(
            policy=breaker_policy, auto_disable_after_s=settings.auto_disable_after_secs, on_wake=waker.ring
        ),
        retry_after_max_secs=settings.retry_after_max_secs,
        worker=name,
        tracing=tracing,
    )
    address_policy = make_address_policy(settings)
    sender = Engine(
        policy=lambda address: refusal(address, address_policy),
        url_policy=make_url_policy(settings),
        proxy=None if settings.egress_proxy is None else settings.egress_proxy.get_secret_value(),
        max_response_bytes=settings.max_response_bytes,
        snippet_bytes=settings.snippet_bytes,
        on_done=recorder.on_done,
    )
    reap = Reap(hot=hot)
    vault = make_vault(settings)
    dispatcher = Dispatcher(
        hot,
        destinations=Destinations(
            vault,
            platform_urls=make_platform_urls(settings),
            timeout_ms=settings.total_timeout_ms,
            max_in_flight=settings.max_in_flight_per_endpoint,
        ),
        jobs=JobDestinations(
            vault,
            timeout_ms=settings.total_timeout_ms,
            longest_timeout_ms=settings.longest_timeout_ms,
        ),
        gate=gate,
        tracing=tracing,
        sender=sender,
        recorder=recorder,
        room=room,
        slots=slots,
        limits=Limits(
            lease_secs=settings.lease_secs,
            lease_margin_secs=LEASE_MARGIN_SECS,
            connect_timeout_ms=settings.connect_timeout_ms,
            idle_timeout_ms=settings.idle_timeout_ms,
        ),
        # Late bound: the intake is made after the dispatcher that it feeds.
        again=lambda ids: intake.hint_again(ids),  # noqa: PLW0108
    )
    intake = Intake(
        hot,
        stream=reading,
        settler=settling,
        dispatcher=dispatcher,
        recorder=recorder,
        room=room,
        batch=settings.claim_batch,
        stand_in=lambda away: _ignore(run_sweep(engine, reap, overdue_secs=None if away else OVERDUE_SECS)),
    )

    vitals = Vitals(
        threads=WORKER_THREADS,
        waits={
            "claim": lambda: intake.claim_secs,
            "recorder": lambda: recorder.oldest_secs,
            "engine": lambda: sender.overdue_secs,
            **{name: partial(intake.turn_secs, name) for name in ("reader", "poller", "settler")},
        },
        inner=("engine",),
    )

    def pulse(connection: sa.Connection) -> Mapping[str, object]:
        slots.several_workspaces = destination_rows.several_workspaces(connection)
        slots.forget_idle()
        return {
            "consumer": name,
            "in_flight": sender.in_flight,
            **vitals.details(),
            **held_keys(settings),
        }

    sweeps: list[Sweep] = [
        reap,
        Reconcile(hot=hot, stream=settling, after_secs=settings.reconcile_after_secs),
        StreamUpkeep(hot=hot, stream=settling),
        PartitionsAhead(engine=engine),
        replay,
        wake,
        Sleepers(engine=engine, hot=hot),
        Retention(
            engine=engine,
            hot=hot,
            windows=Windows(
                attempts_days=settings.retain_attempts_days,
                delivered_days=settings.retain_delivered_days,
                dead_days=settings.retain_dead_days,
                audit_days=settings.retain_audit_days,
                idempotency_secs=settings.idempotency_retention_secs,
            ),
        ),
    ]
    return Worker(
        settings=settings,
        engine=engine,
        hot=hot,
        room=room,
        slots=slots,
        recorder=recorder,
        sender=sender,
        dispatcher=dispatcher,
        intake=intake,
        waker=waker,
        replayer=replayer,
        heart=Heart(engine, role="worker", process_id=uuid4(), pulse=pulse),
        vitals=vitals,
        sweeps={sweep.name: sweep for sweep in sweeps},
    )


def _ignore(_: object) -> None:
    """Drop a result."""
