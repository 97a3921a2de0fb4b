"""URLs: every known trick, the stored form, and agreement with another parser on whatever passes."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import NamedTuple

import pytest
import urllib3
from hypothesis import example, given
from hypothesis import strategies as st

from relay.core.address import AddressPolicy, refusal
from relay.core.errors import InvalidInput
from relay.core.url import MAX_URL_LENGTH, UrlPolicy, normalise_url

STRICT = UrlPolicy()
OPEN = UrlPolicy(require_https=False, allowed_ports=None, allow_private=True)
ADDRESSES = AddressPolicy()


class _Row(NamedTuple):
    url: str
    answers: list[str]
    verdict: str
    rule: str


def _rows() -> list[_Row]:
    path = pathlib.Path(__file__).parents[1] / "vectors" / "ssrf.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return [
            _Row(
                json.loads(f'"{row["url_json_escaped"]}"'),
                [answer for answer in row["dns_answers"].split(",") if answer],
                row["verdict"],
                row["rule"],
            )
            for row in csv.DictReader(file)
        ]


def _rule(text: str, policy: UrlPolicy = STRICT) -> str:
    with pytest.raises(InvalidInput) as refused:
        normalise_url(text, policy, "endpoint.url")
    assert refused.value.field == "endpoint.url"
    return refused.value.code


def _judge(row: _Row) -> list[str | None]:
    """List what refuses the URL, or each of the addresses that it leads to."""
    try:
        url = normalise_url(row.url, STRICT)
    except InvalidInput as error:
        return [error.code]
    return [refusal(answer, ADDRESSES) for answer in ([url.host] if url.is_literal else row.answers)]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: ascii(row.url))
def test_known_cases(row: _Row) -> None:
    """Each case is refused by its rule or allowed; of mixed answers only the good ones remain (B-81, B-82)."""
    rules = _judge(row)
    if row.verdict == "allow":
        assert set(rules) <= {None}
    elif row.verdict == "refuse":
        assert set(rules) == {row.rule}
    else:
        assert row.verdict == "never-the-private-one"
        assert set(rules) == {None, row.rule}


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("HTTPS://EXAMPLE.com.:443", "https://example.com/"),
        ("https://example.com:/x", "https://example.com/x"),
        ("https://example.com?a=b", "https://example.com/?a=b"),
        ("https://example.com/%2f%c3%a9?q=%3d", "https://example.com/%2F%C3%A9?q=%3D"),
        ("https://example.com/a/../b/./c//d", "https://example.com/a/../b/./c//d"),
        ("https://example.com/a%2eb/..%2E.", "https://example.com/a%2Eb/..%2E."),
        ("https://example.com/@user:x;a,b", "https://example.com/@user:x;a,b"),
        ("https://BüCHER.Example.com/", "https://xn--bcher-kva.example.com/"),
        ("https://xn--i-7iq.ws/", "https://xn--i-7iq.ws/"),
        ("https://my_app.example.com/", "https://my_app.example.com/"),
        ("https://[2001:4860:4860:0:0:0:0:8888]/", "https://[2001:4860:4860::8888]/"),
        ("https://[::FFFF:8.8.8.8]/", "https://8.8.8.8/"),
        ("https://8.8.8.8./", "https://8.8.8.8/"),
    ],
)
def test_the_stored_form(text: str, stored: str) -> None:
    """Case, final dot, default port, escapes and addresses take one form; the rest of the path stays."""
    assert normalise_url(text, STRICT).text == stored


def test_the_parts() -> None:
    """A URL's parts are those of its stored form."""
    url = normalise_url("http://[FD00::1]:8080/a?token=x", OPEN)
    assert (url.scheme, url.host, url.port, url.is_literal) == ("http", "fd00::1", 8080, True)
    assert url.path_and_query == "/a?token=x"
    assert url.origin == "http://[fd00::1]:8080"
    assert normalise_url("http://localhost", OPEN).port == 80


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "not_absolute"),
        ("example.com/x", "not_absolute"),
        ("https:/example.com", "not_absolute"),
        ("https://", "no_host"),
        ("https://:443/", "no_host"),
        ("https://?x", "no_host"),
        ("javascript:alert(1)", "scheme"),
        ("localhost:8080/x", "scheme"),
        (" https://example.com/", "bad_char"),
        ("https://example.com/\n", "bad_char"),
        ("https://example.com/a b", "bad_char"),
        ("https://example.com/é", "bad_char"),
        ("https://example.com/a|b", "bad_char"),
        ("https://example.com/?a[]=1", "bad_char"),
        ("https://example.com/%", "bad_char"),
        ("https://example.com/%2", "bad_char"),
        ("https://example.com/%zz", "bad_char"),
        ("https://example.com/?%u0041", "bad_char"),
        ("https://example.com/%2e%2e/x", "bad_char"),
        ("https://example.com/a/.%2E", "bad_char"),
        ("https://example.com/%2e?x", "bad_char"),
        ("https://example.com/x#", "fragment"),
        ("https://example.com/x?y#z", "fragment"),
        ("https://@example.com/", "userinfo"),
        ("https://a:b@c@example.com/", "userinfo"),
        ("https://ex%61mple.com/", "pct_in_host"),
        ("https://[fe80::1%25eth0]/", "pct_in_host"),
        ("https://[::1/", "unparsable"),
        ("https://::1/", "unparsable"),
        ("https://1:2:3/", "unparsable"),
        ("https://[]/", "unparsable"),
        ("https://[::1]x/", "unparsable"),
        ("https://[::1]:443:443/", "unparsable"),
        ("https://[127.0.0.1]/", "unparsable"),
        ("https://[::ffff:127.0.0.01]/", "unparsable"),
        ("https://example。com/", "unparsable"),
        ("https://１２７.0.0.1/", "unparsable"),
        ("https://BÜCHER.example.com/", "unparsable"),
        ("https://ex\u200bample.com/", "unparsable"),
        ("https://cafe\u0301.com/", "unparsable"),
        ("https://\ud800.com/", "unparsable"),
        ("https://example.com:4４3/", "unparsable"),
        ("https://example.com:443x/", "unparsable"),
        ("https://example.com:-1/", "unparsable"),
        ("https://example.com:+443/", "unparsable"),
        ("https://example.com:" + "9" * 1900 + "/", "unparsable"),
        ("https://example.com:080/", "port"),
        ("https://example.com:0443/", "port"),
        ("https://example.com:8443/", "port"),
        ("https://-h.example.com/", "bad_name"),
        ("https://h-.example.com/", "bad_name"),
        ("https://h..example.com/", "bad_name"),
        ("https://example.com../", "bad_name"),
        ("https://./", "bad_name"),
        ("https://.example.com/", "bad_name"),
        ("https://h$x.example.com/", "bad_name"),
        ("https://" + "a." * 130 + "com/", "bad_name"),
        ("https://" + "ü" * 60 + ".com/", "unparsable"),
        ("https://a.0x/", "noncanonical_ipv4"),
        ("https://a.1/", "noncanonical_ipv4"),
        ("https://1.2.3.4.5./", "noncanonical_ipv4"),
        ("https://LOCALHOST/", "reserved_name"),
        ("https://printer.home.arpa/", "reserved_name"),
        ("https://internal/", "reserved_name"),
        ("https://example.com/" + "a" * MAX_URL_LENGTH, "too_long"),
        ("https://" + ".".join(["ü" * 20] * 8) + ".com/" + "a" * 1850, "too_long"),
    ],
    ids=lambda value: ascii(value[:40]),
)
def test_refused_forms(text: str, rule: str) -> None:
    """Whatever parsers could read differently, or policy forbids, is refused by its rule (C-17, C-21, C-22)."""
    assert _rule(text) == rule


@pytest.mark.parametrize("value", [None, 5, b"https://example.com/", ["https://example.com/"]])
def test_only_strings_are_urls(value: object) -> None:
    """What is not a string is refused as such."""
    with pytest.raises(InvalidInput) as refused:
        normalise_url(value, STRICT)
    assert refused.value.code == "not_a_string"


def test_no_error_repeats_the_password() -> None:
    """A URL with credentials is refused without showing them (C-19)."""
    with pytest.raises(InvalidInput) as refused:
        normalise_url("https://svc:hunter2@example.com/x", STRICT)
    assert "hunter2" not in str(refused.value)
    assert "svc" not in str(refused.value)


def test_scheme_and_port_policies() -> None:
    """Plain http needs its switch, a port the list, and the one that is judged is the one that is dialled."""
    both = UrlPolicy(require_https=False, allowed_ports=frozenset({80, 443}))
    assert normalise_url("http://example.com/", both).port == 80
    assert normalise_url("https://example.com:80/", both).text == "https://example.com:80/"
    assert _rule("http://example.com:8080/", both) == "port"
    assert normalise_url("http://example.com:65535/", OPEN).port == 65535
    assert _rule("http://example.com:65536/", OPEN) == "unparsable"
    assert _rule("http://example.com:0/", OPEN) == "port"
    assert _rule("http://example.com/", UrlPolicy(require_https=False)) == "port"


def test_names_under_policies() -> None:
    """Names are free under allow_private; listed names and suffixes are, and nothing beside them."""
    for name in ("localhost", "redis", "a.localhost", "metadata.google.internal", "orders.default.svc.cluster.local"):
        assert normalise_url(f"http://{name}/", OPEN).host == name
    listed = UrlPolicy(allowed_hosts=("Redis.", ".svc.cluster.local"))
    assert normalise_url("https://REDIS/", listed).host == "redis"
    assert normalise_url("https://orders.default.svc.cluster.local/", listed).text.endswith(".local/")
    assert _rule("https://svc.cluster.local/", listed) == "reserved_name"
    assert _rule("https://evilsvc.cluster.local/", listed) == "reserved_name"
    assert _rule("https://a.redis.local/", listed) == "reserved_name"
    assert _rule("https://redis2/", listed) == "single_label"
    assert _rule("https://127.1/", OPEN) == "noncanonical_ipv4"


@pytest.mark.parametrize("host", ["", ".", "*.example.com", "https://x", "a..b", "x y"])
def test_bad_allowed_hosts_are_refused(host: str) -> None:
    """What is neither a name nor a suffix is refused when the policy is made."""
    with pytest.raises(InvalidInput) as refused:
        UrlPolicy(allowed_hosts=(host,))
    assert refused.value.field == "allowed_hosts"


PIECES = st.sampled_from(
    [
        *("http", "https", "ftp", ":", "//", "/", "\\", "@", "#", "?", "[", "]", "%", "%2e", "%2E", "..", ".", "%00"),
        *(
            "example.com",
            "localhost",
            "127.0.0.1",
            "127.1",
            "0x7f",
            "::1",
            "::ffff:1.2.3.4",
            "fe80::1",
            "443",
            "0",
            "080",
        ),
        *(
            "a",
            "-",
            "_",
            "A",
            "é",
            "ß",
            "xn--fa-hia",
            "。",
            "１",
            "ⓛ",
            " ",
            "\t",
            "\n",
            "\0",
            "&",
            "=",
            "+",
            ";",
            "|",
            "~",
        ),
    ]
)
TRICKS = st.lists(PIECES, max_size=10).map("".join)


@given(TRICKS | TRICKS.map("https://".__add__) | TRICKS.map("http://example.com".__add__) | st.text())
@example("https://h/?")
@example("http://h.test:8080//x/..//?/?")
def test_whatever_passes_is_read_alike(text: str) -> None:
    """What passes is stored in a form that stays as it is, and another parser finds the same parts in it."""
    try:
        url = normalise_url(text, OPEN)
    except InvalidInput:
        return
    assert normalise_url(url.text, OPEN) == url
    assert url.text.isascii()
    other = urllib3.util.parse_url(url.text)
    assert (other.scheme, other.auth, other.fragment) == (url.scheme, None, None)
    assert other.host is not None
    assert other.host.strip("[]") == url.host
    assert (other.port or {"http": 80, "https": 443}[url.scheme]) == url.port
    path, _, query = url.path_and_query.partition("?")
    assert (other.query or "") == query
    if not {".", ".."} & set(path.split("/")):
        assert other.path == path


@given(st.from_regex(r"https?://[a-z0-9.:_\-\[\]]{1,24}(/[a-z%0-9.?&=]*)?", fullmatch=True))
def test_hosts_are_read_alike(text: str) -> None:
    """The same for hosts and ports near the grammar's edge."""
    test_whatever_passes_is_read_alike.hypothesis.inner_test(text)  # type: ignore[attr-defined]  # hypothesis adds it
