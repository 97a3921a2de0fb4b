"""The publisher's parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from relay import metrics
from relay.bootstrap.roles import arm, consumer_name, note_pools, tracing_of
from relay.bootstrap.schema import check
from relay.config import require
from relay.outbox.publisher import Publisher
from relay.outbox.stream import Stream, connect
from relay.process.heart import Heart
from relay.process.metrics_queue import QueueGauges
from relay.process.vitals import Vitals
from relay.store.engine import make_engine, make_hot_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.config import Settings


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
        note_pools({"main": self.engine, "hot": self.hot})


def make_publisher(settings: Settings) -> PublisherParts:
    """Wire the publisher, the schema checked."""
    arm(settings)
    url = require(settings.database_url, "DATABASE_URL")
    engine = make_engine(url, name="publisher", size=2)
    check(engine)
    client = connect(require(settings.broker_url, "RELAY_BROKER_URL"))
    stream = Stream(client, prefix=settings.prefix, consumer=consumer_name())
    hot = make_hot_engine(url, name="publisher", size=2, may_forget=True)
    publisher = Publisher(hot, stream, tracing=tracing_of(settings, "publisher"))
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
