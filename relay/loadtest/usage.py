"""What processes cost, read from /proc: CPU by role and resident memory. Linux only; elsewhere nothing is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PROC: Final = Path("/proc")
_TICKS_PER_SEC: Final = os.sysconf("SC_CLK_TCK")


def cpu_secs(roots: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """CPU seconds, user and system, that each role's processes and all below them have used so far.

    To the kernel's tick of 10 ms. What ended is counted where its parent waited for it, as Postgres does for its
    backends. A role whose processes cannot be read is left out.
    """
    parents, times = _processes()
    found: dict[str, float] = {}
    for role, pids in roots.items():
        family = _with_descendants(set(pids) & times.keys(), parents)
        if family:
            found[role] = sum(times[pid] for pid in family)
    return found


def machine_secs() -> float | None:
    """CPU seconds of all cores that somebody used since the machine started, a hypervisor's other guests included."""
    try:
        line = (_PROC / "stat").read_text("ascii", "replace").partition("\n")[0]
        user, nice, system, _idle, _waiting, *rest = (int(ticks) for ticks in line.split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / _TICKS_PER_SEC


def own_secs() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def peak_rss_mb(pids: Iterable[int]) -> float | None:
    """The largest peak of resident memory among the processes themselves, in MiB; None where none can be read."""
    return _largest_mb(pids, "VmHWM:")


def rss_mb(pids: Iterable[int]) -> float | None:
    """The same, as it is now."""
    return _largest_mb(pids, "VmRSS:")


def _largest_mb(pids: Iterable[int], name: str) -> float | None:
    found = []
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "status").read_text("ascii", "replace").splitlines()
        except OSError:
            continue
        found += [int(line.split()[1]) / 1024 for line in lines if line.startswith(name)]
    return round(max(found), 1) if found else None


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """Parent and CPU seconds (those of waited-for children included) by process id."""
    parents: dict[int, int] = {}
    times: dict[int, float] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            # The command's name, in brackets, may hold anything: count from behind it.
            fields = (entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        times[pid] = sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_SEC
    return parents, times


def _with_descendants(pids: set[int], parents: Mapping[int, int]) -> set[int]:
    family = set(pids)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return family
