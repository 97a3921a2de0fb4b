"""Whether a process gets on: what counts as dead, what as stalled, and when neither is looked at."""

from __future__ import annotations

import threading

from relay.process.vitals import STALLED_SECS, STUCK_SECS, Vitals


def test_a_thread_that_ended_is_dead_while_the_process_is_watched() -> None:
    """Threads are missed between `watch` and `leave`, by their names; those that live are not named."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="vitals-one")
    vitals = Vitals(threads=("vitals-one", "vitals-never"))
    thread.start()
    try:
        assert vitals.dead() == []
        vitals.watch()
        assert vitals.dead() == ["vitals-never"]
    finally:
        end.set()
        thread.join()
    assert vitals.dead() == ["vitals-one", "vitals-never"]
    assert vitals.details() == {"dead": ["vitals-one", "vitals-never"]}
    vitals.leave()
    assert (vitals.dead(), vitals.details()) == ([], {})


def test_a_wait_stalls_and_only_an_inner_one_is_ever_dead() -> None:
    """Waits over the bound are told with their seconds; only one that nothing outside can lengthen counts as dead."""
    secs = {"claim": STALLED_SECS, "engine": 0.0}
    vitals = Vitals(waits={name: lambda name=name: secs[name] for name in secs}, inner=("engine",))  # type: ignore[misc]  # mypy sees no default argument in a lambda
    vitals.watch()
    assert vitals.details() == {}
    secs |= {"claim": STUCK_SECS + 1.06, "engine": STALLED_SECS + 0.1}
    assert vitals.details() == {"stalled": {"claim": STUCK_SECS + 1.1, "engine": STALLED_SECS + 0.1}}
    secs |= {"claim": 0.0, "engine": STUCK_SECS + 1}
    assert vitals.details() == {"stalled": {"engine": STUCK_SECS + 1}, "dead": ["engine"]}
    vitals.leave()
    assert vitals.details() == {}
