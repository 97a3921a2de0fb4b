"""What a killed `relay listen` leaves: an endpoint that nobody listens at any more.

Each notes its endpoint in a file that it holds locked for as long as it lives, however it dies. So a note that is not
locked is a dead one's, and the next `relay listen` of this user and API removes what it names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relay.client import NotFound, RelayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.client import Relay

#: Seconds for which a note is kept whose endpoint this key does not find: it may be of another workspace.
KEPT_SECS: Final = 30 * 86_400


class Note:
    """A note of one endpoint. Where no file can be written there is none, and nothing else is lost."""

    def __init__(self, url: str, endpoint_id: str) -> None:
        """`url` is the API's."""
        self._path: Path | None = None
        try:
            folder = _folder(url)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Locked before it has its name, so that nobody finds it unlocked.
            hidden = folder / f".{endpoint_id}"
            self._descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path = hidden.rename(folder / endpoint_id)
        except (OSError, RuntimeError):
            # RuntimeError: there is no home.
            return

    def remove(self) -> None:
        """Drop it: the endpoint is removed."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._path = None


def remove_left(relay: Relay) -> Iterator[str]:
    """Remove the endpoints that dead ones left at this API, and yield their ids. What cannot be removed stays noted."""
    try:
        notes = [path for path in sorted(_folder(relay.url).iterdir()) if not path.name.startswith(".")]
    except (OSError, RuntimeError):
        return
    for note in notes:
        if not _is_dead(note):
            continue
        try:
            relay.endpoints.delete(note.name)
        except NotFound:
            # Another start may have dropped it already.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - note.stat().st_mtime > KEPT_SECS:
                    note.unlink()
            continue
        except RelayError:
            continue
        note.unlink(missing_ok=True)
        yield note.name


def _folder(url: str) -> Path:
    """Where notes of one API are: in the folder for what programs remember (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "relay" / "listen" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _is_dead(note: Path) -> bool:
    try:
        with note.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # It is locked, or has just been removed.
        return False
    return True
