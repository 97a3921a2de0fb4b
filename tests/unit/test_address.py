"""The address table: its edges, what policies open and close, and what nothing opens."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.core.address import AddressPolicy, refusal
from relay.core.errors import InvalidInput

STRICT = AddressPolicy()
PRIVATE = AddressPolicy(allow_private=True)
ANY_ADDRESS = st.ip_addresses(v=4) | st.ip_addresses(v=6)
METADATA = [
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.42.42", "169.254.0.23"),
    *("168.63.129.16", "100.100.100.200", "192.0.0.192"),
    *("fd00:ec2::254", "fd00:ec2::23", "fd00:c1::a9fe:a9fe", "fe80::a9fe:a9fe", "fd00:42::42", "fd20:ce::254"),
]
TRANSLATED = [
    "::ffff:169.254.169.254",  # mapped
    "::169.254.169.254",  # compatible
    "::ffff:0:169.254.169.254",  # SIIT
    "64:ff9b::a9fe:a9fe",  # NAT64
    "64:ff9b:1::a9fe:a9fe",  # local NAT64 with a prefix of 96 bits
    "64:ff9b:1:a9fe:a9:fe00::",  # of 48
    "64:ff9b:1:0a9:fe:a9fe::",  # of 56
    "64:ff9b:1:7:a9:fea9:fe00:0",  # of 64
    "2002:a9fe:a9fe::1",  # 6to4
    "2001:0:a9fe:a9fe::1",  # Teredo, its server
    "2001:0:1::5601:5601",  # Teredo, its client
    "fe80::5efe:a9fe:a9fe",  # ISATAP
    "fd00::200:5efe:a9fe:a9fe",
]


@pytest.mark.parametrize("address", [*METADATA, *TRANSLATED])
def test_metadata_stays_refused_whatever_is_allowed(address: str) -> None:
    """No switch and no CIDR opens a cloud's metadata address, in any form that leads to it (B-83)."""
    everything = AddressPolicy(allowed_cidrs=("0.0.0.0/0", "::/0"))
    assert refusal(address, STRICT) not in (None, "unparsable")
    assert refusal(address, PRIVATE) == "metadata"
    assert refusal(address, everything) == "metadata"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "0.0.0.0", "169.254.1.1", "::1", "fd12::1", "fe80::1", "64:ff9b::a00:1", "198.18.0.1"],
)
def test_the_development_switch_opens_single_hosts(address: str) -> None:
    """Private, loopback and link-local addresses are refused, and pass under allow_private."""
    assert refusal(address, STRICT) is not None
    assert refusal(address, PRIVATE) is None


@pytest.mark.parametrize("address", ["224.0.0.1", "239.255.255.255", "255.255.255.255", "ff02::1", "ff0e::1"])
def test_multicast_and_broadcast_are_never_open(address: str) -> None:
    """What is not one host's address is refused even where all is allowed, under the table's rule."""
    assert refusal(address, PRIVATE) == refusal(address, STRICT) is not None


def test_cidrs_refine_the_policy() -> None:
    """Allowed networks open what the table refuses and no more; denied ones close, whatever is allowed."""
    policy = AddressPolicy(allowed_cidrs=("10.96.0.0/12", "fd12::/16"), denied_cidrs=("10.100.0.0/16", "8.8.8.8/32"))
    assert refusal("10.96.0.1", policy) is None
    assert refusal("::ffff:10.96.0.1", policy) is None
    assert refusal("fd12::1", policy) is None
    assert refusal("10.95.255.255", policy) == "10.0.0.0/8"
    assert refusal("10.100.0.1", policy) == "denied"
    assert refusal("8.8.8.8", policy) == "denied"
    assert refusal("::ffff:8.8.8.8", policy) == "denied"
    assert refusal("8.8.4.4", policy) is None


def test_denied_reaches_translated_forms() -> None:
    """With private addresses open, a denied IPv4 network is denied behind NAT64 and 6to4 too."""
    policy = AddressPolicy(allow_private=True, denied_cidrs=("10.0.0.0/8",))
    assert refusal("64:ff9b::10.0.0.1", policy) == "denied"
    assert refusal("2002:a00:1::", policy) == "denied"
    assert refusal("64:ff9b::11.0.0.1", policy) is None


def test_mapped_networks_are_ipv4_networks() -> None:
    """A CIDR in mapped form counts for the IPv4 addresses in it; a wider one stays IPv6."""
    assert refusal("10.0.0.1", AddressPolicy(allowed_cidrs=("::ffff:10.0.0.0/104",))) is None
    assert refusal("10.0.0.1", AddressPolicy(allowed_cidrs=("::/0",))) == "10.0.0.0/8"
    assert refusal("::1", AddressPolicy(allowed_cidrs=("::/0",))) is None


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "10/8", "fd00::/129", "example.com", "10.0.0.0-10.1.0.0"])
def test_bad_cidrs_are_refused(text: str) -> None:
    """What is not a network is refused when the policy is made, naming the setting."""
    with pytest.raises(InvalidInput) as refused:
        AddressPolicy(denied_cidrs=("10.0.0.0/8", text))
    assert refused.value.field == "denied_cidrs"


@pytest.mark.parametrize(
    "address",
    ["", "example.com", "127.1", "0177.0.0.1", "1.2.3", "1.2.3.4.", "[::1]", "fe80::1%eth0", "1.2.3.4/32", b"", b"abc"],
)
def test_what_is_no_address_is_refused(address: str | bytes) -> None:
    """Anything that cannot be read fails closed, the development switch or not."""
    assert refusal(address, STRICT) == refusal(address, PRIVATE) == "unparsable"


@given(ANY_ADDRESS)
def test_packed_and_text_agree(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """The rule is the same for the text and for the packed bytes."""
    for policy in (STRICT, PRIVATE):
        assert refusal(str(address), policy) == refusal(address.packed, policy)


@given(st.ip_addresses(v=4))
def test_mapped_addresses_are_judged_as_ipv4(address: ipaddress.IPv4Address) -> None:
    """The mapped form of an IPv4 address has that address's rule."""
    assert refusal(f"::ffff:{address}", STRICT) == refusal(str(address), STRICT)


@given(ANY_ADDRESS)
def test_rules_that_are_networks_hold_the_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """A rule named after a network is one that the address is in."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    judged = mapped or address
    rule = refusal(str(address), STRICT)
    if rule == "!2000::/3":
        assert judged not in ipaddress.ip_network("2000::/3")
    elif rule == "isatap":
        assert judged.packed[8:12] in (b"\0\0\x5e\xfe", b"\2\0\x5e\xfe")
    elif rule is not None:
        assert judged in ipaddress.ip_network(rule)


@given(ANY_ADDRESS)
@example(ipaddress.ip_address("::ffff:1.0.0.0"))
def test_no_private_address_passes(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Whatever Python's own properties call private, reserved or multicast is refused by the table as well."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    judged = mapped or address
    if refusal(str(address), STRICT) is None:
        flags = (judged.is_private, judged.is_multicast, judged.is_reserved, judged.is_link_local, judged.is_loopback)
        assert not any(flags)


@pytest.mark.parametrize(
    "network",
    [
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
        *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4"),
        *("240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    ],
)
def test_the_edges_of_each_network(network: str) -> None:
    """The first and last address of each network are refused by it, their neighbours outside are not."""
    parsed = ipaddress.ip_network(network)
    first, last = parsed.network_address, parsed.broadcast_address
    assert refusal(str(first), STRICT) == refusal(str(last), STRICT) == network
    for neighbour in (int(first) - 1, int(last) + 1):
        if 0 <= neighbour < 1 << first.max_prefixlen:
            assert refusal(neighbour.to_bytes(first.max_prefixlen // 8, "big"), STRICT) != network
