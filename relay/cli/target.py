"""Which API the commands talk to, and with which key; and the options that all of them have."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from relay.client import Relay
from relay.client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT_SECS
from relay.core.errors import ConfigurationError, RelayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

#: Written by `relay up`, and read here when nothing else says where the API is.
DEV_ENV: Final = Path(".relay/dev.env")
#: Seconds and rows for completing an id while somebody types.
_COMPLETE_SECS: Final = 1.0
_COMPLETE_ROWS: Final = 100


def find(url: str | None) -> tuple[str, str]:
    """Return the API's URL and the key: the option, then the environment, then `.env`, then what `relay up` made.

    The last one's key goes to the last one's API alone. Raises ConfigurationError where one of the two is not known.
    """
    set_ = {name: value for name, value in (read_env(Path(".env")) | dict(os.environ)).items() if value.strip()}
    made = read_env(DEV_ENV)
    base = url or set_.get("RELAY_URL") or made.get("RELAY_URL", "")
    key = set_.get("RELAY_API_KEY", "")
    if not key and base and base.rstrip("/") == made.get("RELAY_URL", "").rstrip("/"):
        key = made.get("RELAY_API_KEY", "")
    missing = [name for name, value in (("RELAY_URL", base), ("RELAY_API_KEY", key)) if not value]
    if missing:
        raise ConfigurationError(f"set {' and '.join(missing)}, or run `relay up` in this folder first")
    return base.strip(), key.strip()


def connect(url: str | None, *, timeout: float = DEFAULT_TIMEOUT_SECS, retries: int = DEFAULT_RETRIES) -> Relay:
    """Make the client. Raises ConfigurationError as `find` does."""
    # What it repeats is not for a person to read.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    base, key = find(url)
    return Relay(base, key, timeout=timeout, retries=retries)


def talks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--url` and `--json`: it is called with `relay`, a client, and `as_json`."""

    @click.option("--url", default=None, help="The API. Default: RELAY_URL, or what `relay up` made.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
    @functools.wraps(command)
    def wrapped(*args: Any, url: str | None, **kwargs: Any) -> Any:
        with connect(url) as relay:
            return command(*args, relay=relay, **kwargs)

    return wrapped


def complete_endpoint(_ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete an endpoint's id, with its URL beside; nothing where the API does not say."""
    from click.shell_completion import CompletionItem

    try:
        with connect(None, timeout=_COMPLETE_SECS, retries=0) as relay:
            found = list(relay.endpoints.list(limit=_COMPLETE_ROWS))
    except RelayError:
        return []
    return [CompletionItem(one.id, help=one.url) for one in found if one.id.startswith(typed)]


def read_env(path: Path) -> dict[str, str]:
    """Read a file of NAME=value lines, quotes around a value and `export` before it left out; {} where there is none."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.strip().removeprefix("export ").partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): _unquoted(value.strip()) for name, mark, value in pairs if mark}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
