"""One trace leads from the producer's call to the written result, through Postgres, and only where it is asked for."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from relay.bootstrap import roles
from relay.core.errors import ConfigurationError
from relay.outbox.publisher import Publisher
from relay.outbox.stream import Stream, connect
from relay.store.engine import make_hot_engine
from relay.tracing import Tracing, make_tracing, server_of
from relay.web.app import create_app
from tests.hostile import wait_until
from tests.instance import instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.sdk.trace import ReadableSpan

    from relay.bootstrap.worker import Worker
    from relay.testkit.receiver import Receiver
    from tests.rows import Rows

PRODUCERS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans() -> Iterator[tuple[Tracing, InMemorySpanExporter]]:
    """A tracing that keeps its spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    yield tracing, exporter
    tracing.close()


def test_a_trace_leads_from_ingest_to_persist(
    database: str,
    broker: str,
    rows: Rows,
    receiver: Receiver,
    start_worker: Callable[..., Worker],
    spans: tuple[Tracing, InMemorySpanExporter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ingest hangs under the producer's span, publish and claim under ingest, send under claim, persist under send; the
    receiver is told the send's context. Single events with and without a key and batches are traced; an unsigned job
    is sent without a traceparent, and what came in untraced goes out so."""
    tracing, exporter = spans
    monkeypatch.setattr(roles, "make_tracing", lambda _role: tracing)
    with instance(database, RELAY_ALLOW_PRIVATE_ENDPOINTS="true", RELAY_TRACING="true") as relay:
        relay.workspace()
        key = relay.key()
        for path in ("/ok", "/status?code=404&token=secret-in-a-query"):
            relay.endpoint(key, url=receiver.url + path, rate_per_second=1000, event_types=["a.b"])
        answers = [
            relay.event(key, b'{"type":"a.b"}', traceparent=PRODUCERS),
            relay.event(key, b'{"type":"a.b"}', traceparent="nonsense", Idempotency_Key="k"),
            relay.client.post("/v1/events/batch", json=[{"type": "a.b", "payload": {"n": 1}}], headers=key),
        ]
        assert [answer.status_code for answer in answers] == [202, 202, 202], [answer.text for answer in answers]
        job = relay.client.post(
            "/enqueue",
            json={"n": 1},
            headers={**key, "Relay-Url": f"{receiver.url}/ok?job", "traceparent": PRODUCERS},
        )
        assert job.status_code in {200, 201, 202}, job.text
        plain = create_app(dataclasses.replace(relay.api, tracing=None)).test_client()
        untraced = plain.post("/v1/events", json={"type": "a.b"}, headers=key)
        assert untraced.status_code == 202

        engine = make_hot_engine(database, name="publisher", size=1)
        with connect(broker) as client, engine.connect() as connection:
            stream = Stream(client, prefix="t", consumer="p")
            stream.ensure_group()
            assert Publisher(engine, stream, tracing=tracing).run_once(connection) == 9
        engine.dispose()
        start_worker(RELAY_TRACING="true")
        wait_until(lambda: rows.value("select count(*) from relay.deliveries where status < 2") == 0, patience=20)
        wait_until(lambda: len(_named(exporter, "relay.persist")) == 6)

    ingests = _named(exporter, "relay.ingest")
    assert len(ingests) == 4
    assert f"{ingests[0].context.trace_id:032x}" == PRODUCERS[3:35]
    assert ingests[0].parent is not None
    assert f"{ingests[0].parent.span_id:016x}" == PRODUCERS[36:52]
    assert ingests[1].parent is None
    traced = {one.context.span_id: one for one in ingests[:3]}
    by_id = {one.context.span_id: one for one in exporter.get_finished_spans()}
    for name, parent in (("publish", "ingest"), ("claim", "ingest"), ("send", "claim"), ("persist", "send")):
        found = _named(exporter, f"relay.{name}")
        assert len(found) == 6, name
        for one in found:
            assert one.parent is not None
            above = by_id[one.parent.span_id]
            assert above.name == f"relay.{parent}"
            assert one.context.trace_id == above.context.trace_id
            assert one.start_time is not None
            assert one.end_time is not None
            assert one.start_time <= one.end_time
            if name == "publish":
                assert above.context.span_id in traced
    sends = {
        f"00-{one.context.trace_id:032x}-{one.context.span_id:016x}": one for one in _named(exporter, "relay.send")
    }
    told = [re.search(rb"(?im)^traceparent: (\S+)\r?$", request.head) for request in receiver.requests()]
    assert {match[1].decode()[:52] for match in told if match is not None} == set(sends)
    assert sum(match is None for match in told) == 3, "the job and the untraced event's two"
    outcomes = sorted(str((one.attributes or {})["relay.outcome"]) for one in sends.values())
    assert outcomes == ["permanent_failure"] * 3 + ["success"] * 3
    shown = "".join(one.to_json() for one in exporter.get_finished_spans())
    assert ("secret-in-a-query" in shown, "/status" in shown, "/ok" in shown) == (False, False, False)
    assert {(one.attributes or {})["server.port"] for one in sends.values()} == {urlsplit(receiver.url).port}


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """RELAY_TRACING without the extra is an error with the remedy; without RELAY_TRACING nothing of it is needed."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"\[otel\]"):
        make_tracing("api")


def test_a_span_shows_no_secret_of_a_url() -> None:
    """Login, path and query are left out."""
    assert server_of("https://u:p@hooks.example.com:8443/in/token?token=x#y") == {
        "url.scheme": "https",
        "server.address": "hooks.example.com",
        "server.port": 8443,
    }
    assert server_of("http://[2001:db8::1]/a")["server.address"] == "2001:db8::1"
    assert [server_of(f"{scheme}://a.test/")["server.port"] for scheme in ("http", "https")] == [80, 443]


def _named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [one for one in exporter.get_finished_spans() if one.name == name]
