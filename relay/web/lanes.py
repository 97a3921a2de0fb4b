"""Threads that answer requests, in lanes that do not wait for one another.

What waits for a thread can be taken back by whoever put it there: each ticket is good for one, the thread or the owner.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

J = TypeVar("J")


class Ticket:
    """The right to answer one request: `take` is true for the first who asks, and for nobody else."""

    __slots__ = ("_right",)

    def __init__(self) -> None:
        self._right: list[None] = [None]

    def take(self) -> bool:
        """Take the right, if it is still there. From any thread: to pop is atomic."""
        try:
            self._right.pop()
        except IndexError:
            return False
        return True


class Lane(Generic[J]):
    """So many threads, and what waits for them, first come first served."""

    def __init__(self, name: str, threads: int, run: Callable[[J], None]) -> None:
        """`run` raises nothing."""
        self._queue: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._run = run
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: J) -> None:
        """Have a thread run the job, when one is free."""
        self._queue.put(job)

    def stop(self, timeout: float) -> None:
        """End each thread once it is free; wait `timeout` seconds at most for all of them."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout / len(self._threads))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._run(job)
