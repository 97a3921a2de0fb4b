"""Every setting in one place, read once: a process starts with settings that agree, or says all that is wrong.

The descriptions below are the manual: `describe` hands them to the documentation, `effective` to `relay config`.
A setting's variable is its field's name in capitals after `RELAY_` (`DATABASE_URL` alone has no prefix).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, JsonValue, PrivateAttr, SecretStr, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from relay import config_values as read
from relay.config_values import Bind, Failpoint, MasterKey, Network
from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Seconds by which a lease must outlast the longest request: claim, gate and record take their share of it.
LEASE_SLACK_SECS: Final = 10
#: What `effective` prints for a secret that is set.
HIDDEN: Final = "<hidden>"

DAY: Final = 86_400  # seconds
MIB: Final = 1_048_576  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the manual says about one setting."""

    variable: str
    default: str
    description: str
    secret: bool


def _shown(value: object) -> str:
    """A value as one would set it; a secret as `<hidden>`."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, SecretStr) or (isinstance(value, tuple) and isinstance(value[0], MasterKey)):
        return HIDDEN
    if isinstance(value, (tuple, frozenset)) and not isinstance(value, Bind):
        return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
    return str(value)


def _setting(default: Any, description: str, *, says: str | None = None, **bounds: Any) -> Any:
    """A field. A callable default sees the settings above it; `says` is how the manual puts such a default."""
    extra: dict[str, JsonValue] = {"says": says if says is not None else _shown(default)}
    if callable(default):
        return Field(default_factory=default, description=description, json_schema_extra=extra, **bounds)
    return Field(default, description=description, json_schema_extra=extra, **bounds)


BindText = Annotated[Bind, BeforeValidator(read.bind)]
HttpUrl = Annotated[str, BeforeValidator(read.url("http", "https", path=True))]
Networks = Annotated[tuple[Network, ...], BeforeValidator(read.networks)]


class Settings(BaseSettings):
    """The settings of one process, checked. Made by `load_settings`; reads neither the environment nor a file itself.

    No secret shows in `repr`, `str`, `model_dump` or `model_dump_json`; `get_secret_value()` on the field gives it.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    database_url: Annotated[SecretStr, BeforeValidator(read.database_url)] | None = _setting(
        None, "Postgres, as a postgresql:// URL.", says="embedded under `relay up`"
    )
    broker_url: Annotated[SecretStr, BeforeValidator(read.broker_url)] | None = _setting(
        None,
        "Redis, for the stream and as Celery's broker: redis://, rediss://, unix://, or "
        "sentinel://host:port,host:port/0?master=name.",
        says="embedded under `relay up`",
    )
    bind: BindText = _setting("127.0.0.1:8080", "Where the API listens: host:port.")
    metrics_bind: BindText = _setting(
        "0.0.0.0:9091",
        "Where publisher and workers serve metrics and health: host:port. Under `relay up` the n-th worker takes the "
        "n-th port after the publisher's.",
        says="0.0.0.0:9091; 127.0.0.1:9091 under `relay up`",
    )
    admin_key: Annotated[SecretStr, BeforeValidator(read.admin_key)] | None = _setting(
        None, "The instance's own API key: makes workspaces, acts in any. 16 characters at least."
    )
    master_keys: Annotated[tuple[MasterKey, ...], BeforeValidator(read.master_keys)] = _setting(
        (),
        "Keys that seal secrets at rest: a list of id:base64, 32 bytes each. The first encrypts, all decrypt.",
        says="made by `relay up`",
    )
    max_payload_bytes: int = _setting(
        262_144, "The largest event, in bytes, at ingest and when sent.", ge=1, le=64 * MIB
    )
    max_batch_bytes: int = _setting(
        lambda above: max(8 * MIB, above["max_payload_bytes"]),
        "The largest body of a batch, in bytes.",
        says="8388608",
        ge=1,
        le=1024 * MIB,
    )
    max_in_flight: int = _setting(512, "Requests that one worker process has under way at once.", ge=1, le=100_000)
    max_in_flight_per_endpoint: int = _setting(
        16, "The same for one endpoint, where the endpoint does not say itself.", ge=1, le=100_000
    )
    claim_batch: int = _setting(
        lambda above: min(200, above["max_in_flight"]),
        "Deliveries that one task claims at most.",
        says="200; RELAY_MAX_IN_FLIGHT where that is less",
        ge=1,
        le=10_000,
    )
    lease_secs: int = _setting(
        60, "Seconds for which a claim holds a delivery. Must outlast every request by 10 s.", ge=1, le=DAY
    )
    total_timeout_ms: int = _setting(30_000, "Milliseconds that one request may take in all.", ge=100, le=3_600_000)
    connect_timeout_ms: int = _setting(
        lambda above: min(5_000, above["total_timeout_ms"]),
        "Milliseconds to connect, TLS included.",
        says="5000; RELAY_TOTAL_TIMEOUT_MS where that is less",
        ge=10,
        le=3_600_000,
    )
    idle_timeout_ms: int = _setting(
        10_000, "Milliseconds of silence allowed once the reply has begun.", ge=100, le=3_600_000
    )
    max_response_bytes: int = _setting(
        65_536, "Bytes of a reply's body that are read before the connection is dropped.", ge=0, le=64 * MIB
    )
    snippet_bytes: int = _setting(
        lambda above: min(2_048, above["max_response_bytes"]),
        "Bytes of a reply's body that the attempt log keeps.",
        says="2048; RELAY_MAX_RESPONSE_BYTES where that is less",
        ge=0,
        le=MIB,
    )
    shutdown_grace_secs: int = _setting(
        35,
        "Seconds a stopping process gives what is in flight; a request that outlives them is sent again.",
        ge=0,
        le=DAY,
    )
    reconcile_after_secs: int = _setting(
        30, "Seconds after which a hint that led to no claim is taken for lost.", ge=1, le=DAY
    )
    breaker: bool = _setting("true", "Whether endpoints that do not answer are left alone for a while.")
    breaker_threshold: int = _setting(5, "Failures in a row that open a breaker.", ge=1, le=10_000)
    breaker_cooldown_secs: int = _setting(
        30, "Seconds that a breaker stays open at first; doubles with each trip in a row.", ge=1, le=DAY
    )
    breaker_max_cooldown_secs: int = _setting(
        lambda above: max(300, above["breaker_cooldown_secs"]),
        "Seconds that a breaker stays open at most.",
        says="300",
        ge=1,
        le=DAY,
    )
    secret_overlap_secs: int = _setting(
        DAY, "Seconds for which a rotated secret signs beside the new one.", ge=0, le=90 * DAY
    )
    idempotency_retention_secs: int = _setting(DAY, "Seconds for which an idempotency key is known.", ge=1, le=90 * DAY)
    retain_attempts_days: int = _setting(30, "Days of attempts that are kept.", ge=1, le=3_650)
    retain_delivered_days: int = _setting(
        30, "Days for which delivered and canceled deliveries are kept.", ge=1, le=3_650
    )
    retain_dead_days: int = _setting(90, "Days for which dead deliveries are kept.", ge=1, le=3_650)
    retain_audit_days: int = _setting(365, "Days of audit records that are kept.", ge=1, le=36_500)
    allow_private_endpoints: bool = _setting(
        "false",
        "Development switch: private and loopback addresses may be sent to. Metadata addresses of clouds may not.",
        says="false; true under `relay up`",
    )
    require_https: bool = _setting(
        lambda above: not above["allow_private_endpoints"],
        "Whether http:// endpoints are refused.",
        says="true; false where RELAY_ALLOW_PRIVATE_ENDPOINTS is true",
    )
    allowed_ports: Annotated[frozenset[int] | None, BeforeValidator(read.ports)] = _setting(
        lambda above: (
            None if above["allow_private_endpoints"] else frozenset({443} if above["require_https"] else {80, 443})
        ),
        "Ports that may be sent to: a list, or * for every port.",
        says="443 (and 80 where http is allowed); * where RELAY_ALLOW_PRIVATE_ENDPOINTS is true",
    )
    retry_after_max_secs: int = _setting(
        3_600, "Seconds from now that a receiver's Retry-After can put off a delivery at most.", ge=0, le=30 * DAY
    )
    allowed_cidrs: Networks = _setting((), "Networks that may be sent to although they are private: a list.")
    denied_cidrs: Networks = _setting((), "Networks that may not be sent to: a list. Wins over every other setting.")
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(read.hosts)] = _setting(
        (),
        "Names, and .suffixes of names, that the rules for names let pass: a list. Their addresses need a CIDR still.",
    )
    egress_proxy: Annotated[SecretStr, BeforeValidator(read.url("http", "https", path=False))] | None = _setting(
        None,
        "HTTP proxy that every request is tunnelled through (CONNECT), with user and password if it asks for them.",
    )
    max_replays: int = _setting(20, "How often one delivery can be replayed.", ge=0, le=10_000)
    auto_disable_after_secs: int = _setting(
        5 * DAY, "Seconds of nothing but failures after which an endpoint is disabled.", ge=1, le=365 * DAY
    )
    log_format: Annotated[Literal["auto", "json", "text"], BeforeValidator(read.lowered)] = _setting(
        "auto", "json, text, or auto: text on a terminal, else JSON."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(read.lowered)] = (
        _setting("info", "The least that is logged: debug, info, warning, error or critical.")
    )
    tracing: bool = _setting(
        "false",
        "Whether events are traced with OpenTelemetry, and receivers told (traceparent). Needs the extra `otel`; its own "
        "OTEL_* variables say where the spans go.",
    )
    testkit_bind: BindText = _setting("127.0.0.1:9099", "Where the test receiver listens: host:port.")
    testkit_secret: SecretStr | None = _setting(
        None, "The secret, or public key (`whpk_`), with which the test receiver verifies signatures."
    )
    ready_max_lateness_secs: int = _setting(
        60, "Seconds by which the oldest due delivery may be late before /readyz says 503.", ge=1, le=DAY
    )
    prefix: str = _setting(
        "relay",
        "What every Redis key and queue begins with, so that installations can share one Redis.",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    workspace_max_endpoints: int = _setting(
        50, "Endpoints that a workspace without a limit of its own may have.", ge=0, le=1_000_000
    )
    workspace_ingest_rate: float | None = _setting(
        None,
        "Events per second that a workspace without a rate of its own may send in; none: no limit.",
        gt=0,
        le=1_000_000,
    )
    telegram_url: HttpUrl = _setting("https://api.telegram.org", "The Bot API's address, for a server of one's own.")
    discord_url: HttpUrl = _setting("https://discord.com", "Discord's address, for a stand-in.")
    slack_url: HttpUrl = _setting("https://hooks.slack.com", "Slack's address for incoming webhooks, for a stand-in.")
    flower_bind: BindText = _setting("127.0.0.1:5555", "Where Flower listens: host:port.")
    flower_auth: Annotated[SecretStr, BeforeValidator(read.login)] | None = _setting(
        None, "Flower's login: user:password.", says="made by `relay up`"
    )
    api_processes: int = _setting(1, "Processes that serve the API.", ge=1, le=256)
    api_threads: int = _setting(16, "Threads in each process of the API.", ge=1, le=1_000)
    worker_threads: int = _setting(
        4, "Threads in each worker process; requests under way do not need one each.", ge=1, le=1_000
    )
    db_pool: int = _setting(
        16,
        "Connections to Postgres that one API process holds at most, a quarter of them (at least three) for what is not "
        "ingest. A worker process holds RELAY_WORKER_THREADS + 8 at most, a publisher 4.",
        ge=4,
        le=1_000,
    )
    url: HttpUrl | None = _setting(None, "The API that the client and the command line talk to.")
    api_key: SecretStr | None = _setting(None, "The API key that the client and the command line use.")
    run_as: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$")] | None = _setting(
        None, "The user that the embedded servers run as where `relay up` is started by root."
    )
    failpoint: Annotated[tuple[Failpoint, ...], BeforeValidator(read.failpoints)] = _setting(
        (), "For tests: a list of name:action, the action one of kill, stop, sleep, raise."
    )

    #: Field name to where its value came from; absent: the default.
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  # the hook's signature is the library's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # the same
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # the same
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes: `load_settings` decides where values come from."""
        return (init_settings,)

    @property
    def longest_timeout_ms(self) -> int:
        """Milliseconds: the greatest total time-out, an endpoint's own included, that the lease leaves room for."""
        return (self.lease_secs - LEASE_SLACK_SECS) * 1_000 - 1

    def source_of(self, name: str) -> str:
        """Where a field's value came from: `environment`, `.env`, `preset` or `default`."""
        return self._sources.get(name, "default")

    def note_sources(self, sources: Mapping[str, str]) -> None:
        """Remember what `source_of` says: field name to source."""
        self._sources.update(sources)

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        faults = list(_contradictions(self))
        if faults:
            raise PydanticCustomError("contradiction", "settings contradict each other", {"faults": faults})
        return self


def variable_of(name: str) -> str:
    """The environment variable of a field, such as RELAY_LEASE_SECS of `lease_secs`."""
    return "DATABASE_URL" if name == "database_url" else f"RELAY_{name.upper()}"


def effective(settings: Settings) -> list[tuple[str, str, str]]:
    """(variable, value or `<hidden>`, source) of every setting, in the manual's order. Unset values are empty.

    Sources are `environment`, `.env`, `preset` and `default`. Values are spelled as one would set them.
    """
    return [
        (
            variable_of(name),
            "*" if name == "allowed_ports" and settings.allowed_ports is None else _shown(getattr(settings, name)),
            settings.source_of(name),
        )
        for name in Settings.model_fields
    ]


def describe() -> list[Described]:
    """Every setting for the manual, in order."""
    return [
        Described(
            variable=variable_of(name),
            default=str(info.json_schema_extra["says"]) if isinstance(info.json_schema_extra, dict) else "",
            description=info.description or "",
            secret="Secret" in str(info.annotation) or name == "master_keys",
        )
        for name, info in Settings.model_fields.items()
    ]


def warnings_of(settings: Settings) -> list[str]:
    """What is allowed but will surprise somebody, a sentence each: for the log at start-up and for `relay config`."""
    found = []
    if settings.shutdown_grace_secs * 1_000 < settings.total_timeout_ms:
        found.append(
            "RELAY_SHUTDOWN_GRACE_SECS is shorter than RELAY_TOTAL_TIMEOUT_MS: a stop cuts slow requests, "
            "which are sent again."
        )
    if settings.allow_private_endpoints:
        found.append(
            "RELAY_ALLOW_PRIVATE_ENDPOINTS is true: requests may go to private addresses. For development only."
        )
    if settings.failpoint:
        found.append("RELAY_FAILPOINT is set: this process breaks on purpose. For tests only.")
    return found


def require(value: SecretStr | None, variable: str) -> str:
    """The secret, or ConfigurationError telling to set `variable`: for commands that cannot run without it."""
    if value is None:
        raise ConfigurationError(f"{variable} is not set: set it in the environment or in .env, or use `relay up`")
    return value.get_secret_value()


def _contradictions(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """(fields concerned, what is wrong and what to do) for each rule between settings that is broken."""
    s = settings
    if s.total_timeout_ms > s.longest_timeout_ms:
        least = s.total_timeout_ms // 1_000 + LEASE_SLACK_SECS + 1
        yield (
            ("lease_secs", "total_timeout_ms"),
            f"RELAY_LEASE_SECS={s.lease_secs} could run out during a request of "
            f"RELAY_TOTAL_TIMEOUT_MS={s.total_timeout_ms}: raise it to {least} or more, or lower the time-out",
        )
    for low, high in (
        ("connect_timeout_ms", "total_timeout_ms"),
        ("snippet_bytes", "max_response_bytes"),
        ("claim_batch", "max_in_flight"),
        ("max_payload_bytes", "max_batch_bytes"),
        ("breaker_cooldown_secs", "breaker_max_cooldown_secs"),
    ):
        below, above = getattr(s, low), getattr(s, high)
        if below > above:
            first, second = f"{variable_of(low)}={below}", f"{variable_of(high)}={above}"
            yield (low, high), f"{first} is more than {second}: lower the first or raise the second"
