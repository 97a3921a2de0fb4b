"""What the tests of store, outbox, delivery and sweeps share: rows in a database of the test's own, and the hot pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from relay.store.engine import make_hot_engine
from tests.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """Plain SQL into the test's database."""
    with Rows(database) as made:
        yield made


@pytest.fixture
def hot(database: str) -> Iterator[sa.Engine]:
    """The pool that announcing, claiming and recording use."""
    engine = make_hot_engine(database, name="test", size=4)
    yield engine
    engine.dispose()
