"""What the API is built from: made by the composition root, taken as it comes here."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Protocol

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
    """Make an id for a new row."""
    return ids.uuid7(time.time_ns() // 1_000_000, os.urandom(ids.RANDOM_BYTES))


def path_id(text: str) -> UUID | None:
    """Read an id from a path; None for what is none, which is no other answer than an id that nobody has."""
    try:
        return ids.parse_id(text)
    except InvalidInput:
        return None
