"""Chat endpoints on the send path: the real URL is made here, and what comes back loses its token here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relay.core.errors import InvalidInput
from relay.core.transports import TRANSPORTS, redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.core.observation import Observation
    from relay.core.secret import Secret
    from relay.core.transports import Built, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat endpoint's messages are made with."""

    transport: Transport
    address: str
    #: The platform's token.
    secret: Secret
    #: The platform's, without a slash at its end.
    base_url: str
    #: Where messages go, in its normalised form. Holds the token: for sending only.
    url: str = field(repr=False)
    #: The same for logs, with `<token>` for the token.
    display_url: str

    def build(self, *, event_type: str, payload: bytes, content_type: str) -> Built:
        """Make the message of an event; its URL is `url`, whatever the event."""
        return self.transport.build(
            event_type=event_type,
            payload=payload,
            content_type=content_type,
            address=self.address,
            secret=self.secret,
            base_url=self.base_url,
        )

    def read(self, observation: Observation, now: float) -> tuple[Observation, float | None]:
        """Return what was seen as it may be judged and kept, and the seconds that the platform asks to wait.

        The platform's own words are read first, from the reply as it came; then the token is taken out of all of it.
        `now` is epoch seconds.
        """
        status, wait_s = observation.status, None
        if status is not None:
            status = self.transport.status(status=status, snippet=observation.snippet)
            wait_s = self.transport.retry_after(headers=observation.headers, snippet=observation.snippet, now=now)
        return dataclasses.replace(redacted(observation, self.secret), status=status), wait_s


def make_chat(transport_name: str, *, address: str, secret: Secret, platform_urls: Mapping[str, str]) -> Chat:
    """Make what a stored endpoint's messages are made with; the sender judges the URL that they go to.

    Raises InvalidInput, without the secret, where this release does not know the transport, or the address is none of
    the transport's.
    """
    transport = TRANSPORTS.get(transport_name)
    if transport is None:
        raise InvalidInput(f"this release does not know the transport {transport_name!r}")
    base_url = platform_urls[transport_name]
    address = transport.check_address(address)
    built = transport.build(
        event_type="", payload=b"", content_type="", address=address, secret=secret, base_url=base_url
    )
    return Chat(
        transport=transport,
        address=address,
        secret=secret,
        base_url=base_url,
        url=built.url,
        display_url=built.display_url,
    )
