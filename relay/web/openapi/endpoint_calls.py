"""Calls about endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.web import answers
from relay.web.endpoint_models import EndpointPatch, EndpointRequest, NoFields, SecretRequest
from relay.web.openapi import parameters
from relay.web.openapi.operation import Answer, Operation, Page, takes
from relay.web.replays import ReplayEndpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

_TAG: Final = "Endpoints"
_UNKNOWN: Final[Mapping[int, tuple[str, ...]]] = {404: ("unknown_endpoint",)}
_OWNED: Final[Mapping[int, tuple[str, ...]]] = {**_UNKNOWN, 409: ("implicit_endpoint",)}
_NO_KEYS: Final[Mapping[int, tuple[str, ...]]] = {503: ("no_master_keys",)}
_NOTHING: Final = takes(NoFields, required=False)
_EXAMPLE: Final[Mapping[str, Any]] = {
    "url": "https://example.com/hooks",
    "event_types": ["order.*"],
    "headers": {"X-Env": "test"},
    "metadata": {"team": "billing"},
}


def _switch(says: str, problems: Mapping[int, tuple[str, ...]]) -> Operation:
    return Operation(
        tag=_TAG, body=_NOTHING, answers={200: Answer(says=says, shape=answers.Endpoint)}, problems=problems
    )


def _order(says: str, problems: Mapping[int, tuple[str, ...]]) -> Operation:
    return Operation(tag=_TAG, body=_NOTHING, answers={202: Answer(says=says, shape=answers.Asked)}, problems=problems)


OPERATIONS: Final[Mapping[str, Operation]] = {
    "endpoints.create_endpoint": Operation(
        tag=_TAG,
        body=takes(EndpointRequest, _EXAMPLE),
        answers={201: Answer(says="It is made.", shape=answers.NewEndpoint, headers=("Location",))},
        problems={409: ("endpoint_limit",), **_NO_KEYS},
    ),
    "endpoints.list_endpoints": Operation(
        tag=_TAG,
        parameters=parameters.PAGING,
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.Endpoint))},
    ),
    "endpoints.get_endpoint": Operation(
        tag=_TAG, answers={200: Answer(says="The endpoint.", shape=answers.Endpoint)}, problems=_UNKNOWN
    ),
    "endpoints.change_endpoint": Operation(
        tag=_TAG,
        body=takes(EndpointPatch, {"rate_per_second": 50, "timeout_ms": None}),
        answers={200: Answer(says="The endpoint as it is now.", shape=answers.Endpoint)},
        problems={**_UNKNOWN, **_NO_KEYS},
    ),
    "endpoint_life.delete_endpoint": Operation(tag=_TAG, answers={204: Answer(says="It is ended.")}, problems=_OWNED),
    "endpoint_life.enable_endpoint": _switch("It is on.", _OWNED),
    "endpoint_life.disable_endpoint": _switch("It is off.", _OWNED),
    "endpoint_life.reset_breaker": _switch("Its breaker is closed.", _UNKNOWN),
    "endpoint_life.retry_now": _order("It will be done.", {**_UNKNOWN, 409: ("endpoint_disabled",)}),
    "endpoint_life.cancel_pending": _order("It will be done.", _UNKNOWN),
    "endpoint_secrets.rotate_secret": Operation(
        tag=_TAG,
        body=takes(SecretRequest, required=False),
        answers={200: Answer(says="The new secret.", shape=answers.RotatedSecret)},
        problems={**_OWNED, **_NO_KEYS},
    ),
    "endpoint_testing.test_endpoint": Operation(
        tag=_TAG,
        body=_NOTHING,
        answers={
            200: Answer(says="The attempt.", shape=answers.Tested),
            202: Answer(says="None came in time: look at the delivery later.", shape=answers.Tested),
        },
        problems={404: ("unknown_endpoint", "unknown_delivery"), 409: ("implicit_endpoint",)},
    ),
    "deliveries.list_endpoint_deliveries": Operation(
        tag=_TAG,
        parameters=(*parameters.DELIVERY_FILTERS, *parameters.PAGING),
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.DeliverySummary))},
        problems=_UNKNOWN,
    ),
    "replays.replay_endpoint": Operation(
        tag=_TAG,
        body=takes(ReplayEndpoint, {"reason": "attempts_exhausted", "since": "2026-01-31T00:00:00Z"}, required=False),
        answers={202: Answer(says="It is asked for.", shape=answers.Replay, headers=("Location",))},
        problems={**_UNKNOWN, 409: ("endpoint_deleted", "replay_unfinished")},
    ),
}
