"""A Redis behind a Unix socket, which Celery spells otherwise than Redis's own client does."""

from __future__ import annotations

from typing import Any

from relay.config_sources import load_settings
from relay.outbox.stream import connect
from relay.tasks.app import make_app
from tests.surroundings.servers import folder, redis_server


def test_both_clients_reach_the_same_database() -> None:
    """With a password and a number of its own: what one writes the other reads."""
    with folder() as home:
        socket = home / "redis" / "socket"
        settings = {"port": "0", "unixsocket": str(socket), "requirepass": "socket-for-tests", "save": '""'}
        url = f"unix://:socket-for-tests@{socket}?db=3"
        with redis_server(home / "redis", settings, connect(url)), connect(url) as client:
            app = make_app(load_settings({"RELAY_BROKER_URL": url}))
            with app.connection() as celery:
                celery.ensure_connection(max_retries=1)
                channel: Any = celery.default_channel
                channel.client.set("written", "by celery")
            assert list(client.scan_iter(match="*written"))
