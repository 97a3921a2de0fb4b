"""A broker that Redis Sentinel watches over, as one URL.

`sentinel://[user:password@]host[:port][,host[:port]…]/db?master=name`, with `sentinel_username` and
`sentinel_password` where the sentinels ask for a login of their own. User and password are for Redis itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

#: The port of a sentinel whose URL names none.
SENTINEL_PORT: Final = 26379

_URL: Final = re.compile(
    r"sentinel://(?:(?P<login>[^@/?#]*)@)?(?P<hosts>[^@/?#]+)(?:/(?P<db>[0-9]{0,4}))?(?:\?(?P<query>[^#]*))?"
)
_HOST: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::(?P<port>[0-9]{1,5}))?")
_SHAPE: Final = "sentinel://host:26379,host:26379/0?master=name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinels:
    """Where the sentinels are, which of their masters is meant, and how to log in to it."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def is_sentinel(url: str) -> bool:
    """Whether a broker's URL names sentinels."""
    return url.startswith("sentinel://")


def read_sentinels(url: str) -> Sentinels:
    """Read a sentinel:// URL.

    Raises ValueError, whose text begins with "must", says what to write and shows nothing of what was given.
    """
    matched = _URL.fullmatch(url)
    if matched is None:
        raise ValueError(f"must be written as {_SHAPE}")
    hosts = []
    for item in matched["hosts"].split(","):
        host = _HOST.fullmatch(item)
        if host is None or not 0 < int(host["port"] or SENTINEL_PORT) < 65_536:
            raise ValueError(f"must name each sentinel as host or host:port: {_SHAPE}")
        hosts.append((host["host"].strip("[]"), int(host["port"] or SENTINEL_PORT)))
    options = dict(parse_qsl(matched["query"] or "", keep_blank_values=True))
    if any(name.startswith("ssl_") for name in options):
        raise ValueError("must have no ssl_… parameter: TLS together with Sentinel is not supported")
    if options.keys() - {"master", "sentinel_username", "sentinel_password"}:
        raise ValueError("must have no parameter but master, sentinel_username and sentinel_password")
    if not options.get("master"):
        raise ValueError(f"must name the master that the sentinels watch: {_SHAPE}")
    user, _, password = (matched["login"] or "").partition(":")
    return Sentinels(
        hosts=tuple(hosts),
        master=options["master"],
        db=int(matched["db"] or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username") or None,
        sentinel_password=options.get("sentinel_password") or None,
    )
