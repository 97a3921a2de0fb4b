"""Jobs as tests make and read them, over the API."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.hostile import wait_until
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

#: Bytes of a payload, in the instances of these tests.
LIMIT = 1000
#: A secret that is looked for where it must not be.
MARKER = "marker-7c1f0a"


@contextmanager
def job_api(database: str) -> Iterator[Instance]:
    """An API that may send anywhere, with one workspace."""
    with instance(
        database, RELAY_ALLOW_PRIVATE_ENDPOINTS="true", RELAY_MAX_PAYLOAD_BYTES=str(LIMIT), RELAY_DB_POOL="12"
    ) as made:
        made.workspace()
        yield made


def enqueue(
    relay: Instance,
    key: dict[str, str],
    url: str = "https://example.com/",
    body: bytes = b"",
    environ: dict[str, Any] | None = None,
    **headers: str,
) -> TestResponse:
    """Post a job; names of headers with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return relay.client.post(
        "/enqueue", data=body, headers={**key, "Relay-Url": url, **named}, environ_overrides=environ or {}
    )


def job_id(answer: TestResponse) -> str:
    assert answer.status_code == 202, answer.text
    return str((answer.json or {})["id"])


def read(relay: Instance, key: dict[str, str], job: str) -> dict[str, Any]:
    answer = relay.client.get(f"/jobs/{job}", headers=key)
    assert answer.status_code == 200, answer.text
    return dict(answer.json or {})


def comes_to(relay: Instance, key: dict[str, str], job: str, state: str) -> dict[str, Any]:
    """Wait until a job has a state; return it."""
    wait_until(lambda: read(relay, key, job)["state"] == state)
    return read(relay, key, job)


def stored(relay: Instance) -> tuple[int, ...]:
    """How many jobs, deliveries, events and keys there are."""
    (row,) = relay.query(
        "select (select count(*) from relay.jobs), (select count(*) from relay.deliveries),"
        " (select count(*) from relay.events), (select count(*) from relay.idempotency_keys)"
    )
    return tuple(row)
