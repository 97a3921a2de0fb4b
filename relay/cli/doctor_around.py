"""`relay doctor`, what is around the database: settings, Redis, names, and the API."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import redis
import requests

from relay.bootstrap.policies import make_address_policy
from relay.cli.doctor_database import judge_clock
from relay.cli.findings import Finding, fail, ok, warn
from relay.config import require, warnings_of
from relay.core.address import refusal
from relay.core.errors import ConfigurationError, RelayError
from relay.core.observation import Fault
from relay.delivery.resolver import Resolver
from relay.outbox.stream import connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from relay.config import Settings
    from relay.delivery.resolver import Answer

#: The oldest Redis that Relay runs on.
LEAST_REDIS: Final = (6, 2)
#: The part of its memory at which a Redis is nearly full.
_NEARLY_FULL: Final = 0.9
#: A name that no name server knows (RFC 6761 section 6.4): one that says so works.
_NO_NAME: Final = "relay-doctor.invalid"
#: Seconds for all look-ups together, and for the API's answer.
_LOOK_UP_SECS: Final = 8.0
_API_SECS: Final = 5.0
#: Names that are told of one by one.
_NAMED: Final = 5


def look_at_settings(settings: Settings) -> Iterator[Finding]:
    """Tell what is allowed but will surprise somebody."""
    said = warnings_of(settings)
    for one in said:
        yield warn("settings", one, "change it, unless it is meant")
    if not said:
        yield ok("settings", "agree with each other")


def look_at_redis(settings: Settings) -> Iterator[Finding]:
    """Look at Redis: that it answers, its release, what it does when it is full, and its clock."""
    try:
        url = require(settings.broker_url, "RELAY_BROKER_URL")
    except ConfigurationError as error:
        yield fail("redis", "RELAY_BROKER_URL is not set", str(error))
        return
    try:
        with contextlib.closing(connect(url)) as client:
            info: dict[str, Any] = client.info()
            before = time.time()
            seconds, microseconds = client.time()
            middle = (before + time.time()) / 2
    except (redis.RedisError, RelayError, ValueError) as error:
        yield fail("redis", f"does not answer: {error}", "start it, or correct RELAY_BROKER_URL (host, port, password)")
        return
    yield _release(info)
    yield _eviction(info)
    yield judge_clock("redis's clock", seconds + microseconds / 1_000_000 - middle)


def look_up_names(settings: Settings, urls: Iterable[str]) -> Iterator[Finding]:
    """Look the endpoints' names up as workers do, from here."""
    if settings.egress_proxy is not None:
        yield ok("dns", "the egress proxy looks names up")
        return
    names = {urlsplit(url).hostname or "" for url in urls}
    names = {name for name in names if name and not _is_address(name)} - {"localhost"}
    answers = _resolve(settings, [*sorted(names), _NO_NAME])
    away = [name for name, answer in answers.items() if answer is None or answer.fault is Fault.DNS_TEMPORARY]
    if len(away) == len(answers):
        remedy = "check the name servers in /etc/resolv.conf, and that UDP and TCP port 53 are open to them"
        yield fail("dns", "no name server answers", remedy)
        return
    wrong = [name for name in sorted(names) if (answer := answers[name]) is None or answer.fault is not None]
    if not wrong:
        yield ok("dns", f"{len(names)} names of endpoints were found" if names else "the name server answers")
        return
    for name in wrong[:_NAMED]:
        answer = answers[name]
        said = "no answer in time" if answer is None else answer.text
        yield warn("dns", f"{name}: {said}", "tell the endpoint's owner, or correct its URL")
    if len(wrong) > _NAMED:
        yield warn(
            "dns", f"{len(wrong) - _NAMED} more names of endpoints are not found", "see the deliveries' attempts"
        )


def look_at_api(url: str | None) -> Finding:
    """Ask the API, where one is known; nothing else here needs it."""
    if url is None:
        return ok("api", "not looked at: RELAY_URL is not set")
    base = url.rstrip("/")
    try:
        status = requests.get(f"{base}/readyz?for=ingest", timeout=_API_SECS, allow_redirects=False).status_code
    except requests.RequestException as error:
        return fail(
            "api", f"{base} does not answer ({type(error).__name__})", "start `relay api`, or correct RELAY_URL"
        )
    if status != 200:
        return fail("api", f"{base}/readyz?for=ingest answers {status}", "see the database above, and the API's log")
    return ok("api", f"{base} takes events")


def _release(info: dict[str, Any]) -> Finding:
    valkey = info.get("valkey_version")
    said = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '?')}"
    parts = str(info.get("redis_version", "0")).split(".")
    version = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if not valkey and version < LEAST_REDIS:
        return fail("redis", said, f"Relay needs Redis {'.'.join(map(str, LEAST_REDIS))} or later: upgrade it")
    return ok("redis", said)


def _eviction(info: dict[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    remedy = "set maxmemory-policy noeviction: what is evicted is late, as nobody hears of it"
    if policy.startswith("allkeys") and most:
        return fail("redis's eviction", f"{policy}, with {most} bytes at most", remedy)
    if policy != "noeviction":
        return warn("redis's eviction", policy, remedy)
    if most and used > most * _NEARLY_FULL:
        return warn("redis's eviction", f"noeviction; {used} of {most} bytes are used", "raise maxmemory")
    return ok("redis's eviction", policy)


def _resolve(settings: Settings, names: list[str]) -> dict[str, Answer | None]:
    arrived = threading.Event()
    policy = make_address_policy(settings)
    resolver = Resolver(policy=lambda address: refusal(address, policy), wake=arrived.set)
    deadline = time.monotonic() + _LOOK_UP_SECS
    try:
        waiting = {name for name in names if resolver.find(name, time.monotonic()) is None}
        while waiting and (left := deadline - time.monotonic()) > 0:
            arrived.wait(left)
            arrived.clear()
            waiting -= set(resolver.collect(time.monotonic()))
        return {name: resolver.kept(name) for name in names}
    finally:
        resolver.close()


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdecimal()
