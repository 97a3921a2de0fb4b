"""A secret that cannot be shown by accident: not printed, logged, compared slowly, copied or serialised."""

from __future__ import annotations

import base64
import hmac
from typing import NoReturn

from relay.core.errors import InvalidInput

#: In front of every symmetric secret, as Standard Webhooks has it.
PREFIX = "whsec_"
#: Random bytes in a secret of Relay's own making.
RANDOM_BYTES = 32
#: Bounds of a caller's own secret, in decoded bytes.
MIN_BYTES = 24
MAX_BYTES = 64

_HIDDEN = "<secret>"


class Secret:
    """Holds a secret string. Only `reveal()` gives it out.

    Equal to another Secret of the same text, compared in constant time; never to a
    str, and not hashable. This guards against accidents, not against code that
    looks for it: the text is in this process's memory.
    """

    __slots__ = ("__text",)

    def __init__(self, text: str) -> None:
        self.__text = text

    def reveal(self) -> str:
        """Give the text itself, for signing, sealing, or the one answer that shows it."""
        return self.__text

    def __repr__(self) -> str:
        return _HIDDEN

    def __str__(self) -> str:
        return _HIDDEN

    def __format__(self, spec: str) -> str:
        # The spec is ignored on purpose: a width or a bad code must not make logging fail.
        return _HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_bytes(self.__text), _bytes(other.__text))

    #: A hash in a set or a dict's order would be something to compare by.
    __hash__ = None  # type: ignore[assignment]  # the way to say that a class is not hashable

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")


def new_secret(random: bytes) -> Secret:
    """Make a secret of `RANDOM_BYTES` random bytes; ValueError for any other number of them."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"exactly {RANDOM_BYTES} random bytes are needed")
    return Secret(PREFIX + base64.b64encode(random).decode())


def check_secret(text: object, field: str = "secret") -> Secret:
    """Take a caller's own secret: `whsec_` and the base64 of 24 to 64 bytes.

    Raises InvalidInput otherwise, without the text. The base64 must be in its one
    canonical spelling (RFC 4648 section 4, padded), so that every library decodes it alike.
    """
    if isinstance(text, str) and text.startswith(PREFIX):
        encoded = text.removeprefix(PREFIX)
        try:
            key = base64.b64decode(encoded, validate=True)
        except ValueError:
            key = b""
        if MIN_BYTES <= len(key) <= MAX_BYTES and base64.b64encode(key).decode() == encoded:
            return Secret(text)
    raise InvalidInput(
        f"A secret is {PREFIX} followed by the base64 of {MIN_BYTES} to {MAX_BYTES} random bytes: "
        "give one in that form, or none to have one made.",
        field=field,
        code="invalid_secret",
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
