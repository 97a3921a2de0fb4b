"""The limits: each part of the hot path alone, at full speed, so that a drain's distance from them is known.

Every part runs in as many processes as there are workers. The parts share the machine's cores when they run together,
so beside the slowest of them stands the rate of doing one after the other (`in_turn_per_second`).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from relay.core.model import AttemptClass, Signing, Status
from relay.core.secret import new_secret
from relay.core.signing import signature_headers, signing_key
from relay.delivery.engine import Completed, Engine, SendRequest
from relay.loadtest import drain
from relay.loadtest.seed import make_deliveries, make_workspace, payload_of
from relay.outbox.stream import Stream, connect
from relay.store import announcements, claims, results
from relay.store.engine import make_hot_engine
from relay.store.results import AttemptRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.loadtest.report import Report
    from relay.loadtest.scenario import Options
    from relay.loadtest.stack import Stack

COUNT: Final = 20_000
#: As the workers do it: claimed at once, recorded at once, announced at once, under way at once.
_CLAIMED: Final = 200
_RECORDED: Final = 500
_ANNOUNCED: Final = 1_000
_IN_FLIGHT: Final = 512
#: Seconds for a process to come up before all start together.
_START_SECS: Final = 3.0

#: What a part returns: when it began and ended (Unix seconds), the CPU seconds it used, and how many it did.
Measured = tuple[float, float, float, int]


def run(options: Options) -> Report:
    """Measure each part, then a drain in the same stack; the report's rate is the slowest part's."""
    count = options.count or COUNT
    with options.stack() as stack:
        parts = measure_parts(stack, count, options.workers, options.say)
        slowest = min(parts, key=lambda name: parts[name]["per_second"])
        stack.connection.execute("truncate relay.workspaces, relay.delivery_attempts cascade  -- relay loadtest")
        options.say("and the whole path")
        drained = drain.run_in(stack, options)
        share = (drained.rate_per_second or 0.0) / parts[slowest]["per_second"]
        return replace(
            drained,
            scenario="limit",
            settings={
                **drained.settings,
                "part_count": count,
                "figures": {
                    **parts,
                    "slowest": slowest,
                    "in_turn_per_second": round(1 / sum(1 / part["per_second"] for part in parts.values()), 1),
                    "drain_per_second": drained.rate_per_second,
                    "drain_share_of_slowest": round(share, 3),
                },
            },
        )


def measure_parts(
    stack: Stack, count: int, workers: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, float]]:
    """Run each part alone; return its rate, and its CPU microseconds a delivery in the processes that did it."""
    share = count // workers
    parts: dict[str, dict[str, float]] = {}
    sink = stack.start_sink(origins=drain.ENDPOINTS)
    urls = [f"{origin}/endpoint/{number}" for number, origin in enumerate(sink.urls)]
    say("the engine to the sink")
    parts["send"] = _together([(send, (urls, share)) for _ in range(workers)])
    say("the stream, in and out")
    parts["stream"] = _together(
        [(stream, (stack.broker_url, f"{stack.prefix}-{number}", share)) for number in range(workers)]
    )
    workspace = make_workspace(stack.connection, stack.vault, urls, name="limit")
    make_deliveries(
        stack.connection, workspace, share * workers, due_at=datetime.now(UTC), payload_bytes=drain.PAYLOAD_BYTES
    )
    say("marking as announced")
    parts["mark"] = _together([(mark, (stack.database_url,))])
    say("claiming and recording")
    ids = [row[0] for row in stack.connection.execute("select id from relay.deliveries order by id", binary=True)]
    parts["claim_and_record"] = _together(
        [(claim_and_record, (stack.database_url, ids[number::workers])) for number in range(workers)]
    )
    return parts


def send(urls: Sequence[str], count: int, start_at: float) -> Measured:
    """Send `count` signed requests through an engine of its own, as many under way as a worker may have."""
    body = payload_of(drain.PAYLOAD_BYTES)
    key = signing_key(Signing.RELAY, new_secret(os.urandom(32)))
    made = [_request(urls[number % len(urls)], body, key) for number in range(count)]
    finished = threading.Event()
    done = started = 0

    def on_done(batch: list[Completed]) -> None:
        nonlocal done, started
        failed = [one.observation for one in batch if one.observation is None or one.observation.status is None]
        if failed:
            raise RuntimeError(f"a send failed: {failed[0]}")
        done += len(batch)
        more = made[started : started + len(batch)]
        if more:
            started += len(more)
            engine.submit(more)
        if done >= count:
            finished.set()

    engine = Engine(policy=lambda _: None, max_response_bytes=65_536, snippet_bytes=2_048, on_done=on_done)
    engine.start()
    began, cpu = _start(start_at)
    started = min(_IN_FLIGHT, count)
    engine.submit(made[:started])
    while not finished.wait(30.0):
        if not engine.in_flight:
            raise RuntimeError("the engine stopped sending")
    measured = (began, time.time(), time.process_time() - cpu, done)
    engine.stop(time.monotonic() + 1.0)
    return measured


def stream(broker_url: str, prefix: str, count: int, start_at: float) -> Measured:
    """Announce and then read and acknowledge `count` hints on a stream of its own."""
    client = connect(broker_url, block_secs=1.0)
    hints = Stream(client, prefix=prefix, consumer="limit")
    hints.ensure_group()
    ids = [uuid4() for _ in range(count)]
    began, cpu = _start(start_at)
    for first in range(0, count, _ANNOUNCED):
        hints.announce(ids[first : first + _ANNOUNCED])
    done = 0
    while done < count:
        read = hints.read(_CLAIMED, block_ms=500)
        hints.acknowledge([hint.entry for hint in read])
        done += len(read)
    measured = (began, time.time(), time.process_time() - cpu, done)
    client.delete(hints.key)
    client.close()
    return measured


def mark(database_url: str, start_at: float) -> Measured:
    """Mark every due row as announced, as the publisher does. One process: there is one publisher."""
    engine = make_hot_engine(database_url, name="loadtest", size=1)
    done = 0
    with engine.connect() as connection:
        after = announcements.START
        began, cpu = _start(start_at)
        while (marked := announcements.mark(connection, after=after, limit=_ANNOUNCED)).last is not None:
            after = marked.last
            done += len(marked.ids)
        measured = (began, time.time(), time.process_time() - cpu, done)
    engine.dispose()
    return measured


def claim_and_record(database_url: str, ids: Sequence[UUID], start_at: float) -> Measured:
    """Claim `ids` and record each as delivered, with nothing between and the recording in a thread beside."""
    engine = make_hot_engine(database_url, name="loadtest", size=2)
    waiting: list[AttemptRow] = []
    done = 0
    with engine.connect() as connection:
        began, cpu = _start(start_at)
        for first in range(0, len(ids), _CLAIMED):
            token = uuid4()
            claimed = claims.claim(
                connection, ids[first : first + _CLAIMED], token=token, lease_secs=60, max_bytes=8_388_608
            )
            waiting += [_delivered(row, token) for row in claimed]
            while len(waiting) >= _RECORDED:
                done += results.record(connection, waiting[:_RECORDED])
                del waiting[:_RECORDED]
        if waiting:
            done += results.record(connection, waiting)
        measured = (began, time.time(), time.process_time() - cpu, done)
    engine.dispose()
    if done != len(ids):
        raise RuntimeError(f"{len(ids) - done} of {len(ids)} rows were not recorded")
    return measured


def _together(calls: Sequence[tuple[Callable[..., Measured], tuple[Any, ...]]]) -> dict[str, float]:
    """Run each call in a process of its own, all from the same moment on."""
    start_at = time.time() + _START_SECS
    with ProcessPoolExecutor(len(calls), mp_context=multiprocessing.get_context("spawn")) as pool:
        measured = [
            future.result() for future in [pool.submit(call, *arguments, start_at) for call, arguments in calls]
        ]
    seconds = max(end for _, end, _, _ in measured) - min(began for began, _, _, _ in measured)
    done = sum(count for *_, count in measured)
    return {
        "per_second": round(done / seconds, 1),
        "cpu_us": round(sum(cpu for _, _, cpu, _ in measured) / done * 1e6, 1),
    }


def _start(start_at: float) -> tuple[float, float]:
    time.sleep(max(0.0, start_at - time.time()))
    return time.time(), time.process_time()


def _request(url: str, body: bytes, key: bytes) -> SendRequest:
    signed = signature_headers(
        Signing.RELAY,
        secrets=[key],
        delivery_id=str(uuid4()),
        event_id=str(uuid4()),
        event_type="loadtest.made",
        attempt=1,
        timestamp=int(time.time()),
        body=body,
    )
    return SendRequest(
        key=None,
        url=url,
        body=body,
        headers=["User-Agent: Relay/limit", "Accept:", "Expect:", "Content-Type: application/json", *signed],
        timeout_ms=30_000,
        connect_timeout_ms=5_000,
        idle_timeout_ms=10_000,
        start_by=float("inf"),
    )


def _delivered(row: claims.Claimed, token: UUID) -> AttemptRow:
    return AttemptRow(
        delivery_id=row.id,
        lease_token=token,
        next_status=Status.DELIVERED,
        reason=None,
        wait_secs=None,
        at=row.claimed_at,
        number=row.attempt_count,
        generation=row.generation,
        attempt_class=AttemptClass.SUCCESS,
        code=None,
        error=None,
        http_status=204,
        body_incomplete=False,
        sends=1,
        dns_us=0,
        connect_us=0,
        tls_us=0,
        first_byte_us=900,
        total_us=1_000,
        bytes_sent=900,
        bytes_received=30,
        remote_address="127.0.0.1",
        worker="limit",
        reply_headers=None,
        snippet=None,
    )
