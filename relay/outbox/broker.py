"""How RELAY_BROKER_URL is reached: by Redis's own client and, as Celery wants it said, by Celery.

The two read a URL differently. What matters most: of `rediss://` without parameters Celery makes TLS
that trusts any certificate; here the server's certificate and name are checked unless the URL says not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from relay.core.broker_url import is_sentinel, read_sentinels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.core.broker_url import Sentinels


def client_of(url: str, **options: Any) -> redis.Redis:
    """Make a client of the Redis at `url`, whose connections have `options`; with sentinels, of whatever is the master.

    The sentinels are asked at each new connection. Without one that answers, or a master that they know, commands raise
    redis.ConnectionError.
    """
    if not is_sentinel(url):
        return redis.Redis.from_url(url, **options)
    found = read_sentinels(url)
    timeouts = {name: value for name, value in options.items() if name.startswith("socket_") or name == "retry"}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]  # the library's
        found.hosts,
        sentinel_kwargs={**timeouts, **_sentinel_login(found), "protocol": 2},
        db=found.db,
        username=found.username,
        password=found.password,
        **options,
    )
    client: redis.Redis = sentinels.master_for(found.master)  # type: ignore[no-untyped-call]  # the library's
    return client


def celery_settings(url: str) -> dict[str, Any]:
    """Celery's settings that say the same as `url`: `broker_url`, and where they are needed `broker_use_ssl` and some
    `broker_transport_options`."""
    if is_sentinel(url):
        return _celery_sentinels(read_sentinels(url))
    given: Mapping[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]  # the library's
    login = _login(given.get("username"), given.get("password"))
    db = given.get("db", 0)
    if "path" in given:
        return {"broker_url": f"redis+socket://{login}{quote(given['path'])}?virtual_host={db}"}
    scheme = "rediss" if url.startswith("rediss:") else "redis"
    place = _place(given.get("host", "localhost"), given.get("port", 6379))
    settings: dict[str, Any] = {"broker_url": f"{scheme}://{login}{place}/{db}"}
    if scheme == "rediss":
        tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
        settings["broker_use_ssl"] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **tls}
    return settings


def _celery_sentinels(found: Sentinels) -> dict[str, Any]:
    login = _login(found.username, found.password)
    return {
        "broker_url": ";".join(f"sentinel://{login}{_place(*host)}/{found.db}" for host in found.hosts),
        "broker_transport_options": {
            "master_name": found.master,
            # Seconds. A sentinel that is away must not hold up the asking of the next.
            "sentinel_kwargs": {"socket_timeout": 1.5, "socket_connect_timeout": 1.0, **_sentinel_login(found)},
        },
    }


def _sentinel_login(found: Sentinels) -> dict[str, str]:
    login = {"username": found.sentinel_username, "password": found.sentinel_password}
    return {name: value for name, value in login.items() if value is not None}


def _login(username: str | None, password: str | None) -> str:
    if not username and not password:
        return ""
    return f"{quote(username or '', safe='')}:{quote(password or '', safe='')}@"


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
