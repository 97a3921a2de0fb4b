"""Traces, for who has OpenTelemetry and sets RELAY_TRACING: ingest, publish, claim, send, persist.

The context travels with the event, in Postgres, since nothing else does from one process to the next. A process without
tracing has None in place of a `Tracing`, asks for it once a batch, and imports none of this. Where the spans go is told
by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, …); they are sent behind the work,
some at a time, and are lost where nobody takes them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

#: The header, in W3C's Trace Context.
HEADER: Final = "traceparent"
#: Seconds that sending spans may take, and spans that wait for it; what comes beyond is dropped.
EXPORT_SECS: Final = 3
QUEUED: Final = 2048
_MISSING: Final = "RELAY_TRACING is true, but OpenTelemetry is not installed: pip install '.[otel]' in a clone of Relay"


def make_tracing(role: str) -> Tracing:
    """Make this process's tracing, with an exporter (OTLP over HTTP). Raises ConfigurationError where it is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - the same
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - the same
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - the same
    except ImportError as error:
        raise ConfigurationError(_MISSING) from error
    provider = TracerProvider(resource=Resource.create({"service.name": f"relay-{role}"}))
    # All that waits in one request: what is left at the end is tried once, and an absent collector holds no process up.
    exporter = OTLPSpanExporter(timeout=EXPORT_SECS)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUED, max_export_batch_size=QUEUED))
    return Tracing(provider)


class Tracing:
    """Makes the spans of one process. Safe from any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - an extra
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer("relay")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, str | int], *, kind: str) -> Span:
        """Begin a span under a `traceparent`; one that is none, or malformed, begins a trace of its own.

        `kind` is one of server, client, producer, consumer and internal.
        """
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an extra

        return self._tracer.start_span(
            name, context=self._context(parent), kind=SpanKind[kind.upper()], attributes=dict(attributes)
        )

    def record(self, name: str, parent: str, attributes: Mapping[str, str | int], *, began: float) -> str:
        """Record a span that began at `began` (Unix seconds) and ends now; return its own `traceparent`."""
        span = self._tracer.start_span(
            name, context=self._context(parent), start_time=int(began * 1e9), attributes=dict(attributes)
        )
        span.end(max(time.time_ns(), int(began * 1e9)))
        return traceparent(span)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _context(self, parent: str | None) -> Context:
        from opentelemetry.context import Context  # noqa: PLC0415 - an extra

        # An empty one, and not the thread's: nothing here is current.
        return self._propagator.extract({HEADER: parent or ""}, context=Context())


def traceparent(span: Span) -> str:
    """Spell a span's context as the header does."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def server_of(url: str) -> dict[str, str | int]:
    """Return what a span shows of a URL: scheme, host and port. Login, path and query may all hold what is secret."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"url.scheme": parts.scheme, "server.address": parts.hostname or "", "server.port": port}
