"""What `relay up` keeps between runs: generated keys, and `dev.env` for whoever talks to it. Readable by the owner only."""

from __future__ import annotations

import base64
import secrets
from typing import TYPE_CHECKING, Final

from relay.core.secret import new_secret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What `relay up` presets whatever is kept.
PRESET: Final = {
    "RELAY_ALLOW_PRIVATE_ENDPOINTS": "true",
    "RELAY_METRICS_BIND": "127.0.0.1:9091",
    # The supervisor reads the processes' output through pipes; a person reads it here.
    "RELAY_LOG_FORMAT": "text",
}


class DevState:
    """The files of one base folder. Values with a new line in them cannot be kept."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._generated = base / "generated.env"
        self._dev_env = base / "dev.env"

    def settings(self) -> dict[str, str]:
        """Return the settings that `relay up` presets: kept keys, made where missing, and the development switch."""
        kept = _read(self._generated)
        made: dict[str, Callable[[], str]] = {
            "RELAY_MASTER_KEYS": lambda: "dev:" + base64.b64encode(secrets.token_bytes(32)).decode(),
            "RELAY_ADMIN_KEY": lambda: secrets.token_urlsafe(32),
            "RELAY_FLOWER_AUTH": lambda: "relay:" + secrets.token_urlsafe(12),
            "RELAY_TESTKIT_SECRET": lambda: new_secret(secrets.token_bytes(32)).reveal(),
        }
        missing = {name: made[name]() for name in made.keys() - kept.keys()}
        if missing:
            kept |= missing
            _write(self._generated, kept, "Made by `relay up`. Without RELAY_MASTER_KEYS the stored secrets are lost.")
        return kept | PRESET

    def read_dev_env(self) -> dict[str, str]:
        """Return what `dev.env` holds; empty before the first run."""
        return _read(self._dev_env)

    def write_dev_env(self, values: dict[str, str]) -> None:
        """Keep where the API is and a key for it, for the command line."""
        _write(self._dev_env, values, "Made by `relay up`, read by the relay command when nothing else is set.")


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def _write(path: Path, values: dict[str, str], comment: str) -> None:
    # Made private before the first byte is in it, and replaced whole.
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(f"# {comment}\n" + "".join(f"{name}={value}\n" for name, value in values.items()))
    fresh.replace(path)
