"""Chat transports: every one keeps to the same rules, and each speaks its platform's language."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.observation import Observation
from relay.core.secret import Secret
from relay.core.transports import TOKEN, TRANSPORTS, Built, redact, redacted
from relay.core.transports.text import utf16_units
from relay.core.url import UrlPolicy, normalise_url

if TYPE_CHECKING:
    from relay.core.transports import Transport

#: Per transport: an address, a token, the platform's base URL, and its limit in UTF-16 code units.
SAMPLES = {
    "telegram": ("telegram://-1001234567890", "123456789:AAF-markerMARKERmarkerMARKER_marker12", 4096),
    "discord": ("discord://223704706495545344", "markerMARKER-markerMARKER_markerMARKER0123456789", 2000),
    "slack": ("slack://T000/B000", "T0AAAAAAA/B0BBBBBBB/markerMARKERmarkerMARKER", 40_000),
}
BASES = {
    "telegram": "https://api.telegram.org",
    "discord": "https://discord.com",
    "slack": "https://hooks.slack.com",
}
NOW = 1_700_000_000.0

EVERY = pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=list(TRANSPORTS))

#: Text that is likely to break something: markup, joined and doubled characters, controls.
HOSTILE = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("`*_~|<>&@#[](){}\\:/\"'\n\r\t\0\u200d\u0301\ufe0f\u202e\U0001f468\U0001f3fd\U0001f1e9"),
    )
)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), HOSTILE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HOSTILE, inner, max_size=4),
    max_leaves=12,
)


def build(
    transport: Transport, payload: bytes, content_type: str = "application/json", event_type: str = "order.paid"
) -> Built:
    address, token, _ = SAMPLES[transport.name]
    return transport.build(
        event_type=event_type,
        payload=payload,
        content_type=content_type,
        address=address,
        secret=transport.check_secret(token),
        base_url=BASES[transport.name],
    )


def text_of(built: Built) -> str:
    """The message's text as it goes out."""
    body: dict[str, Any] = json.loads(built.body)
    return str(body.get("content", body.get("text")))


def read(transport: Transport, built: Built) -> str:
    """The message as a person reads it: fences and escapes taken away."""
    text = text_of(built)
    if transport.name == "slack":
        return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    if transport.name == "discord":
        title, _, rest = text.partition("\n```\n")
        body = rest.removesuffix("\n```").replace("`\u200b", "`")
        return title.replace("\\_", "_") + ("\n" + body if body else "")
    return text


def test_every_transport_has_a_sample() -> None:
    """A transport that is added is put to the tests below."""
    assert set(SAMPLES) == set(TRANSPORTS)
    assert all(name == transport.name for name, transport in TRANSPORTS.items())


@EVERY
def test_the_request(transport: Transport) -> None:
    """The URL is one that the policy passes unchanged, the body JSON, and the token stands in the URL alone (B-101)."""
    address, token, _ = SAMPLES[transport.name]
    built = build(transport, b'{"a":1}')
    assert normalise_url(built.url, UrlPolicy()).text == built.url
    assert token in built.url
    assert built.display_url == built.url.replace(token, TOKEN)
    assert built.content_type == "application/json"
    assert isinstance(json.loads(built.body), dict)
    assert token not in repr(built)
    assert token.encode() not in built.body
    assert transport.check_address(address) == address
    assert address.startswith(f"{transport.name}://")


@EVERY
def test_what_a_person_reads(transport: Transport) -> None:
    """B-102: the event's type first, then the payload, indented, its letters as letters and its numbers as spelled."""
    payload = (
        rb'{ "n":1.00,"big":123456789012345678901234567890, "e":1e400,'
        rb'"t":"d\u00f6ner \ud83e\udd59 a\"b\n","z":[],"o":{"k":[1,null]}}'
    )
    assert read(transport, build(transport, payload)) == (
        'order.paid\n{\n  "n": 1.00,\n  "big": 123456789012345678901234567890,\n  "e": 1e400,\n'
        '  "t": "döner 🥙 a\\"b\\n",\n  "z": [],\n  "o": {\n    "k": [\n      1,\n      null\n    ]\n  }\n}'
    )


MARKUP = "_ * [ ] ( ) ~ > # + - = | { } . ! ` ``` <b>bold</b> &amp; </pre> **x* @everyone <!channel> <@U1> || \\"


@EVERY
def test_markup_arrives_as_text(transport: Transport) -> None:
    """C-69: punctuation and tags, unbalanced, are read as they were written, in JSON and outside of it."""
    as_json = json.dumps({"text": MARKUP}).encode()
    assert json.loads(read(transport, build(transport, as_json)).partition("\n")[2]) == {"text": MARKUP}
    plain = read(transport, build(transport, MARKUP.encode(), "text/plain; charset=utf-8"))
    assert plain == f"order.paid\n{MARKUP}"


@EVERY
@pytest.mark.parametrize(
    ("payload", "content_type", "read_as"),
    [
        (b"", "text/plain", "order.paid"),
        (b" \n", "application/json", "order.paid"),
        (b"a=1&b=2", "application/x-www-form-urlencoded", "order.paid\na=1&b=2"),
        (b"\xff\xfe\x00\x01", "image/png", "order.paid\n(4 bytes of image/png, not text)"),
        (b"a\0b", "text/plain", "order.paid\n(3 bytes of text/plain, not text)"),
        (b'"\xff"', "application/json", "order.paid\n(3 bytes of application/json, not text)"),
        (b'"a"', "application/problem+json; x=y", 'order.paid\n"a"'),
        (b'"\\ud800 \\u0000 \\n"', "application/json", 'order.paid\n"\\ud800 \\u0000 \\n"'),
        (b"[[[[[[[[1,2],3]]]]]]]", "application/json", None),
        ("a\u202eb\x1b[31m\r\nc".encode(), "text/plain", "order.paid\na\ufffdb\ufffd[31m\nc"),
        (b'}}]],:{"', "application/json", None),
    ],
)
def test_payloads_of_every_kind(transport: Transport, payload: bytes, content_type: str, read_as: str | None) -> None:
    """Empty, form, binary, broken and deep payloads all make a message; controls and turned directions are marked."""
    message = read(transport, build(transport, payload, content_type))
    assert message.startswith("order.paid")
    if read_as is not None:
        assert message == read_as


CHARACTERS = [
    *("a", "é", "&", "`", "🥙"),
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "👍🏽",
    "🇩🇪",
    "1\ufe0f\u20e3",
    "\u1112\u1161\u11ab",
]


@EVERY
@pytest.mark.parametrize("unit", CHARACTERS)
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_cut_between_characters(transport: Transport, unit: str, shift: int) -> None:
    """B-102: a message is at most the platform's limit, nearly fills it, and is cut between whole characters."""
    limit = SAMPLES[transport.name][2]
    payload = ("x" * shift + unit * (limit // len(unit) + 100)).encode()
    built = build(transport, payload, "text/plain")
    assert limit - 20 <= utf16_units(text_of(built)) <= limit
    message = read(transport, built)
    matched = re.fullmatch(
        rf"order\.paid\nx{{{shift}}}((?:{re.escape(unit)})+)\n… \(cut: the payload has {len(payload)} bytes\)", message
    )
    assert matched is not None


@EVERY
def test_a_message_that_just_fits_is_whole(transport: Transport) -> None:
    """What fits to the last unit is not cut; one unit more is."""
    limit = SAMPLES[transport.name][2]
    spare = limit - utf16_units(text_of(build(transport, b"x", "text/plain"))) + 1
    assert utf16_units(text_of(build(transport, b"x" * spare, "text/plain"))) == limit
    assert "cut" not in text_of(build(transport, b"x" * spare, "text/plain"))
    assert "cut" in text_of(build(transport, b"x" * (spare + 1), "text/plain"))


@EVERY
@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 200_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'"' + b"\\" * 300_001,
        b"1" * 300_000,
        b" " * 300_000 + b"1",
        b'["' + "e\u0301".encode() * 100_000 + b'"]',
        b'["a' + "\u0301".encode() * 100_000 + b'"]',
        b'["' + "\U0001f1e9".encode() * 50_000 + b'"]',
        b'["' + b"\\ud83d\\ude00" * 20_000 + b'"]',
    ],
    ids=range(9),
)
def test_hostile_sizes(transport: Transport, payload: bytes) -> None:
    """Endless nesting, strings, numbers and piles of marks are cut like anything else, and soon."""
    text = text_of(build(transport, payload))
    assert text.startswith("order.paid\n")
    assert utf16_units(text) <= SAMPLES[transport.name][2]


@EVERY
@given(payload=st.one_of(st.binary(), HOSTILE.map(str.encode), HOSTILE.map(lambda text: json.dumps([text]).encode())))
@example(payload=b'"\\')
@example(payload=b'"\\ud800\\u1"')
def test_nothing_makes_it_fail(transport: Transport, payload: bytes) -> None:
    """Whatever the payload, the message is UTF-8, within the limit and begins with the type."""
    for content_type in ("application/json", "text/plain", "", "\r\nX: y"):
        built = build(transport, payload, content_type, event_type="a_b.C-1")
        text = text_of(built)
        assert text.replace("\\_", "_").startswith("a_b.C-1")
        assert utf16_units(text) <= SAMPLES[transport.name][2]
        text.encode()


@EVERY
@given(value=VALUES)
def test_json_stays_the_same_value(transport: Transport, value: object) -> None:
    """A payload that fits is still the JSON that it was, but for the characters that are not shown."""
    message = read(transport, build(transport, json.dumps({"v": value}).encode()))
    if "(cut:" in message:
        return
    unshown = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
    expected = unshown.sub("\ufffd", json.dumps({"v": value}, ensure_ascii=False))
    assert json.loads(message.partition("\n")[2]) == json.loads(expected)


BAD_ADDRESSES = [
    "",
    "telegram://",
    "discord://",
    "slack://",
    "https://hooks.slack.com/services/T0/B0/marker",
    "telegram:123",
    "TELEGRAM://1",
    "telegram://01",
    "telegram://-0",
    "telegram://+1",
    "telegram://1/2",
    "telegram://1?x",
    "telegram://@a",
    "telegram://@evil/../x",
    "telegram://4503599627370496",
    "telegram://1\n",
    "telegram://١",
    "discord://0",
    "discord://-1",
    "discord://18446744073709551616",
    "discord://1/marker",
    "discord://1\n",
    "discord://a",
    "slack://a b",
    "slack://a/b/c",
    "slack://../x",
    "slack://a/",
    "slack://é",
    "slack://a\n",
    "slack://" + "a" * 65,
    None,
    7,
]


@EVERY
@pytest.mark.parametrize("text", BAD_ADDRESSES, ids=ascii)
def test_bad_addresses(transport: Transport, text: object) -> None:
    """Anything but the one spelling is refused with the remedy, and not repeated: it may be a URL with a token."""
    with pytest.raises(InvalidInput) as refused:
        transport.check_address(text)
    assert (refused.value.field, refused.value.code) == ("url", "invalid_address")
    assert f"{transport.name}://" in str(refused.value)
    assert "marker" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "telegram://1",
        "telegram://-1001234567890",
        "telegram://@relay_alerts",
        "discord://1",
        "slack://a",
        "slack://T0/B0",
    ],
)
def test_good_addresses(address: str) -> None:
    """Users, groups and channels; a webhook's id; a label."""
    transport = TRANSPORTS[address.partition(":")[0]]
    assert transport.check_address(address) == address


@EVERY
@pytest.mark.parametrize(
    "spoil",
    ["{}x y", "{}\n", " {}", "https://example.com/{}", "{}/../x", "{}?a=b", "{}é", "whsec_{}==", "", "a", "{}" * 9],
)
def test_bad_secrets(transport: Transport, spoil: str) -> None:
    """A token in a URL, with white space or of another form is refused, and not repeated."""
    token = SAMPLES[transport.name][1]
    for text in (spoil.format(*[token] * 9), None, 7):
        with pytest.raises(InvalidInput) as refused:
            transport.check_secret(text)
        assert (refused.value.field, refused.value.code) == ("secret", "invalid_secret")
        assert "marker" not in str(refused.value)


@EVERY
def test_waits_that_are_asked_for(transport: Transport) -> None:
    """The header Retry-After counts on every platform, and nonsense in it or in the body asks for nothing."""

    def asked(snippet: bytes = b"", header: str | None = None) -> float | None:
        headers = [] if header is None else [("retry-after", header)]
        return transport.retry_after(headers=headers, snippet=snippet, now=NOW)

    assert asked() is None
    assert asked(header="30") == 30
    assert asked(header="Tue, 14 Nov 2023 22:14:20 GMT") == 60
    assert asked(header="soon") is None
    for nonsense in ("null", "true", '"9"', "-1", "NaN", "1e999", "[1]", "{}"):
        for body in ('{"retry_after":%s}', '{"parameters":{"retry_after":%s}}', '{"parameters":%s}', "%s"):
            assert asked((body % nonsense).encode()) is None
            assert asked((body % nonsense).encode(), header="30") == 30
    for broken in (b"<html>", b"\xff", b"[" * 2000, b'{"retry_after":' + b"9" * 5000 + b"}", b'{"retry_after": 3'):
        assert asked(broken, header="7") == 7
    longest = asked(b'{"retry_after":1e300,"parameters":{"retry_after":1e300}}', header="1" * 400)
    assert longest is not None
    assert math.isfinite(longest)


def test_where_each_platform_says_how_long() -> None:
    """Telegram and Discord say it in the body, Discord with fractions; the body wins over the header's rounding."""
    body = b'{"ok":false,"error_code":429,"description":"Too Many Requests: retry after 35","parameters":{"retry_after":35}}'
    headers = [("retry-after", "65")]
    assert TRANSPORTS["telegram"].retry_after(headers=[], snippet=body, now=NOW) == 35
    body = b'{"message": "You are being rate limited.", "retry_after": 64.57, "global": false}'
    assert TRANSPORTS["discord"].retry_after(headers=headers, snippet=body, now=NOW) == 64.57
    assert TRANSPORTS["slack"].retry_after(headers=headers, snippet=b"rate_limited", now=NOW) == 65


@EVERY
def test_statuses_stay(transport: Transport) -> None:
    """A status is judged as it came, whatever the body looks like."""
    for status in (200, 204, 301, 400, 401, 403, 404, 410, 429, 500):
        for snippet in (b"", b"ok", b"<html>", b'{"ok":true}', b'{"ok":1}', b"[" * 3000):
            assert transport.status(status=status, snippet=snippet) == status


def test_telegram_says_no_with_a_200() -> None:
    """`"ok": false` under a 2xx is a failure, by its own code where there is one."""
    status = TRANSPORTS["telegram"].status
    assert status(status=200, snippet=b'{"ok":false,"error_code":429}') == 429
    assert status(status=200, snippet=b'{"ok":false,"error_code":403}') == 403
    for code in (b"200", b"-1", b"true", b'"400"', b"1e2", b"100000"):
        assert status(status=200, snippet=b'{"ok":false,"error_code":%b}' % code) == 500
    assert status(status=200, snippet=b'{"ok":false}') == 500
    assert status(status=500, snippet=b'{"ok":false,"error_code":429}') == 500


def test_the_bodies() -> None:
    """Each body asks for what keeps others from being pinged and links from being unfolded, and for no parse mode."""
    body = json.loads(build(TRANSPORTS["telegram"], "🥙 [x](y)".encode(), "text/plain").body)
    assert body == {
        "chat_id": -1001234567890,
        "text": "order.paid\n🥙 [x](y)",
        "link_preview_options": {"is_disabled": True},
        "entities": [{"type": "pre", "offset": 11, "length": 9}],
    }
    body = json.loads(build(TRANSPORTS["discord"], b"@everyone ```", "text/plain", event_type="a_b.c").body)
    assert body == {
        "content": "a\\_b.c\n```\n@everyone `\u200b`\u200b`\u200b\n```",
        "allowed_mentions": {"parse": []},
        "flags": 4,
    }
    body = json.loads(build(TRANSPORTS["slack"], b"<!channel> & *x*", "text/plain").body)
    assert body == {
        "text": "order.paid\n&lt;!channel&gt; &amp; *x*",
        "mrkdwn": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def test_a_channel_by_name() -> None:
    """A channel's name goes out as text, an id as a number."""
    built = TRANSPORTS["telegram"].build(
        event_type="a",
        payload=b"1",
        content_type="text/plain",
        address="telegram://@relay_alerts",
        secret=Secret(SAMPLES["telegram"][1]),
        base_url="https://api.telegram.org",
    )
    assert json.loads(built.body)["chat_id"] == "@relay_alerts"


@EVERY
def test_a_token_is_taken_out_of_texts(transport: Transport) -> None:
    """C-70: whole, escaped, in parts or cut at the end, the token does not get through; other text does."""
    secret = Secret(SAMPLES[transport.name][1])
    token = secret.reveal()
    built = build(transport, b"1")
    for text in (
        f"could not connect to {built.url}: refused",
        f"/{token}",
        token.replace("/", "%2F").replace(":", "%3A"),
        f"no route {re.split('[/:]', token)[-1]} here",
        *[f"Location: {built.url}"[: -cut or None] for cut in range(1, len(token) - 8)],
    ):
        cleaned = redact(text, secret)
        assert TOKEN in cleaned
        assert "marker" not in cleaned.lower()
    assert redact("an ordinary text", secret) == "an ordinary text"


@EVERY
def test_an_observation_without_the_token(transport: Transport) -> None:
    """Error text, headers and snippet are all cleaned; what else was seen stays."""
    secret = Secret(SAMPLES[transport.name][1])
    built = build(transport, b"1")
    seen = Observation(
        status=404,
        text=f"failed: {built.url}",
        headers=[("location", built.url), ("server", "x\xe9")],
        snippet=b"\xff no such path " + built.url.encode(),
        bytes_received=9,
    )
    cleaned = redacted(seen, secret)
    assert "marker" not in repr(cleaned).lower()
    assert (cleaned.status, cleaned.bytes_received, cleaned.headers[1]) == (404, 9, ("server", "x\xe9"))
    assert cleaned.snippet == b"\xff no such path " + built.display_url.encode()
    assert redacted(Observation(), secret) == Observation()
