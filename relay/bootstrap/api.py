"""The web process's parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from relay.bootstrap.policies import held_keys, make_address_policy, make_url_policy, make_vault
from relay.bootstrap.roles import arm, tracing_of
from relay.config import Settings, require
from relay.process.heart import Heart
from relay.process.metrics_api import ApiFigures
from relay.store.engine import make_engine, make_hot_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    import sqlalchemy as sa

    from relay.core.address import AddressPolicy
    from relay.core.url import UrlPolicy
    from relay.store.vault import Vault
    from relay.tracing import Tracing

#: Seconds after which the API gives up on a silent database: a producer that waits for its 202, and everybody else.
INGEST_PATIENCE_SECS = 4
API_PATIENCE_SECS = 10


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


def make_api(settings: Settings, figures: ApiFigures | None = None) -> Api:
    """Wire the API. Connects to nothing yet: it must start while the database is away, and answer 503.

    `figures` are this process's among those of several.
    """
    arm(settings)
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
        return held_keys(settings)

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
        tracing=tracing_of(settings, "api"),
        process_id=process_id,
    )
