"""Takes a platform's token out of what came back: error texts name URLs, and a reply can repeat what it was sent."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from relay.core.transports.transport import TOKEN

if TYPE_CHECKING:
    from relay.core.observation import Observation
    from relay.core.secret import Secret

#: Characters of a token that tell something: a part of it as long as this does not get through.
_TELLING = 16
#: The same for its beginning at the end of a text, where a bound may have cut it.
_TELLING_AT_END = 8


def redact(text: str, secret: Secret) -> str:
    """Put `<token>` wherever the secret stands: whole, escaped for a URL, its long parts, or cut off at the end.

    It is for a platform's tokens, whose parts are random. What a sender of replies spells in another way on purpose
    is not found.
    """
    token = secret.reveal()
    parts = [part for part in re.split(r"[/:]", token) if len(part) >= _TELLING]
    for form in sorted({token, quote(token, safe=""), *parts}, key=len, reverse=True):
        text = text.replace(form, TOKEN)
    for start in (token, *parts):
        for length in range(min(len(start) - 1, len(text)), _TELLING_AT_END - 1, -1):
            if text.endswith(start[:length]):
                text = text[:-length] + TOKEN
                break
    return text


def redacted(observation: Observation, secret: Secret) -> Observation:
    """The observation without the secret in anything that is kept or judged: text, headers, snippet."""
    snippet = redact(observation.snippet.decode("latin-1"), secret).encode("latin-1")
    return dataclasses.replace(
        observation,
        text=None if observation.text is None else redact(observation.text, secret),
        headers=[(redact(name, secret), redact(value, secret)) for name, value in observation.headers],
        snippet=snippet,
    )
