"""The bell of a sweep: it runs when somebody rings, or when there is work that nobody rang for, and never otherwise."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import psycopg

from relay.process import prompt
from relay.process.prompt import Prompt
from tests.hostile import wait_until

if TYPE_CHECKING:
    import pytest


def test_it_runs_for_a_ring_and_for_work_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring runs it once, a refusal is tried again, seen work runs it; a look that fails ends nothing."""
    monkeypatch.setattr(prompt, "LOOK_SECS", 0.02)
    monkeypatch.setattr(prompt, "AGAIN_SECS", 0.01)
    runs: list[bool] = []
    answers = [False, True]
    looks: list[str] = []
    wanted = threading.Event()

    def sweep() -> bool:
        runs.append(answers[len(runs)] if len(runs) < len(answers) else True)
        wanted.clear()
        return runs[-1]

    def look() -> bool:
        looks.append("look")
        if len(looks) == 2:
            raise psycopg.OperationalError("away")
        return wanted.is_set()

    bell = Prompt(sweep, name="test-bell", wanted=look)
    bell.start()
    try:
        wait_until(lambda: len(looks) > 4)
        assert runs == []
        bell.ring()
        wait_until(lambda: len(runs) == 2)
        assert runs == [False, True]
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 2)
        assert len(runs) == 2
        wanted.set()
        wait_until(lambda: len(runs) == 3)
    finally:
        bell.stop()
    wait_until(lambda: "test-bell" not in {thread.name for thread in threading.enumerate()})


def test_without_a_look_it_only_heeds_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing says whether there is work it sleeps until it is rung."""
    monkeypatch.setattr(prompt, "LOOK_SECS", 0.01)
    runs: list[float] = []

    def sweep() -> bool:
        runs.append(time.monotonic())
        return True

    bell = Prompt(sweep, name="test-bell")
    bell.start()
    try:
        bell.ring()
        wait_until(lambda: len(runs) == 1)
        threading.Event().wait(0.1)
        assert len(runs) == 1
    finally:
        bell.stop()
