"""Settings: where they come from, what is refused, and what is never shown."""

from __future__ import annotations

import base64
import ipaddress
import json
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from relay.config import HIDDEN, Settings, describe, effective, require, variable_of, warnings_of
from relay.config_sources import load_settings
from relay.config_values import Bind, Failpoint, FailpointAction
from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

KEY = base64.b64encode(bytes(range(32))).decode()
OTHER = base64.urlsafe_b64encode(bytes(range(224, 256))).decode().rstrip("=")

SECRETS = {
    "DATABASE_URL": "postgresql://relay:s3cr3t-a@db/relay",
    "RELAY_BROKER_URL": "redis://:s3cr3t-b@redis:6379/0",
    "RELAY_ADMIN_KEY": "s3cr3t-c-sixteen-at-least",
    "RELAY_MASTER_KEYS": f"a:{KEY}",
    "RELAY_FLOWER_AUTH": "flower:s3cr3t-d",
    "RELAY_TESTKIT_SECRET": "whsec_s3cr3t-e",
    "RELAY_API_KEY": "rk_s3cr3t-f",
    "RELAY_EGRESS_PROXY": "http://user:s3cr3t-g@proxy:3128",
}


def fault_of(**environ: str) -> str:
    """What is said of an environment with one fault."""
    with pytest.raises(ConfigurationError) as raised:
        load_settings(environ)
    lines = str(raised.value).splitlines()
    assert len(lines) == 2, lines
    return lines[1].strip()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:s3cr3t@h1:5432,h2:5433/db", "several hosts in its query"),
        ("postgresql://u:s3cr3t@h:x/db", "a number for its port"),
        ("postgresql://u:s3cr3t/x@h/db", "a number for its port"),
    ],
)
def test_a_database_url_that_two_readers_would_read_differently_is_refused(url: str, said: str) -> None:
    """libpq and SQLAlchemy must agree on where it leads; the message gives the remedy, and nothing of the password."""
    fault = fault_of(DATABASE_URL=url)
    assert said in fault
    assert "s3cr3t" not in fault


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%2Fw@[::1]:5432/db",
        "postgresql://u@/db?host=a,b&port=1,2",
        "postgresql:///db",
        "postgresql://h/db",
    ],
)
def test_other_database_urls_are_taken_as_they_are(url: str) -> None:
    """Literals, several hosts in the query, a socket."""
    assert require(load_settings({"DATABASE_URL": url}).database_url, "DATABASE_URL") == url


def test_an_empty_environment_has_the_defaults() -> None:
    """Every setting that has a default works without being set."""
    values = {variable: value for variable, value, _ in effective(load_settings({}))}

    assert {variable: value for variable, value in values.items() if value} == {
        "RELAY_BIND": "127.0.0.1:8080",
        "RELAY_METRICS_BIND": "0.0.0.0:9091",
        "RELAY_MAX_PAYLOAD_BYTES": "262144",
        "RELAY_MAX_BATCH_BYTES": "8388608",
        "RELAY_MAX_IN_FLIGHT": "512",
        "RELAY_MAX_IN_FLIGHT_PER_ENDPOINT": "16",
        "RELAY_CLAIM_BATCH": "200",
        "RELAY_LEASE_SECS": "60",
        "RELAY_CONNECT_TIMEOUT_MS": "5000",
        "RELAY_IDLE_TIMEOUT_MS": "10000",
        "RELAY_TOTAL_TIMEOUT_MS": "30000",
        "RELAY_MAX_RESPONSE_BYTES": "65536",
        "RELAY_SNIPPET_BYTES": "2048",
        "RELAY_SHUTDOWN_GRACE_SECS": "35",
        "RELAY_RECONCILE_AFTER_SECS": "30",
        "RELAY_BREAKER": "true",
        "RELAY_BREAKER_THRESHOLD": "5",
        "RELAY_BREAKER_COOLDOWN_SECS": "30",
        "RELAY_BREAKER_MAX_COOLDOWN_SECS": "300",
        "RELAY_SECRET_OVERLAP_SECS": "86400",
        "RELAY_IDEMPOTENCY_RETENTION_SECS": "86400",
        "RELAY_RETAIN_ATTEMPTS_DAYS": "30",
        "RELAY_RETAIN_DELIVERED_DAYS": "30",
        "RELAY_RETAIN_DEAD_DAYS": "90",
        "RELAY_RETAIN_AUDIT_DAYS": "365",
        "RELAY_ALLOW_PRIVATE_ENDPOINTS": "false",
        "RELAY_REQUIRE_HTTPS": "true",
        "RELAY_ALLOWED_PORTS": "443",
        "RELAY_RETRY_AFTER_MAX_SECS": "3600",
        "RELAY_MAX_REPLAYS": "20",
        "RELAY_AUTO_DISABLE_AFTER_SECS": "432000",
        "RELAY_LOG_FORMAT": "auto",
        "RELAY_LOG_LEVEL": "info",
        "RELAY_TRACING": "false",
        "RELAY_TESTKIT_BIND": "127.0.0.1:9099",
        "RELAY_READY_MAX_LATENESS_SECS": "60",
        "RELAY_PREFIX": "relay",
        "RELAY_WORKSPACE_MAX_ENDPOINTS": "50",
        "RELAY_TELEGRAM_URL": "https://api.telegram.org",
        "RELAY_DISCORD_URL": "https://discord.com",
        "RELAY_SLACK_URL": "https://hooks.slack.com",
        "RELAY_FLOWER_BIND": "127.0.0.1:5555",
        "RELAY_API_PROCESSES": "1",
        "RELAY_API_THREADS": "16",
        "RELAY_WORKER_THREADS": "4",
        "RELAY_DB_POOL": "16",
    }
    assert {variable for variable, value in values.items() if not value} == {
        *SECRETS,
        "RELAY_ALLOWED_CIDRS",
        "RELAY_DENIED_CIDRS",
        "RELAY_ALLOWED_HOSTS",
        "RELAY_WORKSPACE_INGEST_RATE",
        "RELAY_URL",
        "RELAY_RUN_AS",
        "RELAY_FAILPOINT",
    }


def test_the_process_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the caller hands over counts."""
    monkeypatch.setenv("RELAY_LEASE_SECS", "999")
    monkeypatch.setenv("LEASE_SECS", "999")

    assert load_settings({}).lease_secs == 60


def test_sources_win_in_order_and_are_named(tmp_path: Path) -> None:
    """The environment wins over the file, the file over what was preset; an empty value hides a lower one."""
    dotenv = tmp_path / ".env"
    dotenv.write_text(
        "# a comment\nexport RELAY_MAX_REPLAYS=7\nRELAY_PREFIX='file'\nRELAY_DB_POOL=5\nPOSTGRES_PASSWORD=x\n"
    )
    settings = load_settings(
        {"RELAY_PREFIX": " env \n", "RELAY_DB_POOL": ""},
        dotenv=dotenv,
        preset={"RELAY_MAX_REPLAYS": "1", "RELAY_API_THREADS": "2"},
    )
    found = {variable: (value, source) for variable, value, source in effective(settings)}

    assert found["RELAY_PREFIX"] == ("env", "environment")
    assert found["RELAY_MAX_REPLAYS"] == ("7", ".env")
    assert found["RELAY_API_THREADS"] == ("2", "preset")
    assert found["RELAY_DB_POOL"] == ("16", "default")


def test_a_file_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    """The `.env` file is optional."""
    assert load_settings({}, dotenv=tmp_path / ".env") == load_settings({})


def test_a_file_is_taken_as_it_stands(tmp_path: Path) -> None:
    """A byte order mark is skipped, and nothing in a value is replaced."""
    dotenv = tmp_path / ".env"
    dotenv.write_bytes(b"\xef\xbb\xbfRELAY_ADMIN_KEY='a${HOME}b-sixteen'\r\nRELAY_DB_POOL=6\r\n")
    settings = load_settings({}, dotenv=dotenv)

    assert require(settings.admin_key, "RELAY_ADMIN_KEY") == "a${HOME}b-sixteen"
    assert settings.db_pool == 6


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A broken line and bytes that are not text are told with the file's name, the line, and no content."""
    dotenv = tmp_path / ".env"
    dotenv.write_text("RELAY_DB_POOL=6\nthis is no assignment\n")
    with pytest.raises(ConfigurationError, match=r"\.env, line 2: must be NAME=value"):
        load_settings({}, dotenv=dotenv)

    dotenv.write_bytes(b"RELAY_ADMIN_KEY=\xff\n")
    with pytest.raises(ConfigurationError, match="cannot be read as UTF-8"):
        load_settings({}, dotenv=dotenv)


def test_all_faults_are_told_together() -> None:
    """One start names every faulty variable, the unknown ones, and the contradictions among the sound ones."""
    with pytest.raises(ConfigurationError) as raised:
        load_settings(
            {
                "RELAY_LEASE_SECS": "abc",
                "RELAY_TOTAL_TIMEOUT_MS": "600000",
                "RELAY_BINDD": "x",
                "RELAY_MAX_IN_FLIGHT": "10",
                "RELAY_CLAIM_BATCH": "20",
                "RELAY_BREAKER": "perhaps",
                "DATABASE_URL": "mysql://u:s3cr3t@h/d",
            }
        )
    message = str(raised.value)

    assert "RELAY_LEASE_SECS='abc': must be a whole number" in message
    assert "RELAY_BINDD: there is no such setting; did you mean RELAY_BIND?" in message
    assert "RELAY_CLAIM_BATCH=20 is more than RELAY_MAX_IN_FLIGHT=10" in message
    assert "RELAY_BREAKER='perhaps': must be true or false" in message
    assert "DATABASE_URL: must be a URL that begins with postgresql://" in message
    assert "s3cr3t" not in message
    # The default lease would not fit that time-out, but it is not the lease that was given.
    assert len(message.splitlines()) == 6


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("RELAY_BINDD", "RELAY_BIND"),
        ("RELAY_LEASE_SEC", "RELAY_LEASE_SECS"),
        ("RELAY_MAX_INFLIGHT", "RELAY_MAX_IN_FLIGHT"),
        ("relay_prefix", "RELAY_PREFIX"),
        ("RELAY_DATABASE_URL", "DATABASE_URL"),
        ("RELAY_SERVICE", None),
        ("RELAY_BOGUS", None),
        ("RELAY_", None),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(variable: str, near: str | None) -> None:
    """A misspelled setting would silently be the default: it is an error that names what was meant."""
    fault = fault_of(**{variable: "x"})

    assert fault.startswith(f"{variable}: there is no such setting")
    if near:
        assert fault.endswith(f"did you mean {near}?")
    else:
        assert fault.endswith(": remove it")


@pytest.mark.parametrize(
    "variable",
    [
        "RELAY_SERVICE_HOST",
        "RELAY_PORT",
        "RELAY_API_SERVICE_HOST",
        "RELAY_API_SERVICE_PORT",
        "RELAY_API_SERVICE_PORT_HTTP",
        "RELAY_API_PORT",
        "RELAY_API_PORT_8080_TCP",
        "RELAY_API_PORT_8080_TCP_ADDR",
        "RELAY_API_PORT_8080_TCP_PORT",
        "RELAY_API_PORT_8080_TCP_PROTO",
        "RELAY_DNS_PORT_53_UDP",
        "PATH",
        "XRELAY_BIND",
    ],
)
def test_service_links_and_strangers_are_passed_over(variable: str) -> None:
    """What Kubernetes adds for services called relay-…, and other programs' variables, are nobody's mistake."""
    assert load_settings({variable: "tcp://10.0.0.1:8080"}) == load_settings({})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RELAY_LEASE_SECS": "40"}, "RELAY_LEASE_SECS=40 could run out .* raise it to 41 or more"),
        ({"RELAY_TOTAL_TIMEOUT_MS": "50000"}, "RELAY_TOTAL_TIMEOUT_MS=50000: raise it to 61"),
        (
            {"RELAY_CONNECT_TIMEOUT_MS": "30001"},
            "RELAY_CONNECT_TIMEOUT_MS=30001 is more than RELAY_TOTAL_TIMEOUT_MS=30000",
        ),
        ({"RELAY_SNIPPET_BYTES": "65537"}, "RELAY_SNIPPET_BYTES=65537 is more than RELAY_MAX_RESPONSE_BYTES=65536"),
        ({"RELAY_CLAIM_BATCH": "513"}, "RELAY_CLAIM_BATCH=513 is more than RELAY_MAX_IN_FLIGHT=512"),
        ({"RELAY_MAX_BATCH_BYTES": "1"}, "RELAY_MAX_PAYLOAD_BYTES=262144 is more than RELAY_MAX_BATCH_BYTES=1"),
        ({"RELAY_BREAKER_MAX_COOLDOWN_SECS": "29"}, "RELAY_BREAKER_COOLDOWN_SECS=30 is more than"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], words: str) -> None:
    """Settings that cannot both hold are refused, with the way out."""
    with pytest.raises(ConfigurationError, match=words):
        load_settings(environ)


def test_a_lease_that_outlasts_the_request_is_accepted() -> None:
    """B-23: ten seconds of slack and a little are enough; the room left for endpoints' own time-outs is told."""
    assert load_settings({"RELAY_LEASE_SECS": "41"}).longest_timeout_ms == 30_999


def test_defaults_follow_what_they_depend_on() -> None:
    """Lowering one setting does not contradict the default of another."""
    settings = load_settings(
        {
            "RELAY_MAX_IN_FLIGHT": "8",
            "RELAY_TOTAL_TIMEOUT_MS": "1000",
            "RELAY_MAX_RESPONSE_BYTES": "100",
            "RELAY_MAX_PAYLOAD_BYTES": "16000000",
            "RELAY_BREAKER_COOLDOWN_SECS": "900",
        }
    )

    assert settings.claim_batch == 8
    assert settings.connect_timeout_ms == 1_000
    assert settings.snippet_bytes == 100
    assert settings.max_batch_bytes == 16_000_000
    assert settings.breaker_max_cooldown_secs == 900


@pytest.mark.parametrize(
    ("environ", "https", "ports", "shown"),
    [
        ({}, True, {443}, "443"),
        ({"RELAY_REQUIRE_HTTPS": "false"}, False, {80, 443}, "80,443"),
        ({"RELAY_ALLOW_PRIVATE_ENDPOINTS": "true"}, False, None, "*"),
        ({"RELAY_ALLOW_PRIVATE_ENDPOINTS": "true", "RELAY_REQUIRE_HTTPS": "true"}, True, None, "*"),
        ({"RELAY_ALLOW_PRIVATE_ENDPOINTS": "true", "RELAY_ALLOWED_PORTS": "443"}, False, {443}, "443"),
        ({"RELAY_ALLOWED_PORTS": "443, 8443"}, True, {443, 8443}, "443,8443"),
        ({"RELAY_ALLOWED_PORTS": "*"}, True, None, "*"),
    ],
)
def test_https_and_ports_follow_the_development_switch(
    environ: dict[str, str], https: bool, ports: set[int] | None, shown: str
) -> None:
    """B-80, B-83: the switch turns HTTPS off and every port on, unless they are set themselves."""
    settings = load_settings(environ)

    assert settings.require_https is https
    assert settings.allowed_ports == ports
    assert ("RELAY_ALLOWED_PORTS", shown) in [row[:2] for row in effective(settings)]


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:0", Bind("127.0.0.1", 0)),
        ("[::1]:8080", Bind("::1", 8080)),
        ("[::]:65535", Bind("::", 65_535)),
        ("localhost:1", Bind("localhost", 1)),
    ],
)
def test_addresses_to_listen_on_are_read(text: str, bind: Bind) -> None:
    """Host and port come apart, IPv6 in brackets, and print as they were written."""
    assert load_settings({"RELAY_BIND": text}).bind == bind
    assert str(bind) == text


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RELAY_BIND", "8080", "must be host:port"),
        ("RELAY_BIND", ":8080", "must be host:port"),
        ("RELAY_BIND", "::1:8080", "must be host:port"),
        ("RELAY_BIND", "[::1]", "must be host:port"),
        ("RELAY_BIND", "[1.2.3.4]:80", "must be host:port"),
        ("RELAY_BIND", "[::zz]:80", "IPv6"),
        ("RELAY_BIND", "a:65536", "at most 65535"),
        ("RELAY_BIND", "a:٨٠", "must be host:port"),
        ("RELAY_LEASE_SECS", "1.5", "whole number"),
        ("RELAY_LEASE_SECS", "9" * 5_000, "whole number"),
        ("RELAY_MAX_IN_FLIGHT", "0", "at least 1"),
        ("RELAY_WORKSPACE_INGEST_RATE", "0", "above 0"),
        ("RELAY_WORKSPACE_INGEST_RATE", "nan", "must be a number"),
        ("RELAY_WORKSPACE_INGEST_RATE", "inf", "must be"),
        ("RELAY_ALLOWED_PORTS", "443,0", "ports from 1 to 65535"),
        ("RELAY_ALLOWED_PORTS", "https", "ports from 1 to 65535"),
        ("RELAY_ALLOWED_CIDRS", "10.0.0.0/33", "networks"),
        ("RELAY_ALLOWED_CIDRS", "example.com", "networks"),
        ("RELAY_DENIED_CIDRS", "10.1.2.3/8", "for 10.1.2.3/8 write 10.0.0.0/8"),
        ("RELAY_ALLOWED_HOSTS", "*.internal", "names and .suffixes"),
        ("RELAY_ALLOWED_HOSTS", "10.0.0.1", "RELAY_ALLOWED_CIDRS"),
        ("RELAY_ALLOWED_HOSTS", "a..b", "names and .suffixes"),
        ("RELAY_LOG_FORMAT", "xml", "'auto', 'json' or 'text'"),
        ("RELAY_LOG_LEVEL", "loud", "'debug'"),
        ("RELAY_FAILPOINT", "after-claim", "name:action"),
        ("RELAY_FAILPOINT", "after-claim:explode", "kill, stop, sleep, raise"),
        ("RELAY_PREFIX", "a*b", "must match"),
        ("RELAY_URL", "ftp://x", "http://"),
        ("RELAY_URL", "http://", "names a host"),
        ("RELAY_URL", "http://u:p@h", "no user name"),
        ("RELAY_URL", "http://h:99999", "must be a URL"),
        ("RELAY_DISCORD_URL", "https://h/?x=1", "no query"),
        ("RELAY_RUN_AS", "a b", "must match"),
        ("RELAY_PREFIX", "a\udcff", "must"),
    ],
)
def test_faulty_values_are_refused_with_what_to_write(variable: str, value: str, words: str) -> None:
    """A faulty value is named with its variable and the form that works."""
    fault = fault_of(**{variable: value})

    assert fault.startswith(f"{variable}=")
    assert words in fault
    assert fault.encode()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DATABASE_URL", "s3cr3t", "postgresql://"),
        ("RELAY_BROKER_URL", "amqp://u:s3cr3t@h", "redis://"),
        ("RELAY_EGRESS_PROXY", "socks5://u:s3cr3t@h", "http:// or https://"),
        ("RELAY_EGRESS_PROXY", "http://u:s3cr3t@h/path", "must end after the host and port"),
        ("RELAY_FLOWER_AUTH", "s3cr3t", "user:password"),
        ("RELAY_MASTER_KEYS", "s3cr3t", "item 1 has no id"),
        ("RELAY_MASTER_KEYS", f"a:{KEY},a:s3cr3t", "item 2 repeats"),
        ("RELAY_MASTER_KEYS", f"a:{KEY},b:s3cr3t!", "item 2 is not base64"),
        ("RELAY_MASTER_KEYS", "a:s3cr3t00", "32 bytes; item 1 has 6"),
    ],
)
def test_a_faulty_secret_is_not_shown(variable: str, value: str, words: str) -> None:
    """What is wrong with a secret is told without the secret."""
    fault = fault_of(**{variable: value})

    assert fault.startswith(f"{variable}: ")
    assert words in fault
    assert "s3cr3t" not in fault
    assert KEY not in fault


def test_secrets_are_never_shown() -> None:
    """No way of printing settings prints a secret, and a direct mistake does not either."""
    settings = load_settings(SECRETS)
    shown = "\n".join(
        (repr(settings), str(settings), f"{settings}", repr(settings.model_dump()), settings.model_dump_json())
    )
    rows = {variable: value for variable, value, _ in effective(settings)}
    with pytest.raises(ValidationError) as raised:
        Settings(admin_key="s3cr3t-c", bind="s3cr3t")
    shown += str(raised.value)

    assert "s3cr3t" not in shown
    assert KEY not in shown
    assert repr(bytes(range(32)))[2:-1] not in shown
    assert {variable: rows[variable] for variable in SECRETS} == dict.fromkeys(SECRETS, HIDDEN)
    assert {entry.variable for entry in describe() if entry.secret} == set(SECRETS)


def test_secrets_are_there_for_who_asks() -> None:
    """The values themselves are kept as given; Postgres addresses in one spelling."""
    settings = load_settings({**SECRETS, "DATABASE_URL": "postgres://relay:p%40ss@db/relay"})

    assert require(settings.database_url, "DATABASE_URL") == "postgresql://relay:p%40ss@db/relay"
    assert require(settings.broker_url, "RELAY_BROKER_URL") == "redis://:s3cr3t-b@redis:6379/0"
    with pytest.raises(ConfigurationError, match="DATABASE_URL is not set"):
        require(load_settings({}).database_url, "DATABASE_URL")


@pytest.mark.parametrize(
    "scheme", ["redis://h:6379/0", "rediss://h:6380", "unix:///run/redis.sock", "sentinel://a,b/0?master=m"]
)
def test_every_way_to_reach_redis_is_accepted(scheme: str) -> None:
    """TCP, TLS, a socket and sentinels."""
    assert require(load_settings({"RELAY_BROKER_URL": scheme}).broker_url, "") == scheme


def test_master_keys_keep_their_order() -> None:
    """The first key encrypts, so the order is the operator's; both alphabets of base64 are read, padded or not."""
    keys = load_settings({"RELAY_MASTER_KEYS": f"2026b:{OTHER}, 2026a:{KEY}"}).master_keys

    assert [key.id for key in keys] == ["2026b", "2026a"]
    assert [key.key.get_secret_value() for key in keys] == [bytes(range(224, 256)), bytes(range(32))]


def test_lists_are_read() -> None:
    """Commas and white space both separate."""
    settings = load_settings(
        {
            "RELAY_ALLOWED_CIDRS": "10.0.0.0/8, fd00::/8 192.168.1.7",
            "RELAY_ALLOWED_HOSTS": "Orders.Internal., .svc.cluster.local",
            "RELAY_FAILPOINT": "after-claim:kill,before-record:sleep",
            "RELAY_LOG_LEVEL": "WARNING",
            "RELAY_URL": "http://127.0.0.1:8080/",
        }
    )

    assert settings.allowed_cidrs == tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "fd00::/8", "192.168.1.7/32")))
    assert settings.allowed_hosts == ("orders.internal", ".svc.cluster.local")
    assert settings.failpoint == (
        Failpoint("after-claim", FailpointAction.KILL),
        Failpoint("before-record", FailpointAction.SLEEP),
    )
    assert settings.log_level == "warning"
    assert settings.url == "http://127.0.0.1:8080"


def test_settings_do_not_change() -> None:
    """Settings are read once: nothing can alter them later."""
    settings = load_settings({})

    with pytest.raises(ValidationError):
        settings.lease_secs = 5  # type: ignore[misc]  # what is tested


def test_effective_values_can_be_set_again() -> None:
    """What `relay config` shows, secrets apart, is what one would write to get it."""
    settings = load_settings(
        {"RELAY_ALLOW_PRIVATE_ENDPOINTS": "true", "RELAY_BIND": "[::1]:1", "RELAY_ALLOWED_CIDRS": "10.0.0.0/8"}
    )
    again = load_settings({variable: value for variable, value, _ in effective(settings)})

    assert again.model_dump() == settings.model_dump()


def test_every_setting_is_described() -> None:
    """The manual has a sentence for each setting, under its variable."""
    entries = describe()

    assert [entry.variable for entry in entries] == [variable_of(name) for name in Settings.model_fields]
    assert all(entry.description.endswith(".") for entry in entries)
    assert json.dumps([entry.default for entry in entries])


def test_what_may_surprise_is_told() -> None:
    """Switches that are for development or tests, and a grace that cuts requests, are worth a warning each."""
    assert warnings_of(load_settings({})) == []
    assert (
        len(
            warnings_of(
                load_settings(
                    {
                        "RELAY_ALLOW_PRIVATE_ENDPOINTS": "1",
                        "RELAY_FAILPOINT": "a:kill",
                        "RELAY_SHUTDOWN_GRACE_SECS": "29",
                    }
                )
            )
        )
        == 3
    )
