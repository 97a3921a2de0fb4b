"""A secret that cannot be shown by accident: not printed, logged, compared slowly, copied or serialised."""

from __future__ import annotations

import base64
import hmac
from typing import NoReturn

from relay.core.errors import InvalidInput
from relay.core.model import Signing

#: In front of every symmetric secret, as Standard Webhooks has it.
PREFIX = "whsec_"
#: In front of a private key that signs for `standard-ed25519`.
PRIVATE_PREFIX = "whsk_"
#: Random bytes in a secret of Relay's own making; of an ed25519 key the seed (RFC 8032 section 5.1.5).
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


def new_secret(random: bytes, signing: Signing = Signing.RELAY) -> Secret:
    """Make a secret for a scheme of `RANDOM_BYTES` random bytes; ValueError for any other number of them."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"exactly {RANDOM_BYTES} random bytes are needed")
    if signing is Signing.STANDARD_ED25519:
        return Secret(PRIVATE_PREFIX + base64.b64encode(random + _public_half(random)).decode())
    return Secret(PREFIX + base64.b64encode(random).decode())


def check_secret(text: object, field: str = "secret", signing: Signing = Signing.RELAY) -> Secret:
    """Take a caller's own secret for a scheme.

    That is `whsec_` and the base64 of 24 to 64 bytes; for `standard-ed25519` `whsk_` and the base64 of the key pair,
    which is the 32 bytes of the seed and the 32 of the public key that belongs to it.

    Raises InvalidInput otherwise, without the text. The base64 must be in its one
    canonical spelling (RFC 4648 section 4, padded), so that every library decodes it alike.
    """
    if signing is Signing.STANDARD_ED25519:
        private_seed(text, field)
        return Secret(str(text))
    key = _decoded(text, PREFIX)
    if key is not None and MIN_BYTES <= len(key) <= MAX_BYTES:
        return Secret(str(text))
    raise InvalidInput(
        f"A secret is {PREFIX} followed by the base64 of {MIN_BYTES} to {MAX_BYTES} random bytes: "
        "give one in that form, or none to have one made.",
        field=field,
        code="invalid_secret",
    )


def private_seed(text: object, field: str = "secret") -> bytes:
    """Return the 32 bytes of the seed in a `whsk_` secret's text; InvalidInput, without the text, where it is none.

    The public half must belong to the seed: with another one, receivers would be told of a key that never signed.
    """
    pair = _decoded(text, PRIVATE_PREFIX)
    if pair is None or len(pair) != 2 * RANDOM_BYTES:
        raise InvalidInput(
            f"An ed25519 secret is {PRIVATE_PREFIX} followed by the base64 of {2 * RANDOM_BYTES} bytes, the seed and "
            "its public key: give one in that form, or none to have one made.",
            field=field,
            code="invalid_secret",
        )
    seed, public = pair[:RANDOM_BYTES], pair[RANDOM_BYTES:]
    if not hmac.compare_digest(_public_half(seed), public):
        raise InvalidInput(
            "The two halves of the ed25519 secret do not belong together: copy it whole, or give none to have one made.",
            field=field,
            code="invalid_secret",
        )
    return seed


def _decoded(text: object, prefix: str) -> bytes | None:
    """What follows the prefix, decoded; None where it is not base64 in its canonical spelling."""
    if not isinstance(text, str) or not text.startswith(prefix):
        return None
    encoded = text.removeprefix(prefix)
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except ValueError:
        return None
    return decoded if base64.b64encode(decoded).decode() == encoded else None


def _public_half(seed: bytes) -> bytes:
    from relay.core import ed25519  # noqa: PLC0415 - see there

    return ed25519.public_half(seed)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
