"""`relay.endpoints`: making endpoints, reading and changing them, and what is done to all deliveries of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from relay.client.answers import Endpoint, Replay, Rotated, Tested
from relay.client.errors import NotFound
from relay.client.pages import time_text, walk
from relay.client.reading import read
from relay.client.transport import path
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from relay.client.transport import Transport


class Endpoints:
    """The workspace's endpoints. Every call raises ApiError or Unreachable; NotFound for an id that there is not."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        url: str,
        *,
        event_types: Sequence[str] = (),
        description: str | None = None,
        secret: str | None = None,
        signing: str | None = None,
        headers: Mapping[str, str] | None = None,
        rate_per_second: float | None = None,
        burst: int | None = None,
        max_in_flight: int | None = None,
        timeout_ms: int | None = None,
        retry: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        client_certificate: Mapping[str, str] | None = None,
        transport: str | None = None,
        enabled: bool = True,
    ) -> Endpoint:
        """Make an endpoint; what is None is left to Relay. Its `secret` is in this answer and in none after it.

        Not repeated by itself where the answer is lost: look with `list` then. Raises InvalidInput for what cannot be
        sent.
        """
        given = {
            "description": description,
            "secret": secret,
            "signing": signing,
            "headers": _mapping("headers", headers),
            "rate_per_second": rate_per_second,
            "burst": burst,
            "max_in_flight": max_in_flight,
            "timeout_ms": timeout_ms,
            "retry": _mapping("retry", retry),
            "metadata": _mapping("metadata", metadata),
            "client_certificate": _mapping("client_certificate", client_certificate),
            "transport": transport,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        body = {"url": url, "event_types": _listed("event_types", event_types), "enabled": enabled, **fields}
        return read(Endpoint, self._transport.call("POST", "/v1/endpoints", body))

    def get(self, endpoint_id: str) -> Endpoint:
        """Read one."""
        return read(Endpoint, self._transport.get(path("v1", "endpoints", endpoint_id)))

    def list(self, *, limit: int | None = None) -> Iterator[Endpoint]:
        """Iterate over all, the newest first, those that jobs imply too."""
        return walk(self._transport, "/v1/endpoints", Endpoint, limit=limit)

    def update(self, endpoint_id: str, **changes: Any) -> Endpoint:
        """Change the fields that are named, such as `rate_per_second=50`; None sets one to its default."""
        found = self._transport.call("PATCH", path("v1", "endpoints", endpoint_id), changes, repeatable=True)
        return read(Endpoint, found)

    def delete(self, endpoint_id: str) -> None:
        """End an endpoint. Its pending deliveries become dead, its history stays."""
        try:
            self._transport.call("DELETE", path("v1", "endpoints", endpoint_id), repeatable=True)
        except NotFound as error:
            # Gone by our own first try, whose answer was lost.
            if not error.was_repeated:
                raise

    def enable(self, endpoint_id: str) -> Endpoint:
        """Switch one on; what was paused comes back at its rate."""
        return read(Endpoint, self._act(endpoint_id, "enable"))

    def disable(self, endpoint_id: str) -> Endpoint:
        """Switch one off; its deliveries are paused."""
        return read(Endpoint, self._act(endpoint_id, "disable"))

    def reset_breaker(self, endpoint_id: str) -> Endpoint:
        """Close its breaker, end its hold and bring what waits forward."""
        return read(Endpoint, self._act(endpoint_id, "reset-breaker"))

    def retry_now(self, endpoint_id: str) -> None:
        """Bring forward what waits, retries too, at its rate. Workers do it, soon after."""
        self._act(endpoint_id, "retry-now")

    def cancel_pending(self, endpoint_id: str) -> None:
        """Cancel what is pending now. Workers do it, soon after; what one has taken already is sent."""
        self._act(endpoint_id, "cancel-pending")

    def rotate_secret(self, endpoint_id: str, *, secret: str | None = None) -> Rotated:
        """Replace the secret, by the one given or a new one. Old and new both sign until the old one expires."""
        body = {} if secret is None else {"secret": secret}
        return read(Rotated, self._transport.call("POST", path("v1", "endpoints", endpoint_id, "rotate-secret"), body))

    def test(self, endpoint_id: str) -> Tested:
        """Send one `relay.test` event and wait some seconds for what the receiver says."""
        return read(Tested, self._transport.call("POST", path("v1", "endpoints", endpoint_id, "test")))

    def replay(
        self,
        endpoint_id: str,
        *,
        status: str | None = None,
        event_type: str | None = None,
        reason: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
    ) -> Replay:
        """Send its dead deliveries again (or those of `status` canceled or delivered), as a job that workers carry out.

        `relay.replays.wait(replay.id)` waits for its end. Raises Conflict while another one is under way; its
        `members` has the `replay_id`.
        """
        given = {
            "status": status,
            "event_type": event_type,
            "reason": reason,
            "since": time_text(since),
            "until": time_text(until),
        }
        body = {name: value for name, value in given.items() if value is not None}
        return read(Replay, self._transport.call("POST", path("v1", "endpoints", endpoint_id, "replay"), body))

    def _act(self, endpoint_id: str, verb: str) -> dict[str, Any]:
        # Doing it twice is doing it once.
        return self._transport.call("POST", path("v1", "endpoints", endpoint_id, verb), repeatable=True)


def _mapping(name: str, value: object) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidInput(f"{name}: this is {type(value).__name__}: give a mapping of names to values", field=name)
    return None if value is None else dict(value)


def _listed(name: str, value: object) -> list[Any]:
    # A single text would come apart into its letters.
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(f"{name}: this is {type(value).__name__}: give a list", field=name)
    return list(value)
