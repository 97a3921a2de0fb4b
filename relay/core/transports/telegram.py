"""Telegram: a bot's message to a chat, by the Bot API's sendMessage."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from relay.core import retry_after
from relay.core.secret import Secret
from relay.core.transports.text import render, utf16_units
from relay.core.transports.transport import TOKEN, Built, object_in, refuse_address, refuse_secret, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

#: UTF-16 code units of a message's text, which is also how its entities are counted.
TEXT_UNITS: Final = 4096
#: Ids have 52 significant bits at most; those of groups and channels are negative.
_LARGEST_ID: Final = 1 << 52

_ADDRESS: Final = re.compile(r"telegram://(?:(-?[1-9][0-9]{0,15})|(@[A-Za-z][A-Za-z0-9_]{3,31}))", re.ASCII)
_TOKEN: Final = re.compile(r"[0-9]{3,20}:[A-Za-z0-9_-]{20,100}")


class Telegram:
    """`telegram://<chat id>` or `telegram://@<channel>`, with a bot's token."""

    name = "telegram"

    def check_address(self, text: object, field: str = "url") -> str:
        """Return the address as given: it has one spelling."""
        found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if found is None or abs(int(found[1] or 0)) >= _LARGEST_ID:
            refuse_address(
                "The address of a Telegram chat is telegram:// and the chat's id or a channel's name, such as "
                "telegram://-1001234567890 or telegram://@channel: write it so, and give the bot's token as the secret.",
                field,
            )
        return found.group()

    def check_secret(self, text: object, field: str = "secret") -> Secret:
        """Take a bot's token."""
        if not isinstance(text, str) or _TOKEN.fullmatch(text) is None:
            refuse_secret(
                "The secret of a Telegram endpoint is the bot's token, digits, a colon and letters: give it as "
                "@BotFather shows it, without a URL around it.",
                field,
            )
        return Secret(text)

    def build(
        self, *, event_type: str, payload: bytes, content_type: str, address: str, secret: Secret, base_url: str
    ) -> Built:
        """Make a sendMessage. The payload is one preformatted entity, without a parse mode: nothing in it is markup,
        a mention or a command, and nothing needs an escape."""
        begin = f"{event_type}\n"
        offset = utf16_units(begin)
        text = render(payload, content_type, room=TEXT_UNITS - offset)
        chat = address.removeprefix("telegram://")
        body: dict[str, Any] = {
            "chat_id": chat if chat.startswith("@") else int(chat),
            "text": begin + text if text else event_type,
            "link_preview_options": {"is_disabled": True},
        }
        if text:
            body["entities"] = [{"type": "pre", "offset": offset, "length": utf16_units(text)}]
        return Built(
            url=f"{base_url}/bot{secret.reveal()}/sendMessage",
            display_url=f"{base_url}/bot{TOKEN}/sendMessage",
            body=json.dumps(body).encode(),
        )

    def retry_after(self, *, headers: Iterable[tuple[str, str]], snippet: bytes, now: float) -> float | None:
        """Read `parameters.retry_after` (whole seconds) of the body, else the header."""
        parameters = object_in(snippet).get("parameters")
        asked = seconds(parameters.get("retry_after")) if isinstance(parameters, dict) else None
        return retry_after.find(headers, now) if asked is None else asked

    def status(self, *, status: int, snippet: bytes) -> int:
        """The body's own `error_code` where a 2xx says `"ok": false`, as proxies and own servers may have it."""
        if not 200 <= status < 300:
            return status
        reply = object_in(snippet)
        if reply.get("ok") is not False:
            return status
        code = reply.get("error_code")
        return code if isinstance(code, int) and 400 <= code <= 999 else 500
