"""Where a server keeps its files: under the base directory, or beside it where the server's user cannot get in.

What must be remembered (ports, passwords, where the data went) stays in the base directory, in files only its owner
reads. Modes of directories that were there before are never changed, the base directory excepted.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relay.core.errors import ConfigurationError
from relay.embedded.account import Account, can_reach

#: Tried in this order for data that cannot stay in the base directory. Cleaners of /var/tmp may delete old files.
ELSEWHERE = (Path("/var/lib/relay"), Path("/var/tmp"))  # noqa: S108 - made with mkdtemp, never a fixed name
MOVED_TO = "moved-to"

Say = Callable[[str], None]


def make_base(base: Path) -> Path:
    """Make the base directory, closed to others, and return it resolved."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the directory {base}: {error.strerror}") from error
    if not os.access(base, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the directory {base} is another user's: run as its owner, or name another")
    return base.resolve()


def settle(base: Path, account: Account, say: Say) -> Path:
    """The directory in which `account` may have its own: `base`, or another that is recorded in it and said once."""
    record = base / MOVED_TO
    if record.exists():
        moved = Path(record.read_text("utf-8").strip())
        if can_reach(account, moved):
            return moved
        if moved.is_dir():
            raise ConfigurationError(f"the servers' data is in {moved}, which is closed to user {account.name}")
    if not account.switch or can_reach(account, base):
        return base
    if base.stat().st_uid == 0 and can_reach(account, base.parent):
        # The base directory is ours: let the account's group pass through it, and still list and read nothing.
        os.chown(base, -1, account.gid)
        base.chmod(stat.S_IMODE(base.stat().st_mode) | stat.S_IXGRP)
        if can_reach(account, base):
            return base
    moved = _elsewhere(base, account)
    write_private(record, f"{moved}\n")
    say(f"{base} is closed to user {account.name}: the servers' data is in {moved}")
    return moved


def own_directory(path: Path, account: Account) -> Path:
    """Make `path` (mode 0700) for the account. Raises ConfigurationError where another user owns it."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(f"{path} is no directory that can be opened: {error.strerror}") from error
    try:
        owner = os.fstat(handle).st_uid
        if account.switch and owner == 0:
            os.fchown(handle, account.uid, account.gid)
        elif owner != account.uid:
            raise ConfigurationError(
                f"{path} belongs to user id {owner} and the server would run as {account.name}: "
                f"run it as the owner, or give it to {account.name} with chown -R"
            )
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return path


def write_private(path: Path, text: str, account: Account | None = None) -> None:
    """Replace a file as a whole, mode 0600, owned by `account` or like its directory; follows no planted link."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        if os.geteuid() == 0:
            owner = path.parent.stat()
            uid, gid = (account.uid, account.gid) if account else (owner.st_uid, owner.st_gid)
            os.fchown(handle, uid, gid)
        file.write(text)
        file.flush()
        os.fsync(handle)
    fresh.rename(path)


def read_state(path: Path) -> dict[str, Any]:
    """What was remembered in `path`; empty where nothing was, or where it cannot be read as an object."""
    try:
        state = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Remember `state` in `path`, mode 0600."""
    write_private(path, json.dumps(state, indent=1, sort_keys=True) + "\n")


def discard(base: Path) -> None:
    """Delete the base directory and the data that was moved out of it. Every server in it must have stopped."""
    record = base / MOVED_TO
    if record.exists():
        moved = Path(record.read_text("utf-8").strip())
        shutil.rmtree(moved, ignore_errors=True)
        if moved.parent == ELSEWHERE[0] and not any(moved.parent.iterdir()):
            moved.parent.rmdir()
    shutil.rmtree(base, ignore_errors=True)


def _elsewhere(base: Path, account: Account) -> Path:
    for place in ELSEWHERE:
        try:
            place.mkdir(mode=0o755, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f"relay-{base.parent.name[:32]}-", dir=place))
        except OSError:
            continue
        os.chown(made, -1, account.gid)
        made.chmod(0o710)
        if can_reach(account, made):
            return made
        made.rmdir()
    raise ConfigurationError(
        f"user {account.name} cannot enter {base}, nor any of {', '.join(map(str, ELSEWHERE))}: "
        "put the base directory where it can"
    )
