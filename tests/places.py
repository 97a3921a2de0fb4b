"""Where tests put the data of servers that they throw away."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

#: Linux's folder in memory. A server's first start writes a thousand files, which take a disk longer than all the rest.
_MEMORY = Path("/dev/shm")
#: Bytes that must be free there; a container often has no more than 64 MB in all.
_ROOM = 2 * 1024**3


def new_place() -> Path:
    """Make a folder for a server's data: in memory where there is room, with a path short enough for sockets.

    What is written there survives a killed process, as on a disk, and no power cut. The caller removes it.
    """
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM
    return Path(tempfile.mkdtemp(prefix="relay-tests-", dir=_MEMORY if roomy else "/tmp"))
