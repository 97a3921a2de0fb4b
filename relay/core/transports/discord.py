"""Discord: a message into a channel, by one of its webhooks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from relay.core import retry_after
from relay.core.secret import Secret
from relay.core.transports.text import render, utf16_units
from relay.core.transports.transport import TOKEN, Built, object_in, refuse_address, refuse_secret, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

#: UTF-16 code units of a message's content.
CONTENT_UNITS: Final = 2000
#: Message flag: links get no previews.
_SUPPRESS_EMBEDS: Final = 1 << 2
#: Snowflakes are unsigned, of 64 bits.
_LARGEST_ID: Final = 1 << 64

_ADDRESS: Final = re.compile(r"discord://([1-9][0-9]{0,19})", re.ASCII)
_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{20,200}")
#: Nothing but three backticks in a row ends a code block: a zero-width space behind each keeps them apart.
_IN_BLOCK: Final = {ord("`"): "`\u200b"}


class Discord:
    """`discord://<webhook id>`, with the webhook's token."""

    name = "discord"

    def check_address(self, text: object, field: str = "url") -> str:
        """Return the address as given: it has one spelling."""
        found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if found is None or int(found[1]) >= _LARGEST_ID:
            refuse_address(
                "The address of a Discord webhook is discord:// and the webhook's id, such as "
                "discord://223704706495545344: write it so, and give the token, which comes after the id in the "
                "webhook's URL, as the secret.",
                field,
            )
        return found.group()

    def check_secret(self, text: object, field: str = "secret") -> Secret:
        """Take a webhook's token."""
        if not isinstance(text, str) or _SECRET.fullmatch(text) is None:
            refuse_secret(
                "The secret of a Discord endpoint is the webhook's token, letters, digits, - and _: give what comes "
                "after the last slash of the webhook's URL, without the rest.",
                field,
            )
        return Secret(text)

    def build(
        self, *, event_type: str, payload: bytes, content_type: str, address: str, secret: Secret, base_url: str
    ) -> Built:
        """Execute the webhook. The payload stands in a code block, where nothing is markup, and nobody is mentioned.

        `wait`: without it a message that was not saved is answered like one that was.
        """
        # The one character of event types that is markup.
        title = event_type.replace("_", "\\_")
        begin, end = f"{title}\n```\n", "\n```"
        text = render(
            payload, content_type, room=CONTENT_UNITS - utf16_units(begin) - utf16_units(end), escapes=_IN_BLOCK
        )
        content = begin + text + end if text else title
        body = {"content": content, "allowed_mentions": {"parse": []}, "flags": _SUPPRESS_EMBEDS}
        before = f"{base_url}/api/v10/webhooks/{address.removeprefix('discord://')}"
        return Built(
            url=f"{before}/{secret.reveal()}?wait=true",
            display_url=f"{before}/{TOKEN}?wait=true",
            body=json.dumps(body).encode(),
        )

    def retry_after(self, *, headers: Iterable[tuple[str, str]], snippet: bytes, now: float) -> float | None:
        """Read `retry_after` (seconds, with fractions) of the body, else the header."""
        asked = seconds(object_in(snippet).get("retry_after"))
        return retry_after.find(headers, now) if asked is None else asked

    def status(self, *, status: int, snippet: bytes) -> int:  # noqa: ARG002  # Discord's statuses mean what they say
        """The status as it came."""
        return status
