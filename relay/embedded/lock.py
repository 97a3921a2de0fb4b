"""One at a time: a lock file that names its holder and that ends with its holder, however that dies."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


class AlreadyHeld(ConfigurationError):
    """Another process holds the lock: stop it, or use another directory."""


class FileLock:
    """An exclusive lock on `path`, for one open file: two objects of one process exclude each other too.

    Holds on one machine only (network file systems may not keep it), and a process forked without exec keeps it held.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise AlreadyHeld, whose message names the process that has it."""
        if not self.try_acquire():
            holder = self.holder()
            by = f"process {holder}" if holder else "another process"
            raise AlreadyHeld(f"{self._what} is in use by {by} (lock file {self._path}): stop it first")

    def try_acquire(self) -> bool:
        """Take the lock if it is free; whether it is now held."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            if self._is_file(descriptor):
                break
            os.close(descriptor)  # its holder deleted it between our open and our lock
        if os.geteuid() == 0:  # in another user's directory, that user must be able to open it later
            owner = self._path.parent.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor
        return True

    def holder(self) -> int | None:
        """The process id written by whoever took the lock last, if it can be read."""
        try:
            return int(self._path.read_text("ascii"))
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Let go and delete the file; does nothing where the lock is not held."""
        if self._descriptor is None:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False
