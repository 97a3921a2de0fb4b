"""Connections that do not wait for ever, and pools that get over what became of theirs."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from relay.store import engine as engines
from relay.store.engine import make_engine, make_hot_engine, run

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa


@pytest.mark.parametrize("make", [make_engine, make_hot_engine])
def test_a_frozen_session_is_given_up(
    make: Callable[..., sa.Engine], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server process that stands still costs a statement the bound, and the next one has a new connection (F-14)."""
    monkeypatch.setattr(engines, "SILENCE_SECS", 1)
    pool = make(database, name="frozen", size=1)
    frozen = 0
    try:
        with pool.connect() as connection:
            frozen = run(connection, "select pg_backend_pid()").fetchall()[0][0]
            os.kill(frozen, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(psycopg.OperationalError, match="silent"):
                run(connection, "select 1")
            assert time.monotonic() - started < 5
        with pool.connect() as connection:
            assert run(connection, "select pg_backend_pid()").fetchall()[0][0] != frozen
    finally:
        os.kill(frozen, signal.SIGCONT)
        pool.dispose()
