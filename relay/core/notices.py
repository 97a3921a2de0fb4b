"""The types of Relay's own events: what it tells a workspace about its endpoints and deliveries (B-170)."""

from __future__ import annotations

from typing import Final

ENDPOINT_DISABLED: Final = "relay.endpoint.disabled"
#: The breaker went from closed to open; further trips of an endpoint that is down are not told.
BREAKER_OPENED: Final = "relay.endpoint.breaker_opened"
BREAKER_CLOSED: Final = "relay.endpoint.breaker_closed"
#: The first success after RECOVERS_AFTER attempts or more that failed.
ENDPOINT_RECOVERED: Final = "relay.endpoint.recovered"
#: A delivery was given up. Not told of those of a deleted endpoint, nor of deliveries of Relay's own events.
DELIVERY_DEAD: Final = "relay.delivery.dead"

#: Failed attempts in a row from which a success is a recovery.
RECOVERS_AFTER: Final = 10
