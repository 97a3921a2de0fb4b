"""Where the `relay` program begins: says in a sentence what is missing where Relay was installed without its packages."""

from __future__ import annotations

import sys
from typing import Final

#: What the commands need that talk to the API; after `pip install --no-deps` there is none.
_CLIENTS: Final = ("requests", "click", "rich")


def main() -> None:
    """Run the command line. Ends the process; with 1 where a package that is not Relay's own is missing."""
    try:
        from relay.cli.main import main as commands

        commands()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"", "relay"}:
            raise
        if missing in _CLIENTS:
            sys.exit(f"relay: the package {missing} is missing: pip install {' '.join(_CLIENTS)}")
        sys.exit(
            f"relay: this needs the server, and the package {missing} is missing: in a clone of Relay pip install . "
            "without --no-deps"
        )
