"""The broker's URL: sentinels as one URL, and what Celery is told."""

from __future__ import annotations

import pytest

from relay.config_sources import load_settings
from relay.core.broker_url import Sentinels, read_sentinels
from relay.core.errors import ConfigurationError
from relay.outbox.broker import celery_settings


def test_sentinels_are_read() -> None:
    """Several hosts, with and without a port, IPv6 in brackets; logins for Redis and for the sentinels apart."""
    text = "sentinel://us%40er:p%3Aw@a.example,b:26380,[::1]:26381/3?master=m-1&sentinel_username=s&sentinel_password=x"
    assert read_sentinels(text) == Sentinels(
        hosts=(("a.example", 26379), ("b", 26380), ("::1", 26381)),
        master="m-1",
        db=3,
        username="us@er",
        password="p:w",
        sentinel_username="s",
        sentinel_password="x",
    )
    assert read_sentinels("sentinel://a?master=m") == Sentinels(hosts=(("a", 26379),), master="m")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("sentinel://", "must be written as"),
        ("sentinel://s3cr3t@", "must be written as"),
        ("sentinel://a:26379;sentinel://b:26379/0?master=s3cr3t", "must be written as"),
        ("sentinel://:s3cr3t@a,,b/0?master=m", "host or host:port"),
        ("sentinel://:s3cr3t@a:0/0?master=m", "host or host:port"),
        ("sentinel://:s3cr3t@a:65536/0?master=m", "host or host:port"),
        ("sentinel://:s3cr3t@a/0", "must name the master"),
        ("sentinel://:s3cr3t@a/0?master=", "must name the master"),
        ("sentinel://:s3cr3t@a/0?master=m&ssl_ca_certs=/ca", "TLS together with Sentinel"),
        ("sentinel://:s3cr3t@a/0?master=m&passwd=s3cr3t", "no parameter but"),
    ],
)
def test_other_sentinel_urls_are_refused(text: str, remedy: str) -> None:
    """The fault names the setting and what to write, and shows nothing of what was given."""
    with pytest.raises(ConfigurationError, match=remedy) as raised:
        load_settings({"RELAY_BROKER_URL": text})
    assert "RELAY_BROKER_URL" in str(raised.value)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://h", {"broker_url": "redis://h:6379/0"}),
        ("redis://:p%40s@[::1]:1/2", {"broker_url": "redis://:p%40s@[::1]:1/2"}),
        ("redis://h?db=4", {"broker_url": "redis://h:6379/4"}),
        ("unix:///run/redis.sock?db=3", {"broker_url": "redis+socket:///run/redis.sock?virtual_host=3"}),
        (
            "rediss://:p@h:1/0",
            {
                "broker_url": "rediss://:p@h:1/0",
                "broker_use_ssl": {"ssl_cert_reqs": "required", "ssl_check_hostname": True},
            },
        ),
        (
            "rediss://h/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            {
                "broker_url": "rediss://h:6379/0",
                "broker_use_ssl": {
                    "ssl_cert_reqs": "required",
                    "ssl_check_hostname": False,
                    "ssl_ca_certs": "/ca.pem",
                },
            },
        ),
        (
            "sentinel://:p@a,b:2/1?master=m&sentinel_password=x",
            {
                "broker_url": "sentinel://:p@a:26379/1;sentinel://:p@b:2/1",
                "broker_transport_options": {
                    "master_name": "m",
                    "sentinel_kwargs": {"socket_timeout": 1.5, "socket_connect_timeout": 1.0, "password": "x"},
                },
            },
        ),
    ],
)
def test_celery_is_told_the_same(url: str, told: dict[str, object]) -> None:
    """Each way to reach Redis as Celery spells it; over TLS certificates are checked unless the URL says otherwise."""
    assert celery_settings(url) == told
