"""Destination URLs: parsed once, strictly, into the one form that is stored and sent.

libcurl, urllib3 and receivers read sloppy URLs differently, and each difference is a
way past a check. So nothing is guessed: what two parsers might read differently is
refused, with a remedy.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import NoReturn

import idna

from relay.core.errors import InvalidInput

#: Characters in a URL, as given and as stored.
MAX_URL_LENGTH = 2048

DEFAULT_PORTS = {"http": 80, "https": 443}

#: Codes of `normalise_url` that say where a URL leads, not that it is none: to send it there is refused by policy.
#: Odd spellings of addresses are among them, since there is no other reason to write one.
POLICY_CODES = frozenset({"noncanonical_ipv4", "pct_in_host", "port", "reserved_name", "scheme", "single_label"})

#: Names that do not lead to a public host: special by RFC (6761, 6762, 7686, 8375, 9476), by ICANN's
#: reservation, or by common use inside networks. A name is refused if it is one of these or ends in one.
_RESERVED_NAMES = (
    "alt",
    "corp",
    "home",
    "home.arpa",
    "internal",
    "intranet",
    "lan",
    "local",
    "localdomain",
    "localhost",
    "onion",
    "private",
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
#: Controls, space and backslash: some parsers strip them, some stop there, some read \ as /.
_BAD_ANYWHERE = re.compile(r"[\x00-\x20\x7f\\]")
_AUTHORITY_END = re.compile(r"[/?#]")
#: RFC 3986 sections 3.3 and 3.4, escapes whole.
_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_ESCAPE = re.compile(r"%[0-9a-fA-F]{2}")
#: A path segment of one or two dots, at least one of them escaped: libcurl folds it, others keep it.
_ESCAPED_DOTS = re.compile(r"/(?:%2E|\.%2E|%2E\.|%2E%2E)(?:/|$)")
#: Underscores are no part of host names, but of names in container networks and in some public DNS.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
#: A host that ends in such a label is read as an IPv4 address, in the manner of inet_aton, by some.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}")
_IPV6_CHARACTERS = re.compile(r"[0-9a-fA-F:.]+")
_MAX_NAME = 253
_MAX_LABEL = 63
_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPolicy:
    """Which schemes, ports and names are allowed. Addresses are judged elsewhere, when they are known."""

    require_https: bool = True
    #: None: any port.
    allowed_ports: frozenset[int] | None = frozenset({443})
    #: Names are free: single labels and reserved names too.
    allow_private: bool = False
    #: Names, and `.suffixes` of names, that are free of the rules for names. In lower case, as stored.
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hosts = tuple(host.lower().removesuffix(".") for host in self.allowed_hosts)
        for host in hosts:
            if not all(_LABEL.fullmatch(label) for label in host.removeprefix(".").split(".")):
                raise InvalidInput(
                    f"{host!r} is neither a name nor a .suffix of names: write it as hooks.svc or .svc.cluster.local",
                    field="allowed_hosts",
                    code="invalid_host",
                )
        object.__setattr__(self, "allowed_hosts", hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Url:
    """A URL in the form that is stored and sent: normalising its text again changes nothing."""

    text: str
    #: `http` or `https`.
    scheme: str
    #: A lower-case ASCII name without a final dot, or an address, without brackets, in its canonical form.
    host: str
    #: The port to connect to, the scheme's own where the text names none.
    port: int
    #: The host is an address: there is nothing to resolve.
    is_literal: bool
    #: As the request line has it; begins with `/`.
    path_and_query: str

    @property
    def origin(self) -> str:
        """Scheme, host and port, the last only where it is not the scheme's own. Nothing of it is secret."""
        return _origin(self.scheme, self.host, self.port)


def normalise_url(text: object, policy: UrlPolicy, field: str = "url") -> Url:
    """Parse `text` strictly and return it in its stored form.

    Lower-cases scheme and host, turns the host to ASCII (IDNA 2008), drops one final
    dot and a port that is the scheme's own, writes addresses canonically (IPv4-mapped
    ones as IPv4), upper-cases escapes, and gives an empty path its `/`. Nothing else
    changes: `..` stays.

    Raises InvalidInput, never repeating the text, with one of these codes:
    `not_a_string`, `too_long`, `bad_char`, `not_absolute`, `scheme`, `no_host`,
    `userinfo`, `fragment`, `pct_in_host`, `unparsable`, `noncanonical_ipv4`,
    `bad_name`, `single_label`, `reserved_name`, `port`. An address as host is not
    judged here: pass `host` to `address.refusal`.
    """
    if not isinstance(text, str):
        _refuse("not_a_string", "The URL is not a string: write it as one.", field)
    if len(text) > MAX_URL_LENGTH:
        _refuse("too_long", f"The URL is longer than {MAX_URL_LENGTH} characters: shorten it.", field)
    if _BAD_ANYWHERE.search(text):
        _refuse("bad_char", "The URL has a space, a backslash or a control character: remove or escape it.", field)
    scheme, rest = _split_scheme(text, policy, field)
    end = _AUTHORITY_END.search(rest)
    authority, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    if "@" in authority:
        _refuse("userinfo", "The URL holds a user or password: leave it out and set an Authorization header.", field)
    if "#" in tail:
        _refuse("fragment", "The URL has a fragment (#), which is never sent: leave it out, or write %23.", field)
    host_text, port_text = _split_port(authority, field)
    host, is_literal = _normalise_host(host_text, field)
    if not is_literal:
        _check_name(host, policy, field)
    port = _check_port(port_text, scheme, policy, field)
    path_and_query = _normalise_tail(tail, field)
    normalised = _origin(scheme, host, port) + path_and_query
    if len(normalised) > MAX_URL_LENGTH:
        _refuse("too_long", f"The URL is longer than {MAX_URL_LENGTH} characters in ASCII: shorten it.", field)
    return Url(
        text=normalised,
        scheme=scheme,
        host=host,
        port=port,
        is_literal=is_literal,
        path_and_query=path_and_query,
    )


def _refuse(code: str, message: str, field: str) -> NoReturn:
    raise InvalidInput(message, field=field, code=code)


def _origin(scheme: str, host: str, port: int) -> str:
    authority = f"[{host}]" if ":" in host else host
    return f"{scheme}://{authority}" if port == DEFAULT_PORTS[scheme] else f"{scheme}://{authority}:{port}"


def _split_scheme(text: str, policy: UrlPolicy, field: str) -> tuple[str, str]:
    found = _SCHEME.match(text)
    if found is None:
        _refuse("not_absolute", "The URL has no scheme: write it in full, beginning with https://", field)
    scheme = found.group(1).lower()
    if scheme not in DEFAULT_PORTS:
        _refuse("scheme", "The URL's scheme is not one that Relay speaks: use https.", field)
    if scheme == "http" and policy.require_https:
        _refuse("scheme", "Plain http is not allowed here: use https.", field)
    rest = text[found.end() :]
    if not rest.startswith("//"):
        _refuse("not_absolute", f"Two slashes are missing after the scheme: write {scheme}://host/path", field)
    return scheme, rest[2:]


def _split_port(authority: str, field: str) -> tuple[str, str]:
    """Split into host, brackets included, and port, empty where none is given."""
    host, colon, port = authority, "", ""
    if not authority.endswith("]"):
        host, colon, port = authority.rpartition(":")
        if not colon:
            host, port = authority, ""
    if not host:
        _refuse("no_host", "The URL has no host: write it as https://host/path", field)
    return host, port


def _normalise_host(host: str, field: str) -> tuple[str, bool]:
    """Return the host in its stored form, and whether it is an address."""
    if "%" in host:
        _refuse("pct_in_host", "The host has a % in it: write the name plainly, and no zone id.", field)
    if host.startswith("["):
        return _normalise_ipv6(host, field), True
    if any(mark in host for mark in "[]:"):
        _refuse("unparsable", "The host cannot be read: bracket an IPv6 address, and write one port at most.", field)
    labels = [_normalise_label(label, field) for label in host.removesuffix(".").split(".")]
    name = ".".join(labels)
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        if _IPV4.fullmatch(name) is None:
            _refuse(
                "noncanonical_ipv4",
                "The host reads like an IPv4 address but is not spelled like one: write four decimal numbers.",
                field,
            )
        return name, True
    if len(name) > _MAX_NAME:
        _refuse("bad_name", f"The host's name is longer than {_MAX_NAME} characters.", field)
    return name, False


def _normalise_ipv6(host: str, field: str) -> str:
    text = host[1:-1]
    if host.endswith("]") and _IPV6_CHARACTERS.fullmatch(text):
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            pass
        else:
            return str(address.ipv4_mapped or address.compressed)
    _refuse("unparsable", "What stands in the brackets is not an IPv6 address: write it as [2001:db8::1].", field)


def _normalise_label(label: str, field: str) -> str:
    label = label.translate(_LOWER)
    if not label.isascii():
        try:
            # The length is bounded first: the check's cost is not linear in it.
            label = idna.alabel(label).decode() if len(label) <= _MAX_LABEL else ""
        except idna.IDNAError:
            _refuse(
                "unparsable",
                "The host's name is not valid in IDNA 2008: write it in lower case, without symbols, or as xn--….",
                field,
            )
    if _LABEL.fullmatch(label) is None:
        _refuse(
            "bad_name",
            f"The host's name is not valid: between dots stand 1 to {_MAX_LABEL} letters, digits and inner hyphens.",
            field,
        )
    return label


def _check_name(name: str, policy: UrlPolicy, field: str) -> None:
    if policy.allow_private:
        return
    if any(name.endswith(host) if host.startswith(".") else name == host for host in policy.allowed_hosts):
        return
    if any(name == reserved or name.endswith("." + reserved) for reserved in _RESERVED_NAMES):
        _refuse("reserved_name", "The host's name is reserved for private networks: use a public name.", field)
    if "." not in name:
        _refuse("single_label", "The host's name has one part only: use its full public name.", field)


def _check_port(port: str, scheme: str, policy: UrlPolicy, field: str) -> int:
    if port and not (port.isascii() and port.isdecimal()):
        _refuse("unparsable", "The URL's port is not a number: write it in digits, or leave it out.", field)
    if port.startswith("0"):
        _refuse("port", "The URL's port is 0 or begins with 0: write it plainly, or leave it out.", field)
    if len(port) > 5 or int(port or 1) > 65535:
        _refuse("unparsable", "The URL's port is above 65535: correct it, or leave it out.", field)
    number = int(port) if port else DEFAULT_PORTS[scheme]
    if policy.allowed_ports is not None and number not in policy.allowed_ports:
        allowed = ", ".join(str(allowed) for allowed in sorted(policy.allowed_ports))
        _refuse("port", f"The port {number} is not allowed here: use one of {allowed}.", field)
    return number


def _normalise_tail(tail: str, field: str) -> str:
    path, mark, query = tail.partition("?")
    if _PATH.fullmatch(path) is None or _QUERY.fullmatch(query) is None:
        _refuse(
            "bad_char",
            "The URL's path or query has a character that must be escaped, or a % without two hex digits: "
            "escape it, as %20 for a space or UTF-8 bytes for letters outside ASCII.",
            field,
        )
    tail = _ESCAPE.sub(lambda escape: escape.group().upper(), (path or "/") + mark + query)
    if _ESCAPED_DOTS.search(tail.partition("?")[0]):
        _refuse("bad_char", "The URL's path has a segment of escaped dots (%2e): write the path plainly.", field)
    return tail
