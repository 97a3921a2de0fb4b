"""A container's health check: 0 where a local port answers as it should. The images have no curl.

python probe.py PORT PATH [STATUS]
"""

from __future__ import annotations

import http.client
import sys

#: Seconds. Shorter than the health check's own, so that what went wrong is said.
TIMEOUT_SECS = 2.5


def main(arguments: list[str]) -> int:
    """Ask once, by no proxy of the environment; return 0, or 1 having said on stdout what came instead."""
    port, path, *wanted = arguments
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_SECS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(500).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"{port}{path}: {error or type(error).__name__}\n")
        return 1
    finally:
        connection.close()
    sys.stdout.write(f"{port}{path}: {answer.status} {text}\n")
    return 0 if answer.status == int(*wanted or (200,)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
