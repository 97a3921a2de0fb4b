"""Calls about deliveries, replays and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from relay.core.replay import Refusal
from relay.web import answers
from relay.web.delivery_changes import ReplayDelivery
from relay.web.endpoint_models import NoFields, SecretRequest
from relay.web.openapi import parameters
from relay.web.openapi.operation import JSON, Answer, Body, Operation, Page, takes

if TYPE_CHECKING:
    from collections.abc import Mapping

_DELIVERIES: Final = "Deliveries"
_JOBS: Final = "Jobs"
_NOT_REPLAYED: Final = tuple(one.value for one in Refusal if one is not Refusal.DEAD)
_NOT_CANCELED: Final = tuple(one.value for one in (Refusal.IN_FLIGHT, Refusal.DELIVERED, Refusal.DEAD))
_NOTHING: Final = takes(NoFields, required=False)
_FORCE: Final = takes(ReplayDelivery, required=False)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "deliveries.list_deliveries": Operation(
        tag=_DELIVERIES,
        parameters=(parameters.ENDPOINT_ID, *parameters.DELIVERY_FILTERS, *parameters.PAGING),
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.DeliverySummary))},
        problems={404: ("unknown_endpoint",)},
    ),
    "deliveries.get_delivery": Operation(
        tag=_DELIVERIES,
        answers={200: Answer(says="The delivery.", shape=answers.Delivery)},
        problems={404: ("unknown_delivery",)},
    ),
    "delivery_changes.replay_delivery": Operation(
        tag=_DELIVERIES,
        body=_FORCE,
        answers={202: Answer(says="It is pending again.", shape=answers.DeliverySummary)},
        problems={404: ("unknown_delivery",), 409: _NOT_REPLAYED},
    ),
    "delivery_changes.cancel_delivery": Operation(
        tag=_DELIVERIES,
        body=_NOTHING,
        answers={200: Answer(says="It is called off.", shape=answers.DeliverySummary)},
        problems={404: ("unknown_delivery",), 409: _NOT_CANCELED},
    ),
    "replays.list_replays": Operation(
        tag=_DELIVERIES,
        parameters=(
            parameters.ENDPOINT_ID,
            parameters.REPLAY_STATE,
            parameters.SINCE,
            parameters.UNTIL,
            *parameters.PAGING,
        ),
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.Replay))},
        problems={404: ("unknown_endpoint",)},
    ),
    "replays.get_replay": Operation(
        tag=_DELIVERIES,
        answers={200: Answer(says="The replay.", shape=answers.Replay)},
        problems={404: ("unknown_replay",)},
    ),
    "replays.cancel_replay": Operation(
        tag=_DELIVERIES,
        body=_NOTHING,
        answers={200: Answer(says="It is stopped.", shape=answers.Replay)},
        problems={404: ("unknown_replay",), 409: ("replay_finished",)},
    ),
    "jobs.enqueue": Operation(
        tag=_JOBS,
        parameters=(*parameters.JOB_HEADERS, parameters.IDEMPOTENCY_KEY),
        body=Body(
            content={
                JSON: {"description": "Any JSON value."},
                "*/*": {"type": "string", "format": "binary"},
            },
            required=False,
            says="The payload: any bytes, also none. A header `Relay-Header-<name>` is sent with it as `<name>`.",
            examples={JSON: {"thumbnail": 17}},
        ),
        answers={202: Answer(says="It is committed.", shape=answers.TakenJob, headers=("Relay-Idempotent-Replay",))},
        problems={
            409: ("idempotency_key_reused", "no_job_secret"),
            411: ("length_required",),
            429: ("ingest_rate",),
        },
    ),
    "jobs.get_job": Operation(
        tag=_JOBS,
        answers={200: Answer(says="The job.", shape=answers.Job)},
        problems={404: ("unknown_job",)},
    ),
    "jobs.cancel_job": Operation(
        tag=_JOBS,
        body=_NOTHING,
        answers={200: Answer(says="It is called off.", shape=answers.Job)},
        problems={404: ("unknown_job",), 409: _NOT_CANCELED},
    ),
    "jobs.replay_job": Operation(
        tag=_JOBS,
        body=_FORCE,
        answers={202: Answer(says="It is queued again.", shape=answers.Job)},
        problems={404: ("unknown_job",), 409: _NOT_REPLAYED},
    ),
    "job_secret.rotate_job_secret": Operation(
        tag=_JOBS,
        body=takes(SecretRequest, required=False),
        answers={200: Answer(says="The new secret.", shape=answers.RotatedSecret)},
        problems={503: ("no_master_keys",)},
    ),
}
