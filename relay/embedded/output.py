"""Brings the output of several processes to one place, line by line, each behind its name.

Two threads: one reads, so that no child ever waits for a reader; one writes, and may be held up by a terminal that is
stopped or a pager. What piles up meanwhile is kept up to a limit; then lines are dropped, and their number is told.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TextIO

LINE_MAX = 32 * 1024  # bytes; what is longer comes in pieces
READ_SIZE = 64 * 1024  # bytes
PARTIAL_AFTER = 0.5  # seconds after which the start of an unfinished line is shown: a prompt, a progress bar
KEPT_MAX = 4 * 1024 * 1024  # characters that wait for a slow reader, at most
FINISH_TIMEOUT = 2.0  # seconds for what is left to come through at the end

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # codes of SGR, readable on dark and on light


@dataclass(slots=True, kw_only=True)
class _Source:
    name: str
    buffer: bytearray = field(default_factory=bytearray)
    since: float = 0.0  # when the unfinished line began, on the monotonic clock


class Output:
    """Prefixes and prints; `names` are those that will speak, for the width and the colours."""

    def __init__(self, out: TextIO, names: list[str], *, colour: bool) -> None:
        self._out = out
        self._descriptor = _descriptor_of(out)
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} if colour else {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else _pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._fresh: deque[tuple[str, int]] = deque()
        self._waiting: deque[str] = deque()
        self._waiting_size = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="output-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="output-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def attach(self, name: str, descriptor: int) -> None:
        """Read `descriptor` (which is then this object's to close) to its end, as the output of `name`."""
        os.set_blocking(descriptor, False)
        self._fresh.append((name, descriptor))
        self._wake()

    def say(self, name: str, line: str) -> None:
        """Print a line as `name`, in order with what was read before. Never blocks."""
        code = self._colours.get(name)
        prefix = f"{name:<{self._width}} | "
        text = f"\x1b[{code}m{prefix}\x1b[0m{line}\n" if code else f"{prefix}{line}\n"
        with self._changed:
            if self._waiting_size + len(text) > KEPT_MAX:
                self._dropped += 1
                return
            self._waiting.append(text)
            self._waiting_size += len(text)
            self._changed.notify()

    def close(self) -> None:
        """Print what is left, for at most a few seconds. What a grandchild writes later is lost."""
        self._closing = True
        self._wake()
        self._reader.join(FINISH_TIMEOUT)
        with self._changed:
            self._changed.notify()
        self._writer.join(FINISH_TIMEOUT)
        if not self._reader.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._wake_write, b"\0")

    def _read(self) -> None:
        deadline: float | None = None
        while True:
            now = time.monotonic()
            if self._closing and deadline is None:
                deadline = now + FINISH_TIMEOUT / 2
            sources = self._sources()
            if deadline is not None and (now >= deadline or not (sources or self._fresh)):
                break
            pending = [source.since for source in sources if source.buffer]
            wait = max(0.0, min(pending) + PARTIAL_AFTER - now) if pending else None
            if deadline is not None:
                wait = min(deadline - now, wait if wait is not None else FINISH_TIMEOUT)
            for key, _ in self._selector.select(wait):
                if isinstance(key.data, _Source):
                    self._take(key.fd, key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, READ_SIZE)
            while self._fresh:
                name, descriptor = self._fresh.popleft()
                self._selector.register(descriptor, selectors.EVENT_READ, _Source(name=name))
            self._show_unfinished()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Source):
                self._end(key.fd, key.data)
        self._selector.close()

    def _sources(self) -> list[_Source]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Source)]

    def _take(self, descriptor: int, source: _Source) -> None:
        try:
            piece = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return
        if not piece:
            self._end(descriptor, source)
            return
        if not source.buffer:
            source.since = time.monotonic()
        source.buffer += piece
        lines = source.buffer.split(b"\n")
        source.buffer = lines.pop()
        if lines:
            source.since = time.monotonic()
        for line in lines:
            self._print(source.name, line)
        while len(source.buffer) > LINE_MAX:
            self._print(source.name, source.buffer[:LINE_MAX])
            del source.buffer[:LINE_MAX]

    def _print(self, name: str, line: bytearray) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        for start in range(0, max(1, len(text)), LINE_MAX):
            self.say(name, text[start : start + LINE_MAX])

    def _show_unfinished(self) -> None:
        now = time.monotonic()
        for source in self._sources():
            if source.buffer and now - source.since >= PARTIAL_AFTER:
                self._print(source.name, source.buffer)
                source.buffer = bytearray()

    def _end(self, descriptor: int, source: _Source) -> None:
        if source.buffer:
            self._print(source.name, source.buffer)
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _write(self) -> None:
        broken = False
        while True:
            with self._changed:
                while not self._waiting and not self._dropped:
                    if self._closing and not self._reader.is_alive():
                        return
                    self._changed.wait(1.0)
                text = "".join(self._waiting)
                self._waiting.clear()
                self._waiting_size = 0
                if self._dropped:
                    text += f"... {self._dropped} lines were dropped: nobody took them in time\n"
                    self._dropped = 0
            if broken:
                continue
            try:
                self._put(text)
            except (OSError, ValueError):  # the reader went away: the processes go on without one
                broken = True

    def _put(self, text: str) -> None:
        """Write straight to the descriptor where there is one: a thread that is held up in there holds no lock of
        Python's, so that the interpreter can still end.
        """
        if self._descriptor is None:
            self._out.write(text)
            self._out.flush()
            return
        left = memoryview(text.encode("utf-8", "replace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # someone made the terminal non-blocking
                select.select([], [self._descriptor], [], 1.0)


def _descriptor_of(out: TextIO) -> int | None:
    try:
        out.flush()
        return out.fileno()
    except (OSError, ValueError):  # no file, such as a StringIO
        return None


def _pipe() -> tuple[int, int]:
    """A pipe for systems without pipe2; Python's descriptors are closed at exec by default."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
