"""What the API is built from: made by the composition root, taken as it comes here."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, Protocol

from relay.core import ids
from relay.core.errors import InvalidInput

if TYPE_CHECKING:
    from uuid import UUID

    import sqlalchemy as sa

    from relay.config import Settings
    from relay.core.address import AddressPolicy
    from relay.core.url import UrlPolicy
    from relay.process.metrics_api import ApiFigures
    from relay.store.vault import Vault
    from relay.tracing import Tracing

#: Ids that randomness is fetched for at once: a call of the system for each would cost as much as the id, and let other
#: threads in between.
_IDS_AT_ONCE: Final = 256
#: Randomness for one id each; to pop and to extend is atomic. What a fork copied must make no id twice.
_random: list[bytes] = []
os.register_at_fork(after_in_child=_random.clear)


class Api(Protocol):
    """The parts of one API process."""

    @property
    def settings(self) -> Settings: ...

    @property
    def engine(self) -> sa.Engine:
        """For transactions."""

    @property
    def hot(self) -> sa.Engine:
        """For single statements that must be fast, in autocommit."""

    @property
    def grouped(self) -> sa.Engine | None:
        """As `hot`, with a connection for each of `together.LEADERS`; None where there are too few for that."""

    @property
    def vault(self) -> Vault: ...

    @property
    def url_policy(self) -> UrlPolicy: ...

    @property
    def address_policy(self) -> AddressPolicy: ...

    @property
    def tracing(self) -> Tracing | None:
        """None where nothing is traced."""

    @property
    def figures(self) -> ApiFigures:
        """Where answers are counted."""


def new_id() -> UUID:
    """Make an id for a new row. From any thread."""
    try:
        random = _random.pop()
    except IndexError:
        many = os.urandom(ids.RANDOM_BYTES * _IDS_AT_ONCE)
        pieces = [many[at : at + ids.RANDOM_BYTES] for at in range(0, len(many), ids.RANDOM_BYTES)]
        random = pieces.pop()
        _random.extend(pieces)
    return ids.uuid7(time.time_ns() // 1_000_000, random)


def path_id(text: str) -> UUID | None:
    """Read an id from a path; None for what is none, which is no other answer than an id that nobody has."""
    try:
        return ids.parse_id(text)
    except InvalidInput:
        return None
