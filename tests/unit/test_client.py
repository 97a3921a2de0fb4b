"""The client's own doings: what it repeats, what it makes of answers, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from relay.client import (
    ApiError,
    ConfigurationError,
    Conflict,
    InvalidInput,
    NotFound,
    Relay,
    ServerFault,
    TooManyRequests,
    UnexpectedAnswer,
    Unreachable,
)
from relay.client.answers import Delivery
from relay.client.reading import read
from tests.stack import quiet_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SENT = {"id": "e", "type": "a.b", "created_at": "2026-11-30T20:17:35.616211Z", "deliveries": []}
#: Status, headers and JSON of an answer; a status of 0 cuts the connection, -1 says nothing. Bytes under 1 go out raw.
Answer = tuple[int, dict[str, str], Any]


class Api:
    """Answers requests in turn, the last answer for ever, and remembers what came."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [(202, {}, SENT)]
        self.came: list[tuple[str, str, dict[str, str], bytes]] = []
        self.lines: list[list[str]] = []
        self.over = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                named = {name.lower(): value for name, value in self.headers.items()}
                owner.came.append((self.command, self.path, named, body))
                owner.lines.append([f"{name}: {value}" for name, value in self.headers.items()])
                status, headers, value = owner.answers.pop(0) if len(owner.answers) > 1 else owner.answers[0]
                if status <= 0:
                    if status < 0:
                        owner.over.wait(10)
                    if isinstance(value, bytes):
                        self.wfile.write(value)
                    self.close_connection = True
                    return
                text = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                problem = (
                    {"Content-Type": "application/problem+json"} if status >= 400 and isinstance(value, dict) else {}
                )
                for name, header in {"Content-Length": str(len(text)), **problem, **headers}.items():
                    self.send_header(name, header)
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = do_PATCH = answer  # noqa: N815 - the library's names

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def api() -> Iterator[Api]:
    """A stand-in for the API."""
    made = Api()
    yield made
    made.over.set()
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def relay(api: Api) -> Iterator[Relay]:
    """A client of it."""
    with Relay(api.url, "rk_x", timeout=5) as made:
        yield made


@pytest.mark.parametrize(
    "first",
    [(0, {}, None), (503, {"Retry-After": "0"}, {}), (429, {"Retry-After": "0"}, {}), (502, {}, b"<html>")],
)
def test_an_event_is_sent_again_under_the_same_key(api: Api, relay: Relay, first: Answer) -> None:
    """A lost answer and a passing refusal cost nothing: the repeat has the key and the bytes of the first try."""
    api.answers.insert(0, first)

    sent = relay.send("a.b", {"n": 1})

    (_, _, one, body), (_, _, two, again) = api.came
    assert one["idempotency-key"] == two["idempotency-key"] == sent.idempotency_key
    assert body == again == b'{"n":1}'
    assert one["authorization"] == "Bearer rk_x"
    assert one["relay-event-type"] == "a.b"


def test_each_event_has_a_key_of_its_own(api: Api, relay: Relay) -> None:
    """Two calls are two events, alike as they are; a key that is given is used."""
    keys = {relay.send("a.b", {}).idempotency_key for _ in range(2)}
    assert len(keys) == 2
    assert relay.send("a.b", {}, idempotency_key="mine").idempotency_key == "mine"
    assert api.came[-1][2]["idempotency-key"] == "mine"


def test_what_must_not_be_done_twice_is_sent_once(api: Api, relay: Relay) -> None:
    """A POST without a key is not repeated after a lost answer or a refusal: it may have been carried out."""
    api.answers = [(0, {}, None)]
    with pytest.raises(Unreachable):
        relay.endpoints.rotate_secret("x")
    api.answers = [(503, {"Retry-After": "0"}, {"code": "busy", "detail": "later"})]
    with pytest.raises(ServerFault):
        relay.endpoints.create("https://example.com")

    assert len(api.came) == 2


def test_a_long_wait_is_left_to_the_caller(api: Api, relay: Relay) -> None:
    """A Retry-After beyond half a minute is not slept through: the error says how long."""
    api.answers = [(429, {"Retry-After": "86400"}, {"code": "ingest_rate", "detail": "Too many."})]
    started = time.monotonic()

    with pytest.raises(TooManyRequests) as caught:
        relay.send("a.b", {})

    assert time.monotonic() - started < 5
    assert (caught.value.retry_after, caught.value.code, len(api.came)) == (86400.0, "ingest_rate", 1)
    assert caught.value.idempotency_key == api.came[0][2]["idempotency-key"]


def test_the_key_is_the_one_given(api: Api, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .netrc that knows the host does not take the key's place."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    relay.send("a.b", {})
    assert api.came[0][2]["authorization"] == "Bearer rk_x"


def test_retries_end(api: Api) -> None:
    """After so many tries the last refusal is the error; with none there is one try."""
    api.answers = [(503, {"Retry-After": "0"}, {"code": "busy", "detail": "later"})]
    for retries in (0, 2):
        api.came.clear()
        with Relay(api.url, "rk_x", retries=retries) as relay, pytest.raises(ServerFault):
            relay.send("a.b", {})
        assert len(api.came) == retries + 1


def test_nobody_there_is_said_with_the_key(api: Api) -> None:
    """No connection, or none that says anything in time: Unreachable, with what to send it again under."""
    with Relay(f"http://127.0.0.1:{quiet_port()}", "rk_x", retries=1) as relay, pytest.raises(Unreachable) as caught:
        relay.send("a.b", {}, idempotency_key="k")
    assert "is `relay up` or `relay api` running?" in str(caught.value)
    assert caught.value.idempotency_key == "k"

    api.answers = [(-1, {}, None)]
    with (
        Relay(api.url, "rk_x", timeout=0.2, retries=0) as relay,
        pytest.raises(Unreachable, match=r"silent for 0\.2 s"),
    ):
        relay.endpoints.get("x")


def test_a_delete_whose_answer_was_lost_has_succeeded(api: Api, relay: Relay) -> None:
    """Gone at the second try is what the first one did; gone at the first is an error."""
    api.answers = [(0, {}, None), (404, {}, {"code": "unknown_endpoint", "detail": "No."})]
    relay.endpoints.delete("x")
    assert len(api.came) == 2

    with pytest.raises(NotFound):
        relay.endpoints.delete("x")


def test_a_refusal_tells_all_of_it(api: Api, relay: Relay) -> None:
    """Code, detail, fields, further members and the request's id are on the error; it is one line of text."""
    errors = [{"field": name, "message": f"{name} is bad", "code": "x"} for name in ("a", "b")]
    problem = {"code": "invalid_request", "detail": "a: a is bad (1 more)", "errors": errors, "indexes": [1]}
    api.answers = [(400, {"X-Request-Id": "r1"}, problem)]

    with pytest.raises(ApiError) as caught:
        relay.send("a.b", {})

    error = caught.value
    assert (error.status, error.code, error.request_id, error.members) == (
        400,
        "invalid_request",
        "r1",
        {"indexes": [1]},
    )
    assert [one.field for one in error.errors] == ["a", "b"]
    assert str(error) == "400 a: a is bad; b: b is bad"

    for odd in (None, 5, [None, "x"]):
        api.answers = [(409, {}, {**problem, "errors": odd})]
        with pytest.raises(Conflict, match=r"^409 a: a is bad \(1 more\)$"):
            relay.send("a.b", {})


@pytest.mark.parametrize(
    ("status", "headers", "value", "said"),
    [
        (
            404,
            {"Content-Type": "text/html"},
            b"<h1>\x1b[31m\nNot here</h1>\n",
            r'says "<h1>\\x1b\[31m Not here</h1>"\.',
        ),
        (400, {"Content-Type": "application/json"}, {"code": "x", "detail": "y"}, "not Relay's API"),
        (422, {}, {"errors": None}, "not Relay's API"),
        (401, {}, {"detail": "who?"}, "not Relay's API"),
        (503, {"Retry-After": "0"}, b"", "says nothing"),
        (500, {"Content-Type": "application/problem+json"}, b"[" * 100_000, "answers 500 at"),
    ],
)
def test_a_refusal_of_somebody_else_is_no_refusal_of_relays(
    api: Api, relay: Relay, status: int, headers: dict[str, str], value: Any, said: str
) -> None:
    """What another program answers, or a proxy in front, is UnexpectedAnswer, shown in one line, with the key."""
    api.answers = [(status, headers, value)]
    with pytest.raises(UnexpectedAnswer, match=said) as caught:
        relay.send("a.b", {}, idempotency_key="k")
    assert caught.value.idempotency_key == "k"
    assert str(caught.value).endswith("(idempotency key: k)")
    assert len(api.came) == (4 if status == 503 else 1)


HEAD = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "cut",
    [
        HEAD + b"Content-Length: 500\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n{}\n",
        HEAD + b"Content-Length: 50",
        HEAD + b"Content-Le",
        HEAD,
        b"HTTP/1.1 202 Acc",
        b"HTTP/1.1 500 Internal Server Error\r\nConn",
        b"HTT",
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(api: Api, relay: Relay, cut: bytes) -> None:
    """In its headers or after, it is sent again under the same key, and read again; what may not be is Unreachable."""
    api.answers.insert(0, (0, {}, cut))
    sent = relay.send("a.b", {"n": 1})
    assert [one[2]["idempotency-key"] for one in api.came] == [sent.idempotency_key] * 2

    api.answers = [(0, {}, cut), (200, {}, {**SENT, "delivery_count": 0})]
    assert relay.events.get("e").id == "e"

    api.answers = [(0, {}, cut)]
    api.came.clear()
    with pytest.raises(Unreachable):
        relay.endpoints.rotate_secret("x")
    assert len(api.came) == 1
    with pytest.raises(Unreachable, match=r"\(idempotency key: k\)$") as caught:
        relay.enqueue("https://example.com", idempotency_key="k")
    assert (caught.value.idempotency_key, len(api.came)) == ("k", 5)


def test_all_kinds_of_failures_count_together(api: Api, relay: Relay) -> None:
    """Lost answers, cut ones and passing refusals use up the same tries; an answer without a body can be whole."""
    api.answers = [(0, {}, None), (0, {}, HEAD), (503, {"Retry-After": "0"}, b""), (0, {}, HEAD + b"\r\n")]
    with pytest.raises(Unreachable):
        relay.send("a.b", {})
    assert len(api.came) == 4

    api.answers = [(0, {}, b"HTTP/1.1 204 No Content\r\n\r\n")]
    relay.endpoints.delete("x")
    assert len(api.came) == 5


def test_what_is_not_relay_is_told_apart(api: Api, relay: Relay) -> None:
    """A redirect is not followed, with the key in it, and a page of HTML is not an answer."""
    api.answers = [(302, {"Location": "https://login.example.com"}, b"")]
    with pytest.raises(UnexpectedAnswer, match=r"leads on to https://login\.example\.com"):
        relay.send("a.b", {})
    values: list[Any] = [b"<html>", [], {"id": 1}]
    for value in values:
        api.answers = [(200, {}, value)]
        with pytest.raises(UnexpectedAnswer):
            relay.endpoints.get("x")


def test_ids_are_escaped(api: Api, relay: Relay) -> None:
    """An id that is none leads to no other address."""
    api.answers = [(404, {}, {"code": "unknown_delivery", "detail": "No."})]
    with pytest.raises(NotFound):
        relay.deliveries.get("../keys?x=1")
    assert api.came[0][1] == "/v1/deliveries/..%2Fkeys%3Fx%3D1"
    odd: list[Any] = ["", "..", None, 5]
    for wrong in odd:
        with pytest.raises(InvalidInput, match="is no id"):
            relay.deliveries.get(wrong)


def test_payloads_and_headers(api: Api, relay: Relay) -> None:
    """Bytes go as they are, text under its Content-Type, the rest as JSON; what a header cannot carry is named."""
    for payload, content_type, body, sent_as in (
        (b'{"a": 1.00}', None, b'{"a": 1.00}', "application/json"),
        ("grüße", "text/plain; charset=utf-8", "grüße".encode(), "text/plain; charset=utf-8"),
        ("grüße", None, '"grüße"'.encode(), "application/json"),
    ):
        relay.send("a.b", payload, content_type=content_type, expires_in=0.00001)
        _, _, headers, came = api.came[-1]
        assert (came, headers["content-type"], headers["relay-expires-in"]) == (body, sent_as, "0.00001")
    for wrong in ("a\r\nX-Evil: 1", "é"):
        with pytest.raises(InvalidInput, match="Relay-Event-Type: a header is visible ASCII"):
            relay.send(wrong, {})


def test_what_cannot_be_sent_is_invalid_input(api: Api, relay: Relay) -> None:
    """Values that JSON, UTF-8 or HTTP has no way to write, and times and seconds that are none: nothing is sent."""
    url = "https://example.com"
    loop: list[Any] = []
    loop.append(loop)
    wrong: Any
    loose: Any = relay
    for wrong in (float("nan"), 1e999, "\ud800", {1, 2}, loop, {("a",): 1}, 10**5000):
        with pytest.raises(InvalidInput):
            relay.send("a.b", {"x": wrong})
        with pytest.raises(InvalidInput):
            relay.send_batch([{"type": "a.b", "payload": wrong}])
        with pytest.raises(InvalidInput):
            relay.endpoints.update("x", metadata={"a": wrong})
    tried: list[tuple[str, Any]] = [
        ("surrogate pair", lambda: loose.send("a.b", "\udcff", content_type="text/plain")),
        ("surrogate pair", lambda: loose.events.get("\ud800")),
        ("surrogate pair", lambda: next(loose.events.list(type="\ud800"))),
        ("Idempotency-Key: .* not int", lambda: loose.send("a.b", {}, idempotency_key=5)),
        ("Relay-Header-X: .* not int", lambda: loose.enqueue(url, headers={"X": 1})),
        ("give a mapping, or pairs", lambda: loose.enqueue(url, headers="X: 1")),
        ("give a mapping, or pairs", lambda: loose.enqueue(url, headers=[("X",)])),
        ("Relay-Delay: nan", lambda: loose.enqueue(url, delay=float("nan"))),
        ("Relay-Expires-In: '5'", lambda: loose.send("a.b", {}, expires_in="5")),
        (r"^\[1\]: this is str", lambda: loose.send_batch([{"type": "a.b"}, "a.b"])),
        ("^headers: this is str", lambda: loose.endpoints.create(url, headers="abc")),
        ("^metadata: this is list", lambda: loose.endpoints.create(url, metadata=[1])),
        ("^event_types: this is str", lambda: loose.endpoints.create(url, event_types="order.*")),
        ("has no offset", lambda: loose.events.list(since=datetime(2026, 11, 30))),  # noqa: DTZ001 - what is refused
        ("a time is not int", lambda: loose.events.list(until=5)),
        ("Relay-Workspace", lambda: Relay(api.url, "rk_x", workspace="a\nb")),
    ]
    for said, call in tried:
        with pytest.raises(InvalidInput, match=said):
            call()
    assert api.came == []


def test_a_header_of_a_job_may_be_repeated(api: Api, relay: Relay) -> None:
    """Pairs go out line by line, those of one name in their order; a mapping does as before."""
    api.answers = [(202, {}, {**SENT, "state": "queued", "due_at": SENT["created_at"]})]
    pairs = [("X-Tag", "one"), ("X-Other", "a, b"), ("x-tag", ""), ("X-Tag", "two")]
    for given in (pairs, dict(pairs), iter(pairs)):
        relay.enqueue("https://example.com", b"{}", headers=given, content_type="application/json")
    own = [[one for one in lines if one.startswith("Relay-Header-")] for lines in api.lines]
    told = [one.partition(": ")[2] for one in own[0] if one.lower().startswith("relay-header-x-tag: ")]
    assert told == ["one", "", "two"]
    assert "Relay-Header-X-Other: a, b" in own[0]
    assert len(own[1]) == 3
    assert own[2] == own[0]
    assert (api.came[0][2]["content-length"], api.came[0][2]["authorization"]) == ("2", "Bearer rk_x")


def test_lists_go_on_over_short_pages(api: Api, relay: Relay) -> None:
    """Pages are fetched one by one, with the cursor of the one before; an empty one is not the end."""
    rows = [{**SENT, "id": str(n), "delivery_count": 0} for n in range(3)]
    api.answers = [
        (200, {}, {"data": rows[:2], "next_cursor": "c1"}),
        (200, {}, {"data": [], "next_cursor": "c2"}),
        (200, {}, {"data": rows[2:], "next_cursor": None}),
    ]
    listed = relay.events.list(type="a.b")
    assert api.came == []

    assert [one.id for one in listed] == ["0", "1", "2"]
    assert [one[1] for one in api.came] == [
        "/v1/events?type=a.b&limit=250",
        "/v1/events?type=a.b&limit=250&cursor=c1",
        "/v1/events?type=a.b&limit=250&cursor=c2",
    ]
    api.answers = [(200, {}, {"data": rows, "next_cursor": "c1"})]
    assert len(list(relay.events.list(limit=2))) == 2


def test_answers_of_a_later_release_are_read() -> None:
    """Unknown fields are passed over, missing ones with a default filled in, and a missing one without is named."""
    shown = {
        "id": "d", "event_id": "e", "endpoint_id": "p", "reason": None, "attempt_count": 1, "status": "dead",
        "created_at": "2026-11-30T20:17:35.616211Z", "colour": "red",
        "attempts": [{"at": "2026-11-30T20:17:36Z", "class": "success", "mood": 1, "durations": {"total": 1}}],
    }  # fmt: skip
    delivery = read(Delivery, shown)
    assert (delivery.generation, delivery.is_settled) == (0, True)
    assert (delivery.attempts[0].class_, delivery.attempts[0].durations.total) == ("success", 1.0)
    assert delivery.created_at.utcoffset() is not None
    del shown["status"]
    with pytest.raises(UnexpectedAnswer, match=r"Delivery\.status"):
        read(Delivery, shown)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """RELAY_URL and RELAY_API_KEY are read where nothing is given; what is missing or cannot be is named."""
    monkeypatch.setenv("RELAY_URL", "https://relay.example.com/base/")
    monkeypatch.setenv("RELAY_API_KEY", "rk_x")
    assert Relay().url == "https://relay.example.com/base"
    monkeypatch.delenv("RELAY_API_KEY")
    with pytest.raises(ConfigurationError, match=r"^RELAY_API_KEY not set"):
        Relay()
    with pytest.raises(ConfigurationError, match="is not the API's URL"):
        Relay("relay.example.com", "rk_x")
    with pytest.raises(ConfigurationError, match="without spaces or line breaks"):
        Relay("https://relay.example.com", "rk_x\n")


#: Loads the client with nothing installed but what it needs, uses it, and verifies both schemes.
ALONE = """
import sys

allowed = {"relay", "requests", "urllib3", "certifi", "charset_normalizer", "idna", *sys.stdlib_module_names, *given}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def alone(code: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has no package but those of the client, and `more`."""
    program = f"given = {more!r}\n{ALONE}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_the_client_needs_nothing_of_the_server() -> None:
    """It is loaded, made and verifies where no other package is; ed25519 says what it lacks."""
    done = alone(
        """
import base64, hashlib, hmac, time
from relay.client import ConfigurationError, Relay, verify
Relay("http://127.0.0.1:1", "rk_x")
secret, at = "whsec_" + base64.b64encode(bytes(32)).decode(), str(int(time.time()))
digest = hmac.new(secret.encode(), at.encode() + b".{}", hashlib.sha256).hexdigest()
print(verify({"relay-timestamp": at, "relay-signature": "v1=" + digest, "relay-delivery-id": "d"}, b"{}", secret))
headers = {"webhook-id": "d", "webhook-timestamp": at, "webhook-signature": "v1a," + base64.b64encode(bytes(64)).decode()}
try:
    verify(headers, b"{}", "whpk_" + base64.b64encode(bytes(32)).decode())
except ConfigurationError as error:
    print(error)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Verified(scheme='relay', delivery_id='d'")
    assert "pip install cryptography" in done.stdout


def test_the_commands_on_the_api_need_little_more() -> None:
    """They run beside the client's packages and click, so that they start fast and work where no server is installed."""
    asked = [
        ["send"],
        ["endpoints", "list"],
        ["deliveries", "list"],
        ["replay"],
        ["listen"],
        ["completion"],
        ["doctor"],
    ]
    code = f"""
from click.testing import CliRunner
from relay.cli.main import main
for command in {asked!r}:
    print(CliRunner().invoke(main, [*command, "--help"], catch_exceptions=False).exit_code)
"""
    done = alone(code, "click")
    assert done.stdout.split() == ["0"] * len(asked), done.stderr
