"""`Relay`: where the API is, and what a producer says to it."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from relay.client.answers import Enqueued, Rotated, Sent
from relay.client.endpoints import Endpoints
from relay.client.errors import UnexpectedAnswer
from relay.client.history import Deliveries, Events, Jobs, Replays
from relay.client.reading import read
from relay.client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT_SECS, Transport, dump, encode, object_of
from relay.core.errors import ConfigurationError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    import requests

_JSON = "application/json"


class Relay:
    """A client of one workspace, by its key.

    Make one and keep it: it holds connections. Threads may share it; a forked process makes its own. Works as a
    context manager, which closes it.

    Every call raises `ApiError` where Relay refuses (its subclasses say what to do), `Unreachable` where nothing
    answers, `UnexpectedAnswer` where what answers is not Relay, `InvalidInput` for what cannot be sent.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECS,
        retries: int = DEFAULT_RETRIES,
        workspace: str | None = None,
    ) -> None:
        """Take what is given, else RELAY_URL and RELAY_API_KEY from the environment.

        `timeout` is seconds to connect, and of silence, of each try; `retries` how often a request that may be repeated
        is sent again by itself. `workspace` is for the instance's key alone: the name or id of the one to act in.
        Raises ConfigurationError where URL or key are missing or cannot be any.
        """
        url = url or os.environ.get("RELAY_URL", "").strip()
        api_key = api_key or os.environ.get("RELAY_API_KEY", "").strip()
        missing = [name for name, value in (("RELAY_URL", url), ("RELAY_API_KEY", api_key)) if not value]
        if missing:
            raise ConfigurationError(f"{' and '.join(missing)} not set: set it, or give Relay(url=…, api_key=…)")
        headers = {} if workspace is None else {"Relay-Workspace": workspace}
        self._transport = Transport(url, api_key, timeout=timeout, retries=retries, headers=headers)
        self.endpoints = Endpoints(self._transport)
        self.deliveries = Deliveries(self._transport)
        self.events = Events(self._transport)
        self.jobs = Jobs(self._transport)
        self.replays = Replays(self._transport)

    @property
    def url(self) -> str:
        """The API's base URL."""
        return self._transport.url

    def close(self) -> None:
        """Close the connections. It may be used again: that makes new ones."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def send(
        self,
        type: str,  # noqa: A002 - the field's name
        payload: object,
        *,
        idempotency_key: str | None = None,
        content_type: str | None = None,
        expires_in: float | None = None,
    ) -> Sent:
        """Send one event; when this returns, it and its deliveries are stored.

        `payload` goes out as it is where it is bytes. A str with a `content_type` is sent as UTF-8; anything else as
        JSON. Without an `idempotency_key` one is made, so that a try after a lost answer counts once; give your own,
        such as `order-4711-paid`, where your program may come to this call twice. `expires_in` is seconds.
        """
        key = idempotency_key or str(uuid.uuid4())
        headers = {
            "Relay-Event-Type": type,
            "Content-Type": content_type or _JSON,
            "Idempotency-Key": key,
            **_seconds("Relay-Expires-In", expires_in),
        }
        body = _body(payload, content_type)
        with _told(key):
            answer = self._transport.send(
                "POST", "/v1/events", body=body, headers=headers, repeatable=True, idempotency_key=key
            )
            return read(Sent, {**object_of(answer), "idempotency_key": key, "replayed": _is_replayed(answer)})

    def send_batch(self, events: Iterable[Mapping[str, Any]]) -> list[Sent]:
        """Send up to 1,000 events: all are stored, or none is. Answered in their order.

        Each is `{"type": …, "payload": …}`, and may have `idempotency_key` and `expires_in`. One without a key is
        given one. Payloads are any JSON values.
        """
        taken = list(events)
        for place, one in enumerate(taken):
            if not isinstance(one, Mapping):
                raise InvalidInput(f"[{place}]: this is {type(one).__name__}: give a mapping", field=f"[{place}]")
        given = [{**event, "idempotency_key": event.get("idempotency_key") or str(uuid.uuid4())} for event in taken]
        answer = self._transport.call("POST", "/v1/events/batch", given, repeatable=True)
        made, replayed = answer.get("events"), answer.get("replayed", [])
        made = [one for one in made if isinstance(one, dict)] if isinstance(made, list) else []
        if len(made) != len(given) or not isinstance(replayed, list):
            raise UnexpectedAnswer("the answer does not have the events that were sent: is this Relay's API?")
        return [
            read(Sent, {**one, "idempotency_key": event["idempotency_key"], "replayed": place in replayed})
            for place, (one, event) in enumerate(zip(made, given, strict=True))
        ]

    def enqueue(
        self,
        url: str,
        body: object = b"",
        *,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
        content_type: str | None = None,
        signing: str | None = None,
        max_attempts: int | None = None,
        timeout_ms: int | None = None,
        delay: float | None = None,
        expires_in: float | None = None,
        idempotency_key: str | None = None,
    ) -> Enqueued:
        """Have one POST made to any URL, by a job that needs no endpoint. `relay.jobs` tells what became of it.

        `body` as the payload of `send`; bytes have no Content-Type but the one given. `headers` go out with it: a
        mapping, or pairs where a name comes more than once. `signing` is `relay` or `standard`. `delay` and
        `expires_in` are seconds.
        """
        key = idempotency_key or str(uuid.uuid4())
        kind = content_type or ("" if isinstance(body, bytes) else _JSON)
        options = {
            "Relay-Url": url,
            "Relay-Sign": signing,
            "Relay-Max-Attempts": None if max_attempts is None else str(max_attempts),
            "Relay-Timeout-Ms": None if timeout_ms is None else str(timeout_ms),
            **_seconds("Relay-Delay", delay),
            **_seconds("Relay-Expires-In", expires_in),
            "Idempotency-Key": key,
            "Content-Type": kind or None,
        }
        sent = _body(body, content_type)
        with _told(key):
            answer = self._transport.send(
                "POST",
                "/enqueue",
                body=sent,
                headers={name: value for name, value in options.items() if value is not None},
                lines=_lines(headers),
                repeatable=True,
                idempotency_key=key,
            )
            return read(Enqueued, {**object_of(answer), "idempotency_key": key, "replayed": _is_replayed(answer)})

    def rotate_job_secret(self, *, secret: str | None = None) -> Rotated:
        """Make or replace the secret that signs jobs. The one before signs too until it expires."""
        body = {} if secret is None else {"secret": secret}
        return read(Rotated, self._transport.call("POST", "/v1/job-secret/rotate", body))


def _body(payload: object, content_type: str | None) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    if isinstance(payload, str) and content_type is not None:
        return encode(payload)
    return dump(payload)


def _lines(headers: Mapping[str, str] | Iterable[tuple[str, str]] | None) -> list[tuple[str, str]]:
    """A job's own headers as the API takes them, line by line."""
    try:
        pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
        return [(f"Relay-Header-{name}", value) for name, value in pairs]
    except (TypeError, ValueError):
        raise InvalidInput("headers: give a mapping, or pairs of a name and a value", field="headers") from None


@contextlib.contextmanager
def _told(key: str) -> Iterator[None]:
    """Have whatever does not answer as Relay does say which key the request had."""
    try:
        yield
    except UnexpectedAnswer as error:
        error.idempotency_key = key
        raise


def _seconds(name: str, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name}: {value!r} is no number of seconds: give one such as 1.5", field=name)
    # To the microsecond, and never as 1e-05.
    return {name: f"{value:.6f}".rstrip("0").rstrip(".")}


def _is_replayed(answer: requests.Response) -> bool:
    return answer.headers.get("Relay-Idempotent-Replay") == "true"
