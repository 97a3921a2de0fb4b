"""The composition root: settings in, wired parts out. Nothing else builds an engine, a client or a sender."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast
from uuid import UUID, uuid4

import sqlalchemy as sa

from relay import failpoints, metrics
from relay.config import LEASE_SLACK_SECS, Settings, require, warnings_of
from relay.core.address import AddressPolicy, refusal
from relay.core.breaker import BreakerPolicy
from relay.core.errors import ConfigurationError, InvalidInput
from relay.core.url import UrlPolicy, normalise_url
from relay.delivery.aftermath import Aftermath
from relay.delivery.destinations import Destinations
from relay.delivery.dispatch import Dispatcher, Limits
from relay.delivery.engine import Engine
from relay.delivery.gate import Gate
from relay.delivery.intake import Batch, Intake
from relay.delivery.jobs import JobDestinations
from relay.delivery.permits import Room, Slots
from relay.delivery.recorder import Recorder
from relay.outbox.publisher import Publisher
from relay.outbox.stream import Stream, connect
from relay.process.heart import Heart
from relay.process.metrics_api import ApiFigures
from relay.process.metrics_queue import QueueGauges
from relay.process.prompt import Prompt
from relay.process.vitals import Vitals
from relay.store import destinations as destination_rows
from relay.store import schema
from relay.store.engine import make_engine, make_hot_engine
from relay.store.vault import Vault
from relay.sweeps.partitions_ahead import PartitionsAhead
from relay.sweeps.reap import OVERDUE_SECS, Reap
from relay.sweeps.reconcile import Reconcile
from relay.sweeps.replay import Replay
from relay.sweeps.retention import Retention, Windows
from relay.sweeps.runner import Sweep, run_sweep
from relay.sweeps.stream_upkeep import StreamUpkeep
from relay.sweeps.wake import Sleepers, Wake
from relay.tracing import Tracing, make_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


log = logging.getLogger(__name__)

#: Seconds of the lease kept back for recording: a request starts only with its time-out and this left.
LEASE_MARGIN_SECS = 5.0
#: Seconds between two looks for a database that does not answer at start.
AWAIT_SECS = 1.0
#: The threads without which a worker delivers nothing, or is taken for dead.
WORKER_THREADS = ("relay-reader", "relay-poller", "relay-settler", "relay-engine", "relay-recorder", "relay-heart")
#: Seconds after which the API gives up on a silent database: a producer that waits for its 202, and everybody else.
INGEST_PATIENCE_SECS = 4
API_PATIENCE_SECS = 10
#: Seconds of the shutdown's grace, at most a quarter of it, kept for recording.
RECORD_SECS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What the web process stands on. No Redis: ingest must not depend on it."""

    settings: Settings
    engine: sa.Engine
    hot: sa.Engine
    grouped: sa.Engine | None
    vault: Vault
    url_policy: UrlPolicy
    address_policy: AddressPolicy
    heart: Heart
    figures: ApiFigures
    tracing: Tracing | None = None
    process_id: UUID = field(default_factory=uuid4)


def check_schema(settings: Settings) -> bool:
    """Refuse a schema that this release cannot run on; return whether the database answered at all.

    Raises SchemaMismatch or ConfigurationError.
    """
    engine = make_engine(require(settings.database_url, "DATABASE_URL"), name="start", size=1)
    try:
        _check(engine)
    except (sa.exc.OperationalError, sa.exc.TimeoutError) as error:
        log.warning("the database does not answer yet", extra={"error": str(error.__cause__ or error).strip()[:200]})
        return False
    finally:
        engine.dispose()
    return True


def await_schema(settings: Settings) -> None:
    """Wait until the database answers, however long: a role that starts during an outage needs no help afterwards.

    Raises as `check_schema` does.
    """
    while not check_schema(settings):
        time.sleep(AWAIT_SECS)


def make_api(settings: Settings, figures: ApiFigures | None = None) -> Api:
    """Wire the API. Connects to nothing yet: it must start while the database is away, and answer 503.

    `figures` are this process's among those of several.
    """
    _arm(settings)
    url = require(settings.database_url, "DATABASE_URL")
    # What is not ingest: three at least, as notes of keys' last use may hold one for as long as a lock is waited for.
    admin = max(3, settings.db_pool // 4)
    rest = settings.db_pool - admin
    # Two for events that are committed together, where as many are left for what is not.
    grouped = 2 if rest >= 4 else 0
    engine = make_engine(url, name="api", size=admin, patience_secs=API_PATIENCE_SECS)
    process_id = uuid4()
    hot = make_hot_engine(
        url, name="api ingest", size=rest - grouped, try_first=True, patience_secs=INGEST_PATIENCE_SECS
    )
    pools = {"main": engine, "hot": hot}
    if grouped:
        pools["grouped"] = make_hot_engine(url, name="api ingest", size=grouped, patience_secs=INGEST_PATIENCE_SECS)
    figures = figures or ApiFigures()
    figures.watch_pools(pools)

    def pulse(_: sa.Connection) -> Mapping[str, object]:
        figures.note_pools()
        return _master_keys(settings)

    return Api(
        settings=settings,
        engine=engine,
        hot=hot,
        grouped=pools.get("grouped"),
        vault=make_vault(settings),
        url_policy=make_url_policy(settings),
        address_policy=make_address_policy(settings),
        heart=Heart(engine, role="api", process_id=process_id, pulse=pulse),
        figures=figures,
        tracing=_tracing(settings, "api"),
        process_id=process_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherParts:
    """The publisher process."""

    publisher: Publisher
    engine: sa.Engine
    hot: sa.Engine
    heart: Heart
    vitals: Vitals
    gauges: QueueGauges

    def refresh_metrics(self) -> None:
        """Bring counters and gauges up to date for a scrape."""
        metrics.ANNOUNCED.inc(self.publisher.announced - metrics.value_of(metrics.ANNOUNCED))
        _note_pools({"main": self.engine, "hot": self.hot})


def make_publisher(settings: Settings) -> PublisherParts:
    """Wire the publisher, the schema checked."""
    _arm(settings)
    url = require(settings.database_url, "DATABASE_URL")
    engine = make_engine(url, name="publisher", size=2)
    _check(engine)
    client = connect(require(settings.broker_url, "RELAY_BROKER_URL"))
    stream = Stream(client, prefix=settings.prefix, consumer=_consumer_name())
    hot = make_hot_engine(url, name="publisher", size=2, may_forget=True)
    publisher = Publisher(hot, stream, tracing=_tracing(settings, "publisher"))
    # A client of its own: a look must not hold up the publisher's connection.
    watched = Stream(connect(require(settings.broker_url, "RELAY_BROKER_URL")), prefix=settings.prefix, consumer="-")

    def pulse(_: sa.Connection) -> Mapping[str, object]:
        return {"leading": publisher.leading, "looked_secs": round(publisher.looked_secs, 1)}

    return PublisherParts(
        publisher=publisher,
        engine=engine,
        heart=Heart(engine, role="publisher", process_id=uuid4(), pulse=pulse),
        vitals=Vitals(threads=("relay-heart",)),
        hot=hot,
        gauges=QueueGauges(engine, watched, leading=lambda: publisher.leading),
    )


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
        _note_pools({"main": self.engine, "hot": self.hot})


def make_worker(settings: Settings) -> Worker:
    """Wire a worker, the schema and the lease checked; make it after any fork."""
    _arm(settings)
    url = require(settings.database_url, "DATABASE_URL")
    broker = require(settings.broker_url, "RELAY_BROKER_URL")
    engine = make_engine(url, name="worker", size=4)
    _check(engine, lease_of=settings)
    # Claims run in the pool's threads, beside the recorder, the poller and the reaper's stand-in.
    hot = make_hot_engine(url, name="worker", size=settings.worker_threads + 4)
    name = _consumer_name()
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
    tracing = _tracing(settings, "worker")
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
            **_master_keys(settings),
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


def make_vault(settings: Settings) -> Vault:
    """Return the vault over RELAY_MASTER_KEYS."""
    return Vault({key.id: key.key.get_secret_value() for key in settings.master_keys})


def make_url_policy(settings: Settings) -> UrlPolicy:
    """Return the rules for URLs."""
    return UrlPolicy(
        require_https=bool(settings.require_https),
        allowed_ports=settings.allowed_ports,
        allow_private=settings.allow_private_endpoints,
        allowed_hosts=settings.allowed_hosts,
    )


def make_platform_urls(settings: Settings) -> Mapping[str, str]:
    """Return where each chat transport's platform is, normalised and without a slash at the end.

    Raises ConfigurationError for what is no URL; the rules for URLs judge what is built on it, for each endpoint.
    """
    free = UrlPolicy(require_https=False, allowed_ports=None, allow_private=True)
    given = {"telegram": settings.telegram_url, "discord": settings.discord_url, "slack": settings.slack_url}
    try:
        return {name: normalise_url(text, free, field=name).text.removesuffix("/") for name, text in given.items()}
    except InvalidInput as error:
        raise ConfigurationError(f"RELAY_{str(error.field).upper()}_URL: {error}") from error


def make_address_policy(settings: Settings) -> AddressPolicy:
    """Return the rules for addresses."""
    return AddressPolicy(
        allow_private=settings.allow_private_endpoints,
        allowed_cidrs=tuple(str(network) for network in settings.allowed_cidrs),
        denied_cidrs=tuple(str(network) for network in settings.denied_cidrs),
    )


def _arm(settings: Settings) -> None:
    failpoints.arm({point.name: point.action for point in settings.failpoint})
    for warning in warnings_of(settings):
        log.warning(warning)


def _check(engine: sa.Engine, *, lease_of: Settings | None = None) -> None:
    """Check the schema, and the lease where one is taken; what is refused leaves no connection open."""
    try:
        with engine.connect() as connection:
            schema.check(connection)
            if lease_of is not None:
                _check_lease(connection, lease_of)
    except BaseException:
        engine.dispose()
        raise


def _check_lease(connection: sa.Connection, settings: Settings) -> None:
    longest_ms = destination_rows.longest_timeout_ms(connection)
    if longest_ms > settings.longest_timeout_ms:
        raise ConfigurationError(
            f"RELAY_LEASE_SECS is {settings.lease_secs}, but an endpoint's timeout_ms is {longest_ms}: a lease could run "
            f"out mid-request. Set it to more than {longest_ms // 1000 + LEASE_SLACK_SECS}"
        )


def _master_keys(settings: Settings) -> dict[str, object]:
    """The master keys that a process holds, by id and fingerprint, the sealing one first: for `relay keys rotate`."""
    return {"master_keys": [[key.id, key.fingerprint] for key in settings.master_keys]}


def _tracing(settings: Settings, role: str) -> Tracing | None:
    return make_tracing(role) if settings.tracing else None


def _note_pools(engines: Mapping[str, sa.Engine]) -> None:
    pools = {name: cast("sa.QueuePool", engine.pool) for name, engine in engines.items()}
    metrics.POOLS.in_use = {name: pool.checkedout() for name, pool in pools.items()}
    metrics.POOLS.limits = {name: pool.size() for name, pool in pools.items()}


def _consumer_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


def _ignore(_: object) -> None:
    """Drop a result."""
