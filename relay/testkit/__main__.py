"""`python -m relay.testkit`: the receiver without the rest of Relay's command line."""

from __future__ import annotations

import argparse
import os
import sys

from relay.testkit.main import DEFAULT_BIND, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m relay.testkit", description="A webhook receiver to test against.")
    parser.add_argument(
        "--bind",
        default=os.environ.get("RELAY_TESTKIT_BIND", DEFAULT_BIND),
        help="host:port; the secret is read from RELAY_TESTKIT_SECRET (default: %(default)s)",
    )
    sys.exit(main(parser.parse_args().bind, os.environ.get("RELAY_TESTKIT_SECRET") or None))
