"""Which user the servers run as: whoever starts them, unless that is root, whom Postgres refuses to serve.

Root picks, in this order: the user named, the owner of the data that is there, a user called `relay`, and last
`nobody`, so that a bare container works. What `nobody` owns is open to every other program that runs as `nobody`:
name a user of its own where that matters.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SERVICE_ACCOUNT = "relay"
LAST_RESORT = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user of the system; `switch` tells that the launcher is root and must become it."""

    name: str
    uid: int
    gid: int
    switch: bool


def choose_account(run_as: str | None, data: Iterable[Path] = ()) -> Account:
    """The account to run servers as; `data` are paths whose owner is taken, the first that exists and is not root's.

    Raises ConfigurationError when the named user does not exist, is root, or cannot be switched to.
    """
    me = os.geteuid()
    if me != 0:
        entry = _by_uid(me)
        if run_as is not None and run_as not in (entry.pw_name, str(me)):
            raise ConfigurationError(f"only root can run servers as another user ({run_as!r}); this is {entry.pw_name}")
        return _account(entry, switch=False)
    if run_as is not None:
        named = _by_name(run_as)
        if named is None:
            raise ConfigurationError(f"there is no user {run_as!r} to run the servers as")
        if named.pw_uid == 0:
            raise ConfigurationError("Postgres does not run as root: name another user to run the servers as")
        return _account(named, switch=True)
    for path in data:
        if path.exists() and path.stat().st_uid != 0:
            return _account(_by_uid(path.stat().st_uid), switch=True)
    for name in (SERVICE_ACCOUNT, LAST_RESORT):
        found = _by_name(name)
        if found is not None and found.pw_uid != 0:
            return _account(found, switch=True)
    raise ConfigurationError("Postgres does not run as root, and there is no other user to run it as: name one")


def can_reach(account: Account, path: Path) -> bool:
    """Whether the account can enter or execute `path`, asked of the system itself: modes alone do not tell."""
    if not account.switch:
        return os.access(path, os.X_OK)
    asked = subprocess.run(  # noqa: S603 - a fixed program
        ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)],
        user=account.uid,
        group=account.gid,
        extra_groups=[],
        cwd="/",
        check=False,
    )
    return asked.returncode == 0


def _account(entry: pwd.struct_passwd, *, switch: bool) -> Account:
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, switch=switch)


def _by_uid(uid: int) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        raise ConfigurationError(
            f"user id {uid} has no entry in the user database, and Postgres refuses to run without one: "
            "add the user, or name one that has an entry"
        ) from None


def _by_name(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
