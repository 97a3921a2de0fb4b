"""What the calls that make and change endpoints take. An endpoint's values are judged here, whichever call brings them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from relay.core import address, backoff, certificate, event_types, headers, url
from relay.core.errors import InvalidInput
from relay.core.model import Signing
from relay.core.secret import Secret, check_secret
from relay.core.transports import TRANSPORTS
from relay.web.models import WHOLE, Limits, Request, judged, without_defaults
from relay.web.openapi.formats import SUBSCRIPTION, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What a secret value reads back as: a header's, a certificate's key.
MASKED: Final = "********"
#: Bytes of an endpoint's metadata, as JSON without white space.
MAX_METADATA_BYTES: Final = 4096
#: Patterns that one endpoint may subscribe with.
MAX_EVENT_TYPES: Final = 256
#: Deliveries per second. The slowest is one in about a quarter of an hour.
MIN_RATE: Final = 0.001
MAX_RATE: Final = 1_000_000.0
MAX_BURST: Final = 1_000_000
#: Characters of PEM: a chain of ten RSA certificates, and an RSA key of 8192 bits.
MAX_CERTIFICATE: Final = 32_768
MAX_PRIVATE_KEY: Final = 8192

#: What a field is where it is absent or null. `url` has no default, and `secret` is made.
DEFAULTS: Final[dict[str, Any]] = {
    "transport": "http",
    "signing": "relay",
    "description": "",
    "event_types": [],
    "headers": {},
    "client_certificate": None,
    "rate_per_second": 10.0,
    "burst": 20,
    "max_in_flight": None,
    "timeout_ms": None,
    "retry": {},
    "metadata": {},
    "enabled": True,
}

# What the document says of values that are judged here in more than their type.
_URL: Final = shown({"type": "string", "maxLength": url.MAX_URL_LENGTH, "examples": ["https://example.com/hooks"]})
_SECRET: Final = shown(
    {
        "type": ["string", "null"],
        "writeOnly": True,
        "description": "`whsec_` and the base64 of 24 to 64 bytes; `whsk_` and that of seed and public key for "
        "`standard-ed25519`; a chat platform's token. One is made where none is given.",
    }
)
_WAIT: Final = {"type": ["integer", "null"], "minimum": 1, "maximum": backoff.LONGEST_WAIT_MS}
_RETRY: Final = shown(
    {
        "type": "object",
        "description": "When failed deliveries are tried again. What is absent or null is at its default.",
        "properties": {
            "strategy": {"enum": [*backoff.Strategy, None]},
            "max_attempts": {"type": ["integer", "null"], "minimum": 1, "maximum": backoff.MAX_ATTEMPTS},
            "base_ms": _WAIT,
            "max_ms": _WAIT,
            "factor": {"type": ["number", "null"], "minimum": 1, "maximum": backoff.MAX_FACTOR},
            "jitter": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
            "statuses": {
                "type": ["array", "null"],
                "items": {"type": "integer", "minimum": 400, "maximum": 499, "not": {"const": 410}},
            },
            "schedule_ms": {
                "type": ["array", "null"],
                "items": {"type": "integer", "minimum": 0, "maximum": backoff.LONGEST_WAIT_MS},
                "maxItems": backoff.MAX_ATTEMPTS - 1,
            },
        },
        "additionalProperties": False,
    }
)


class ClientCertificate(Request):
    """A chain in PEM, the client's own certificate first, and its key in PEM."""

    certificate: Annotated[str, Field(max_length=MAX_CERTIFICATE)]
    private_key: Annotated[str, Field(max_length=MAX_PRIVATE_KEY)] = Field(repr=False)


def _check_transport(value: str, limits: Limits, _beside: Mapping[str, Any]) -> str:
    if limits.transport not in {None, value}:
        raise InvalidInput(
            "An endpoint's transport does not change: make another endpoint.", field="transport", code="fixed"
        )
    return value


def _transport(limits: Limits, beside: Mapping[str, Any]) -> str:
    """What the endpoint's transport is, or is to be."""
    return limits.transport or beside.get("transport") or str(DEFAULTS["transport"])


def _check_url(value: str, limits: Limits, beside: Mapping[str, Any]) -> str:
    transport = _transport(limits, beside)
    chat = TRANSPORTS.get(transport)
    if chat is None:
        return check_destination(value, limits.url_policy, limits.address_policy).text
    address_text = chat.check_address(value)
    try:
        # What is sent to is the platform's own, whatever the address.
        check_destination(limits.platform_urls[transport], limits.url_policy, limits.address_policy)
    except InvalidInput as error:
        raise InvalidInput(
            f"RELAY_{transport.upper()}_URL may not be sent to from here: {error}", field="url", code=error.code
        ) from None
    return address_text


def check_destination(
    text: str, url_policy: url.UrlPolicy, address_policy: address.AddressPolicy, field: str = "url"
) -> url.Url:
    """Judge a URL as the send path will; an address in it, too. A courtesy: names are looked up at each send (B-82).

    Raises InvalidInput, without the text.
    """
    found = url.normalise_url(text, url_policy, field)
    if found.is_literal and address.refusal(found.host, address_policy) is not None:
        raise InvalidInput(
            "The URL's address is not one that may be sent to: use a public one.", field=field, code="address_refused"
        )
    return found


def _check_signing(value: str, limits: Limits, beside: Mapping[str, Any]) -> str:
    if _transport(limits, beside) in TRANSPORTS and value != "none":
        raise InvalidInput(
            "Requests to a chat platform are not signed: leave the field out, or say none.",
            field="signing",
            code="not_signed",
        )
    return value


def _check_timeout(value: int, limits: Limits, _beside: Mapping[str, Any]) -> int:
    if value > limits.longest_timeout_ms:
        raise InvalidInput(
            f"A lease (RELAY_LEASE_SECS) leaves room for at most {limits.longest_timeout_ms} ms: lower it.",
            field="timeout_ms",
            code="out_of_range",
        )
    return value


def _refuse_for_chat(value: object, field: str, limits: Limits, beside: Mapping[str, Any]) -> None:
    if value and _transport(limits, beside) in TRANSPORTS:
        raise InvalidInput(
            "A chat platform goes by its token alone: leave the field out.", field=field, code="not_of_a_chat"
        )


def _check_metadata(value: dict[str, Any], _limits: Limits, _beside: Mapping[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()) > MAX_METADATA_BYTES:
        raise InvalidInput(
            f"The metadata is more than {MAX_METADATA_BYTES} bytes as JSON: keep less.",
            field="metadata",
            code="too_long",
        )
    return value


def _check_retry(value: dict[str, Any], _limits: Limits, _beside: Mapping[str, Any]) -> dict[str, Any]:
    backoff.parse_retry(value)
    return {name: member for name, member in value.items() if member is not None}


def _check_headers(value: dict[str, str], limits: Limits, beside: Mapping[str, Any]) -> dict[str, str]:
    _refuse_for_chat(value, "headers", limits, beside)
    checked = dict(headers.check_headers(value))
    seen: set[str] = set()
    for name, text in checked.items():
        if name.lower() in seen:
            raise InvalidInput(
                "The header is given twice, in other letters: names do not tell case, so keep one.",
                field=f"headers.{name}",
                code="duplicate",
            )
        seen.add(name.lower())
        if text == MASKED:
            raise _masked(f"headers.{name}")
    return checked


def _check_certificate(value: ClientCertificate, limits: Limits, beside: Mapping[str, Any]) -> ClientCertificate:
    _refuse_for_chat(value, "client_certificate", limits, beside)
    if value.private_key == MASKED:
        raise _masked("client_certificate.private_key")
    chain, key = certificate.check_client_certificate(value.certificate, Secret(value.private_key))
    return ClientCertificate.model_construct(certificate=chain, private_key=key.reveal())


def _check_secret(value: str | None, _limits: Limits, beside: Mapping[str, Any]) -> str | None:
    if "transport" not in beside or "signing" not in beside:
        # What the secret must be is not known: only that is said.
        return None
    key = check_own_secret(value, transport=beside["transport"], signing=beside["signing"])
    return None if key is None else key.reveal()


def check_own_secret(text: str | None, *, transport: str | None, signing: str | None) -> Secret | None:
    """Return the caller's own secret; None where one is to be made. Raises InvalidInput, without the text."""
    chat = TRANSPORTS.get(transport or "http")
    if chat is None:
        return None if text is None else check_secret(text, signing=Signing(signing or "relay"))
    if text is None:
        raise InvalidInput(
            "The secret of a chat endpoint is the platform's token, which only you have: send it.",
            field="secret",
            code="required",
        )
    return chat.check_secret(text)


class EndpointFields(Request):
    """What an endpoint's owner may set, in this order: later fields are judged by earlier ones."""

    transport: Annotated[Literal["http", "telegram", "discord", "slack"], judged(_check_transport)] | None = DEFAULTS[
        "transport"
    ]
    signing: Annotated[Literal["relay", "standard", "standard-ed25519", "none"], judged(_check_signing)] | None = (
        DEFAULTS["signing"]
    )
    description: Annotated[str, Field(max_length=1000)] | None = DEFAULTS["description"]
    event_types: (
        Annotated[
            list[
                Annotated[
                    str, judged(lambda value, _limits, _beside: event_types.check_pattern(value)), shown(SUBSCRIPTION)
                ]
            ],
            Field(max_length=MAX_EVENT_TYPES),
        ]
        | None
    ) = DEFAULTS["event_types"]
    headers: Annotated[dict[str, str], judged(_check_headers)] | None = Field(default=DEFAULTS["headers"], repr=False)
    client_certificate: Annotated[ClientCertificate, judged(_check_certificate)] | None = None
    rate_per_second: Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE)] | None = DEFAULTS["rate_per_second"]
    burst: Annotated[int, Field(ge=1, le=MAX_BURST), WHOLE] | None = DEFAULTS["burst"]
    max_in_flight: Annotated[int, Field(ge=1, le=10_000), WHOLE] | None = None
    timeout_ms: Annotated[int, Field(ge=100, le=30_000), WHOLE, judged(_check_timeout)] | None = None
    retry: Annotated[dict[str, Any], judged(_check_retry), _RETRY] | None = DEFAULTS["retry"]
    metadata: Annotated[dict[str, Any], judged(_check_metadata)] | None = DEFAULTS["metadata"]
    enabled: bool | None = DEFAULTS["enabled"]

    def given(self, *, transport: str) -> dict[str, Any]:
        """Return the fields that the caller named, null ones at their defaults for an endpoint of that transport."""
        return {name: self._value(name, transport) for name in type(self).model_fields if name in self.model_fields_set}

    def filled(self) -> dict[str, Any]:
        """Return every field, what is absent or null at its default."""
        transport = self.transport or DEFAULTS["transport"]
        return {name: self._value(name, transport) for name in type(self).model_fields}

    def _value(self, name: str, transport: str) -> Any:
        if name == "transport":
            return transport
        if name == "signing" and transport in TRANSPORTS:
            return "none"
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value


class EndpointRequest(EndpointFields):
    """POST /v1/endpoints."""

    url: Annotated[str, judged(_check_url), _URL]
    secret: Annotated[str | None, judged(_check_secret), _SECRET] = Field(
        default=None, validate_default=True, repr=False
    )


class EndpointPatch(EndpointFields):
    """PATCH /v1/endpoints/{id}: only what is given changes; null is a field's default."""

    # What is left out stays: a default in the document would read as if it were reset.
    model_config = ConfigDict(json_schema_extra=without_defaults)

    # Not nullable, and never at its default: only a URL that was given is looked at.
    url: Annotated[str, judged(_check_url), _URL] = ""


class SecretRequest(Request):
    """POST /v1/endpoints/{id}/rotate-secret. What the secret must be depends on the endpoint."""

    secret: Annotated[str | None, _SECRET] = Field(default=None, repr=False)


class NoFields(Request):
    """The body of a call that takes none: absent, or an empty object."""


def _masked(field: str) -> InvalidInput:
    return InvalidInput(
        "This is how a secret value reads back, not a value: send the value itself, or leave the whole field out to "
        "keep what is stored.",
        field=field,
        code="masked_value",
    )
