"""Slack: a message into a channel, by an incoming webhook."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from relay.core import retry_after
from relay.core.secret import Secret
from relay.core.transports.text import render
from relay.core.transports.transport import TOKEN, Built, refuse_address, refuse_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Characters of a message, beyond which Slack cuts it by itself.
TEXT_UNITS: Final = 40_000

_ADDRESS: Final = re.compile(r"slack://[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,63})?")
_SECRET: Final = re.compile(r"T[A-Z0-9]{2,30}/B[A-Z0-9]{2,30}/[A-Za-z0-9]{16,100}")
#: Slack's three control characters. All of its markup that does anything (mentions, links, dates) begins with <.
_CONTROLS: Final = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


class Slack:
    """`slack://<label>`, with all that comes after /services/ in the webhook's URL for a secret.

    Whoever has that path can post, so none of it is shown. The label is the caller's own: a name, or the workspace
    and the app as `T…/B…`; it takes no part in the request.
    """

    name = "slack"

    def check_address(self, text: object, field: str = "url") -> str:
        """Return the address as given: it has one spelling."""
        if not isinstance(text, str) or _ADDRESS.fullmatch(text) is None:
            refuse_address(
                "The address of a Slack webhook is slack:// and a label of your own, of letters, digits, '.', '_' and "
                "'-', such as slack://alerts or slack://T000/B000: write it so, and give what comes after /services/ "
                "in the webhook's URL as the secret.",
                field,
            )
        return text

    def check_secret(self, text: object, field: str = "secret") -> Secret:
        """Take the path of a webhook, T…/B…/…."""
        if not isinstance(text, str) or _SECRET.fullmatch(text) is None:
            refuse_secret(
                "The secret of a Slack endpoint is what comes after /services/ in the webhook's URL, T…/B…/…: give "
                "these three parts with their slashes, without the rest.",
                field,
            )
        return Secret(text)

    def build(
        self,
        *,
        event_type: str,
        payload: bytes,
        content_type: str,
        address: str,  # noqa: ARG002  # a label: the secret alone says where the message goes
        secret: Secret,
        base_url: str,
    ) -> Built:
        """Post to the webhook: plain text, no link unfolded."""
        begin = f"{event_type}\n"
        text = render(payload, content_type, room=TEXT_UNITS - len(begin), escapes=_CONTROLS)
        body = {
            "text": begin + text if text else event_type,
            "mrkdwn": False,
            "unfurl_links": False,
            "unfurl_media": False,
        }
        return Built(
            url=f"{base_url}/services/{secret.reveal()}",
            display_url=f"{base_url}/services/{TOKEN}",
            body=json.dumps(body).encode(),
        )

    def retry_after(self, *, headers: Iterable[tuple[str, str]], snippet: bytes, now: float) -> float | None:  # noqa: ARG002  # Slack's bodies are a word
        """Read the header, which is where Slack says it."""
        return retry_after.find(headers, now)

    def status(self, *, status: int, snippet: bytes) -> int:  # noqa: ARG002  # Slack's statuses mean what they say
        """The status as it came: each error that Slack's words name has a status of its own."""
        return status
