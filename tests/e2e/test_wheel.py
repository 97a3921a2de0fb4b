"""The wheel holds all that an installation needs, migrations included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from relay.store.schema import SCHEMA_VERSION

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel built from the checkout was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: building leaves files beside the sources, and two test processes may build at once.
    sources = folder / "sources"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = sources / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sources)], check=True, timeout=120
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=120
    )
    return folder / "site"


def _relay(installed: Path, *arguments: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAY_") and name != "DATABASE_URL"
    }
    return subprocess.run(
        [sys.executable, "-m", "relay.cli.main", *arguments],
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(installed)} | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_migrates_an_empty_database(installed: Path, bare_database: str, tmp_path: Path) -> None:
    """Outside the checkout, `relay migrate` makes the schema from the migrations inside the wheel."""
    done = _relay(installed, "migrate", cwd=tmp_path, DATABASE_URL=bare_database)

    assert done.returncode == 0, done.stderr
    with psycopg.connect(bare_database) as connection:
        assert connection.execute("select version from relay.schema_info").fetchone() == (SCHEMA_VERSION,)


def test_every_package_of_the_checkout_is_in_the_wheel(installed: Path) -> None:
    """A package that setup.cfg forgets would be missing only once somebody installs it."""
    made = {
        str(path.parent.relative_to(ROOT)) for path in (ROOT / "relay").rglob("*.py") if "__pycache__" not in path.parts
    }
    found = {str(path.parent.relative_to(installed)) for path in (installed / "relay").rglob("*.py")}
    assert made <= found, sorted(made - found)
    assert (installed / "relay" / "py.typed").is_file()


def test_the_command_names_what_is_missing(installed: Path, tmp_path: Path) -> None:
    """Without a database the command says which setting is missing, in one line and without a traceback."""
    done = _relay(installed, "migrate", cwd=tmp_path)

    assert done.returncode == 1
    assert "DATABASE_URL is not set" in done.stderr
    assert "Traceback" not in done.stderr
