"""Chat transports: how an event becomes a message on a platform, and what the platform's answer means.

An endpoint of one has an address that can be shown and a secret, the platform's token. The real URL is built of both
when something is sent, and is never stored. None of them signs: the token is what the platform goes by.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from relay.core.transports.discord import Discord
from relay.core.transports.redaction import redact, redacted
from relay.core.transports.slack import Slack
from relay.core.transports.telegram import Telegram
from relay.core.transports.transport import TOKEN, Built, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TOKEN", "TRANSPORTS", "Built", "Transport", "redact", "redacted"]

#: By the word that an endpoint's `transport` has for it. `http` is not among them: it sends the event as it came.
TRANSPORTS: Final[Mapping[str, Transport]] = MappingProxyType(
    {transport.name: transport for transport in (Telegram(), Discord(), Slack())}
)
