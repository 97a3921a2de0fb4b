"""Makes a Postgres data directory and mends it without a running server, by Postgres's own programs alone."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relay.core.errors import ConfigurationError
from relay.embedded.home import write_private
from relay.embedded.launch import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.embedded.account import Account

TIMEOUT = 120.0  # seconds for initdb, which takes about one, or for a single statement
BUILTIN_LOCALE_SINCE = 17  # the major version that brought a C.UTF-8 of Postgres's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Postgres's programs as the account can run them."""

    bin_dir: Path
    major: int
    account: Account

    def has_library(self, name: str) -> bool:
        """Whether a module of that name can be preloaded."""
        try:
            asked = run([str(self.bin_dir / "pg_config"), "--pkglibdir"], account=self.account, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return False
        place = asked.stdout.strip()
        return bool(place) and any(Path(place).glob(f"{name}.*"))


def major_of(data: Path) -> int | None:
    """Which release made the data directory; None where there is none."""
    try:
        return int((data / "PG_VERSION").read_text("ascii"))
    except FileNotFoundError:
        return None


def make_cluster(programs: Programs, data: Path, *, superuser: str, password: str, database: str) -> None:
    """Make the data directory aside and move it into place whole: an interrupted start leaves none or all of it.

    Passwords are needed for every connection, text is UTF-8 compared by code point, pages carry checksums.
    """
    fresh = data.with_name(f"{data.name}.unfinished")
    password_file = data.with_name("password")
    write_private(password_file, f"{password}\n", programs.account)
    try:
        _initdb(programs, fresh, superuser, password_file)
    finally:
        password_file.unlink(missing_ok=True)
    single_user(programs, fresh, f"CREATE DATABASE {database}")
    fresh.rename(data)


def set_password(programs: Programs, data: Path, *, superuser: str, password: str) -> None:
    """Give the superuser another password, for when the one that was remembered is lost."""
    single_user(programs, data, f"ALTER ROLE {superuser} PASSWORD '{password}'")


def single_user(programs: Programs, data: Path, statement: str) -> None:
    """Run one statement with no server running: this asks for no password and needs no client program.

    Raises ConfigurationError when it fails. The statement goes in as it is: only constants and our own words.
    """
    argv = [str(programs.bin_dir / "postgres"), "--single", "-D", str(data), "-c", "exit_on_error=on", "postgres"]
    done = run(argv, account=programs.account, timeout=TIMEOUT, stdin=f"{statement}\n")
    if done.returncode != 0 or "ERROR:" in done.stderr:
        raise ConfigurationError(f"{statement.split(maxsplit=1)[0]} failed in {data}: {done.stderr.strip()}")


def _initdb(programs: Programs, data: Path, superuser: str, password_file: Path) -> None:
    said = ""
    for locale in _locales(programs.major):
        shutil.rmtree(data, ignore_errors=True)
        argv = [str(programs.bin_dir / "initdb"), "-D", str(data), "-U", superuser, f"--pwfile={password_file}"]
        argv += ["--auth=scram-sha-256", "--encoding=UTF8", "--data-checksums", *locale]
        done = run(argv, account=programs.account, timeout=TIMEOUT)
        if done.returncode == 0:
            return
        said = (done.stderr or done.stdout).strip()
    raise ConfigurationError(f"initdb failed in {data}: {said}")


def _locales(major: int) -> Sequence[Sequence[str]]:
    """Ways to say: compare by code point, know letters of all languages. The last one exists everywhere."""
    if major >= BUILTIN_LOCALE_SINCE:
        return [["--locale-provider=builtin", "--locale=C.UTF-8"]]
    return [["--lc-collate=C", "--lc-ctype=C.UTF-8", "--lc-messages=C"], ["--locale=C"]]
