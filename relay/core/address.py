"""Which addresses a request may go to: a table of our own, judged again at each connect.

Python's `is_global` is not used: it calls dozens of addresses global that lead
inside (translated, tunnelled and mapped forms among them).
"""

from __future__ import annotations

import functools
import ipaddress
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from relay.core.errors import InvalidInput

#: Refused IPv4 networks (RFC 6890 and its registry); the rule's name is the network.
_V4_NETWORKS = (
    "0.0.0.0/8",  # this host: connects to ourselves on Linux
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # carrier-grade NAT, RFC 6598
    "127.0.0.0/8",  # loopback
    "168.63.129.16/32",  # Azure's WireServer, in a public range
    "169.254.0.0/16",  # link-local, most clouds' metadata
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # automatic multicast tunnelling
    "192.88.99.0/24",  # 6to4 relays, withdrawn
    "192.168.0.0/16",  # private
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, broadcast
)
#: All unicast addresses in public use are in this network; what is outside is refused under this name.
_V6_UNICAST = "2000::/3"
_V6_OUTSIDE = "!2000::/3"
#: Refused inside it.
_V6_NETWORKS = (
    "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4
    "2620:4f:8000::/48",  # AS112
    "3fff::/20",  # documentation, RFC 9637
)
#: An interface identifier that embeds an IPv4 address (RFC 5214), under whatever prefix.
_ISATAP = "isatap"
_ISATAP_MARKS = (0x0000_5EFE, 0x0200_5EFE)

#: Where clouds hand credentials to whoever asks from inside. No setting opens these.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "169.254.0.23",  # Tencent
        "169.254.42.42",  # Scaleway
        "169.254.169.254",  # most
        "169.254.170.2",  # AWS, tasks
        "169.254.170.23",  # AWS, pods
        "192.0.0.192",  # Oracle, classic
        "fd00:42::42",  # Scaleway
        "fd00:c1::a9fe:a9fe",  # Oracle
        "fd00:ec2::23",  # AWS, pods
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
        "fe80::a9fe:a9fe",  # OpenStack
    )
)
#: Not addresses of one host: nothing can be delivered there.
_NEVER = ("224.0.0.0/4", "255.255.255.255/32", "ff00::/8")

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
_TEREDO = ipaddress.IPv6Network("2001::/32")
_6TO4 = ipaddress.IPv6Network("2002::/16")
_MAPPED_PREFIX = 0xFFFF
_LOW_32 = 0xFFFF_FFFF

#: An address as (version, number): both kinds in one order.
_Point = tuple[int, int]
#: First and last address of a network.
Range = tuple[_Point, _Point]
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressPolicy:
    """What is allowed beyond, and denied within, public unicast addresses.

    CIDRs are given as text; InvalidInput names one that is none, or that has host
    bits set. The IPv4-mapped form of a network counts as the IPv4 network.
    """

    #: Let every address of a single host through but the clouds' metadata addresses.
    allow_private: bool = False
    #: Let these through as well. Opens no metadata address.
    allowed_cidrs: tuple[str, ...] = ()
    #: Refuse these, whatever else is said.
    denied_cidrs: tuple[str, ...] = ()
    #: The same, parsed.
    allowed_ranges: tuple[Range, ...] = field(init=False, repr=False, compare=False)
    denied_ranges: tuple[Range, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_ranges", tuple(_parse_cidr(c, "allowed_cidrs") for c in self.allowed_cidrs))
        object.__setattr__(self, "denied_ranges", tuple(_parse_cidr(c, "denied_cidrs") for c in self.denied_cidrs))


def refusal(address: str | bytes, policy: AddressPolicy) -> str | None:
    """Name the rule that refuses the address, or return None: it may be connected to.

    `address` is text as a resolver gives it, or 4 or 16 packed bytes. Rules are the
    refused network, `!2000::/3`, `isatap`, `metadata` (allowed by the policy, but
    never open), `denied`, or `unparsable`: what is not an address, one with a zone
    id included, is refused. IPv4-mapped addresses are judged as IPv4.
    """
    facts = _look_up(address)
    if facts is None:
        return "unparsable"
    if facts.rule is not None:
        if not (policy.allow_private or _within(facts.points[0], policy.allowed_ranges)):
            return facts.rule
        if facts.closed is not None:
            return facts.closed
    if policy.denied_ranges and any(_within(point, policy.denied_ranges) for point in facts.points):
        return "denied"
    return None


class _Facts(NamedTuple):
    #: The address, and after it the IPv4 addresses that it may be translated or tunnelled to.
    points: tuple[_Point, ...]
    #: The rule that refuses it where the policy says nothing.
    rule: str | None
    #: The rule that refuses it whatever the policy allows.
    closed: str | None


# Addresses repeat from one delivery to the next. The result depends on nothing but the argument.
@functools.lru_cache(maxsize=4096)
def _look_up(address: str | bytes) -> _Facts | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.scope_id is not None:
        return None
    point = _unmap((parsed.version, int(parsed)))
    points = (point, *((4, number) for number in _embedded(point)))
    rule = _find_rule(point)
    closed = None
    if _within(point, _NEVER_RANGES):
        closed = rule
    elif any(each in _METADATA_POINTS for each in points):
        closed = "metadata"
    return _Facts(points, rule, closed)


def _find_rule(point: _Point) -> str | None:
    index = bisect_right(_STARTS, point) - 1
    if index >= 0 and point <= _TABLE[index][1]:
        return _TABLE[index][2]
    version, number = point
    if version == 6:
        if not _V6_FIRST <= point <= _V6_LAST:
            return _V6_OUTSIDE
        if number >> 32 & _LOW_32 in _ISATAP_MARKS:
            return _ISATAP
    return None


def _unmap(point: _Point) -> _Point:
    version, number = point
    return (4, number & _LOW_32) if version == 6 and number >> 32 == _MAPPED_PREFIX else point


def _within(point: _Point, ranges: tuple[Range, ...]) -> bool:
    return any(first <= point <= last for first, last in ranges)


def _embedded(point: _Point) -> list[int]:
    """List the IPv4 addresses that an IPv6 address may be translated or tunnelled to."""
    version, number = point
    if version == 4:
        return []
    address = ipaddress.IPv6Address(number)
    low = number & _LOW_32
    if address in _TEREDO:
        return [number >> 64 & _LOW_32, low ^ _LOW_32]
    if address in _6TO4:
        return [number >> 80 & _LOW_32]
    if address in _NAT64_LOCAL:
        # RFC 6052 section 2.2: the prefix's length is the operator's, and bits 64 to 71 are skipped.
        packed = number >> 64 << 56 | number & (1 << 56) - 1
        return [low, *(packed >> shift & _LOW_32 for shift in (40, 32, 24))]
    compatible_or_translated = number >> 32 in (0, _MAPPED_PREFIX << 16)
    if address in _NAT64 or compatible_or_translated or number >> 32 & _LOW_32 in _ISATAP_MARKS:
        return [low]
    return []


def _range(network: _Network) -> Range:
    first = _unmap((network.version, int(network.network_address)))
    last = _unmap((network.version, int(network.broadcast_address)))
    # A network wider than the mapped block is an IPv6 network, even if one of its ends is mapped.
    if first[0] != last[0]:
        return (6, int(network.network_address)), (6, int(network.broadcast_address))
    return first, last


def _parse_cidr(text: str, name: str) -> Range:
    try:
        return _range(ipaddress.ip_network(text))
    except ValueError:
        raise InvalidInput(
            f"{text!r} is not a network: write it as 10.1.0.0/16 or fd12::/16, with no bits set beyond the prefix.",
            field=name,
            code="invalid_cidr",
        ) from None


_TABLE = sorted((*_range(ipaddress.ip_network(text)), text) for text in (*_V4_NETWORKS, *_V6_NETWORKS))
_STARTS = [first for first, _, _ in _TABLE]
_V6_FIRST, _V6_LAST = _range(ipaddress.ip_network(_V6_UNICAST))
_METADATA_POINTS = frozenset((address.version, int(address)) for address in _METADATA)
_NEVER_RANGES = tuple(_range(ipaddress.ip_network(text)) for text in _NEVER)
