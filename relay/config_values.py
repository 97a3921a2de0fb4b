"""The shapes of settings that are more than a number or a word, and how their text is read.

Each reader takes the text of a variable and gives its value; a value that is not text passes as it is. A ValueError's
message follows the variable's name and begins with "must": it says what to write, and shows no secret.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from pydantic import SecretBytes

from relay.core.broker_url import is_sentinel, read_sentinels

if TYPE_CHECKING:
    from collections.abc import Callable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Bytes in a master key: AES-256.
MASTER_KEY_BYTES: Final = 32
#: Characters of the instance's key, at least.
MIN_ADMIN_KEY: Final = 16

_HOST_RULE: Final = re.compile(r"\.?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


class Bind(NamedTuple):
    """An address to listen on. `host` is bare (`::1`, without brackets); port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterKey:
    """One key of RELAY_MASTER_KEYS: 32 bytes under the id that sealed secrets name."""

    id: str
    key: SecretBytes

    @property
    def fingerprint(self) -> str:
        """Sixteen letters that tell another value under the same id, and nothing of the key: it is random."""
        return hashlib.sha256(b"relay master key\0" + self.key.get_secret_value()).hexdigest()[:16]


class FailpointAction(enum.StrEnum):
    """What a process does on reaching a failpoint."""

    KILL = "kill"
    STOP = "stop"
    SLEEP = "sleep"
    RAISE = "raise"


class Failpoint(NamedTuple):
    """A named place in the code, for tests, and what happens there."""

    name: str
    action: FailpointAction

    def __str__(self) -> str:
        return f"{self.name}:{self.action}"


def bind(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host) != bracketed or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError("must be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080")
    if int(port) > 65_535:
        raise ValueError("must have a port of at most 65535")
    if bracketed:
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise ValueError("must have an IPv6 address between its brackets") from None
    return Bind(host, int(port))


def url(*schemes: str, path: bool) -> Callable[[object], object]:
    """A check that a value is a URL of one of the schemes, with a host; without its trailing slash."""

    def check(value: object) -> object:
        if not isinstance(value, str):
            return value
        wanted = " or ".join(f"{scheme}://" for scheme in schemes)
        try:
            parts = urlsplit(value)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ValueError(f"must be a URL that begins with {wanted}") from None
        if parts.scheme not in schemes or not host or any(c.isspace() for c in value):
            raise ValueError(f"must be a URL that begins with {wanted} and names a host")
        if path and (parts.username is not None or parts.password is not None):
            raise ValueError("must have no user name and no password")
        if parts.query or parts.fragment or (parts.path.strip("/") and not path):
            raise ValueError("must end after the host and port" if not path else "must have no query and no fragment")
        return value.rstrip("/")

    return check


def database_url(value: object) -> object:
    if not isinstance(value, str):
        return value
    matched = re.match(r"postgres(?:ql)?(?:\+[a-z0-9_]+)?://", value)
    if matched is None:
        raise ValueError("must be a URL that begins with postgresql://")
    rest = value[matched.end() :]
    place = re.match(r"(?:[^:/@]*(?::[^@/?#]*)?@)?([^/?#]*)", rest)
    assert place is not None
    if "," in place[1]:
        raise ValueError("must name several hosts in its query: postgresql://user@/database?host=a,b&port=5432,5432")
    port = re.search(r":([^:\]]*)$", place[1])
    if port is not None and not re.fullmatch(r"[0-9]{0,5}", port[1]):
        raise ValueError(
            "must have a number for its port; in a password `@`, `/`, `?` and `#` are written %40, %2F, %3F, %23"
        )
    return "postgresql://" + rest


def broker_url(value: object) -> object:
    if not isinstance(value, str):
        return value
    if is_sentinel(value):
        read_sentinels(value)
    elif not re.match(r"(rediss?|unix)://.", value):
        raise ValueError("must be a URL that begins with redis://, rediss://, unix:// or sentinel://")
    return value


def admin_key(value: object) -> object:
    if isinstance(value, str) and len(value) < MIN_ADMIN_KEY:
        raise ValueError(f"must have {MIN_ADMIN_KEY} characters at least, and be hard to guess: it opens everything")
    return value


def master_keys(value: object) -> object:
    if not isinstance(value, str):
        return value
    keys: dict[str, MasterKey] = {}
    for place, item in enumerate(_words(value), start=1):
        # Nothing of a key may reach a message: keys are named by their place.
        key_id, colon, encoded = item.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z0-9._-]{1,32}", key_id):
            raise ValueError(
                f"must be a list of id:base64; item {place} has no id of 1 to 32 letters, digits, '.', '_', '-'"
            )
        if key_id in keys:
            raise ValueError(f"must give each key an id of its own; item {place} repeats an earlier one's")
        padded = encoded.rstrip("=").translate(str.maketrans("-_", "+/")) + "=" * (-len(encoded.rstrip("=")) % 4)
        try:
            key = base64.b64decode(padded, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"must be a list of id:base64; item {place} is not base64") from None
        if len(key) != MASTER_KEY_BYTES:
            raise ValueError(f"must hold keys of {MASTER_KEY_BYTES} bytes; item {place} has {len(key)}")
        keys[key_id] = MasterKey(id=key_id, key=SecretBytes(key))
    return tuple(keys.values())


def ports(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value == "*":
        return None
    items = _words(value)
    if not all(re.fullmatch(r"[0-9]{1,5}", item) and 0 < int(item) < 65_536 for item in items):
        raise ValueError("must be * or a list of ports from 1 to 65535, such as 443,8443")
    return frozenset(map(int, items))


def networks(value: object) -> object:
    if not isinstance(value, str):
        return value
    networks: list[Network] = []
    for item in _words(value):
        try:
            network = ipaddress.ip_network(item, strict=False)
        except ValueError:
            raise ValueError(f"must be a list of networks such as 10.0.0.0/8, fd00::/8; {item!r} is none") from None
        if "/" in item and ipaddress.ip_address(item.partition("/")[0]) != network.network_address:
            raise ValueError(f"must name a network by its first address; for {item} write {network}")
        networks.append(network)
    return tuple(networks)


def hosts(value: object) -> object:
    if not isinstance(value, str):
        return value
    hosts = [item.lower().rstrip(".") for item in _words(value)]
    for host in hosts:
        if not _HOST_RULE.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
            raise ValueError(
                f"must be a list of names and .suffixes, such as orders.internal, .svc.cluster.local; {host!r} is none"
                " (addresses belong in RELAY_ALLOWED_CIDRS, international names in their xn-- form)"
            )
    return tuple(hosts)


def failpoints(value: object) -> object:
    if not isinstance(value, str):
        return value
    points = []
    for item in _words(value):
        name, _, action = item.partition(":")
        if not name or action not in set(FailpointAction):
            raise ValueError(f"must be a list of name:action, the action one of {', '.join(FailpointAction)}")
        points.append(Failpoint(name, FailpointAction(action)))
    return tuple(points)


def login(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[^:,\s]+:[^,\s]+", value):
        raise ValueError("must be user:password, without white space or commas")
    return value


def lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _words(text: str) -> list[str]:
    """The items of a list that is separated by commas or white space."""
    return text.replace(",", " ").split()
