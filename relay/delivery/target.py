"""Where a request goes: its URL taken apart once, in the reading that libcurl shares."""

from __future__ import annotations

import functools
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from relay.core.url import UrlPolicy, normalise_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: URLs whose parts are remembered, about 1 KB each: to take one apart costs as much as a third of a send.
KNOWN_URLS = 20_000

#: Any scheme that is spoken, any port, any name: what remains is whether it is a URL at all.
ANY_URL = UrlPolicy(require_https=False, allowed_ports=None, allow_private=True)


class Target:
    """The parts of a URL that a send needs."""

    __slots__ = ("host", "is_literal", "is_plain", "port", "url")

    def __init__(self, text: str, policy: UrlPolicy = ANY_URL) -> None:
        """Raises InvalidInput where the text is no URL that all parsers read alike, or one that the policy refuses."""
        parsed = normalise_url(text, policy)
        #: In the stored form, ASCII.
        self.url = parsed.text
        self.host = parsed.host
        self.port = parsed.port
        #: The host is an address: there is nothing to look up.
        self.is_literal = parsed.is_literal
        self.is_plain = parsed.scheme == "http"

    def pin(self, addresses: Sequence[str]) -> str:
        """Return the RESOLVE entry that makes libcurl dial these addresses for the host.

        With `+` the entry ages like an answer. Without it, it would stay for ever, and for every handle.
        """
        return f"+{bracketed(self.host)}:{self.port}:{','.join(map(bracketed, addresses))}"

    def tunnel(self, address: str) -> str:
        """Return the CONNECT_TO entry that makes the proxy connect to this address for the host."""
        return f"{bracketed(self.host)}:{self.port}:{bracketed(address)}:{self.port}"


class Proxy:
    """The egress proxy, an HTTP one: what it is dialled at and what it is shown."""

    __slots__ = ("credentials", "host", "is_literal", "port", "url")

    def __init__(self, text: str) -> None:
        """`text` is its URL, `http://` or `https://`, with user and password where it asks for them."""
        parts = urlsplit(text)
        self.host = (parts.hostname or "").removesuffix(".")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.url = f"{parts.scheme}://{bracketed(self.host)}:{self.port}"
        self.credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            self.is_literal = False
        else:
            self.is_literal = True

    def pin(self, addresses: Sequence[str]) -> str:
        """Return the RESOLVE entry for the proxy's own name."""
        return f"+{self.host}:{self.port}:{','.join(map(bracketed, addresses))}"


def target_finder(policy: UrlPolicy) -> Callable[[str], Target]:
    """Return a function from a URL to its target that remembers the last KNOWN_URLS; it raises what `Target` does."""
    return functools.lru_cache(maxsize=KNOWN_URLS)(functools.partial(Target, policy=policy))


def bracketed(host: str) -> str:
    """Write a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
