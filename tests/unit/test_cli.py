"""What the commands show, and what they make of what is typed; the receiver of `relay listen`."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click
import pytest
import requests

from relay.cli import output
from relay.cli.doctor_database import judge_clock
from relay.cli.endpoints import FIELDS, _fields
from relay.cli.findings import Verdict
from relay.cli.jobs import _headers
from relay.cli.listen import Listener, _print
from relay.cli.target import read_env
from relay.client.answers import Attempt, Rotated
from relay.core.errors import InvalidInput
from relay.core.model import Signing
from relay.core.signing import signature_headers, signing_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
AT = datetime(2026, 11, 30, 20, 17, 35, 616211, tzinfo=UTC)


def test_a_terminal_is_not_controlled_by_what_comes_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes, line breaks and tabs in URLs, errors and bodies are shown, not sent."""
    output.show_table(("a", "b"), [("\x1b[31mred", "one\ttwo\nthree")])
    output.show_fields([("a", "\x07"), ("left out", None), ("empty", "")])
    output.show_json({"a": "\x1b"})

    assert capsys.readouterr().out == "a\tb\n\\x1b[31mred\tone\\ttwo\\nthree\na  \\x07\n" + '{"a":"\\u001b"}\n'


def test_a_table_that_cannot_begin_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the first row cannot be had, no header is printed either; a table without rows has its header."""

    def rows() -> Iterator[tuple[str]]:
        raise InvalidInput("no")
        yield ("a",)

    with pytest.raises(InvalidInput):
        output.show_table(("a",), rows())
    assert capsys.readouterr().out == ""
    output.show_table(("a",), ())
    assert capsys.readouterr().out == "a\n"


def test_json_has_the_names_of_the_api() -> None:
    """A field that Python has another word for, times, and a secret that is there."""
    shown = output.plain(Attempt(at=AT, class_="success"))
    assert (shown["class"], shown["at"], shown["reply_headers"]) == ("success", "2026-11-30T20:17:35.616211Z", [])
    assert output.plain(Rotated(id="e", secret=SECRET))["secret"] == SECRET


def test_times_are_typed_as_people_do() -> None:
    """RFC 3339, or so long ago; what could be several moments is refused."""
    moment = output.Moment()
    assert moment.convert("2026-11-30T20:17:35.616211Z", None, None) == AT
    for text, ago in (("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800)):
        found = moment.convert(text, None, None)
        assert abs(datetime.now(UTC) - timedelta(seconds=ago) - found) < timedelta(seconds=5)
    for wrong in ("yesterday", "2026-11-30T20:17:35", "-1h", "1w"):
        with pytest.raises(click.BadParameter):
            moment.convert(wrong, None, None)


def test_fields_are_json_or_text() -> None:
    """Numbers, null and objects by JSON, the rest as it stands; a list of types by commas."""
    given = (
        "rate_per_second=5",
        "timeout_ms=null",
        "description=a=b",
        'retry={"max_attempts": 1}',
        "event_types=a,b.*",
    )
    assert _fields(given, FIELDS) == {
        "rate_per_second": 5,
        "timeout_ms": None,
        "description": "a=b",
        "retry": {"max_attempts": 1},
        "event_types": ["a", "b.*"],
    }
    odd = ("description=1.5", "event_types=5", "transport=true")
    assert _fields(odd, FIELDS) == {"description": "1.5", "event_types": ["5"], "transport": "true"}
    assert _fields(("description=null", "event_types=null"), FIELDS) == {"description": None, "event_types": None}
    for wrong in ("colour=red", "description", "secret=x"):
        with pytest.raises(click.BadParameter):
            _fields((wrong,), FIELDS)


def test_headers_of_a_job_are_read_as_they_are_typed(tmp_path: Path) -> None:
    """By option and from a file, in order, one name more than once; what is none is refused without showing a value."""
    (tmp_path / "h").write_text("X-Two: b:c\n\nx-one:\n")
    assert _headers(("X-One:a", f"@{tmp_path / 'h'}")) == [("X-One", "a"), ("X-Two", "b:c"), ("x-one", "")]
    for wrong in (("hidden",), (": hidden",), (f"@{tmp_path / 'hidden'}/",)):
        with pytest.raises(click.BadParameter) as refused:
            _headers(wrong)
        assert "hidden" not in str(refused.value) or wrong[0].startswith("@")


def test_files_of_settings_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Comments, quotes and `export` are understood; a file that is none is empty."""
    file = tmp_path / ".env"
    file.write_text("# A=1\n\nexport RELAY_URL = 'http://x'\nRELAY_API_KEY=\"rk_=\"\nnothing\n")
    assert read_env(file) == {"RELAY_URL": "http://x", "RELAY_API_KEY": "rk_="}
    assert read_env(tmp_path) == read_env(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("away", "verdict"),
    [(0.0, Verdict.OK), (-1.9, Verdict.OK), (2.0, Verdict.WARN), (-59.0, Verdict.WARN), (-60.0, Verdict.FAIL)],
)
def test_clocks_are_judged_either_way(away: float, verdict: Verdict) -> None:
    """Two seconds are told, a minute is a failure; the sentence says which one is behind."""
    found = judge_clock("redis's clock", away)
    assert found.verdict is verdict
    assert ("behind" in found.said) == (away <= -2)
    assert bool(found.remedy) == (verdict is not Verdict.OK)


def test_the_listener_takes_what_is_signed(capsys: pytest.CaptureFixture[str]) -> None:
    """200 and the delivery's id for what is verified, 401 and the fault for the rest, 404 off its path."""
    body = b'{"a": 1}'
    lines = signature_headers(
        Signing.RELAY,
        secrets=[signing_key(Signing.RELAY, SECRET)],
        delivery_id="d1",
        event_id="e1",
        event_type="a.b",
        attempt=2,
        timestamp=int(datetime.now(UTC).timestamp()),
        body=body,
    )
    headers = dict(line.split(": ", 1) for line in lines)
    with Listener("127.0.0.1", 0, SECRET, 503) as listener, requests.Session() as session:
        base = f"http://127.0.0.1:{listener.port}"
        assert session.post(base + listener.path, data=body, headers=headers, timeout=5).status_code == 503
        assert session.post(base + listener.path, data=b"\xff\x1b", headers=headers, timeout=5).status_code == 401
        assert session.post(base + "/other", data=body, headers=headers, timeout=5).status_code == 404
        good, bad = listener.arrived.get(timeout=5), listener.arrived.get(timeout=5)
        # As tunnels may send it: in chunks, here with an extension and a trailer.
        assert (
            session.post(base + listener.path, data=iter([body[:3], body[3:]]), headers=headers, timeout=5).status_code
            == 503
        )
        chunked = listener.arrived.get(timeout=5)
        assert chunked is not None
        assert (chunked.body, chunked.fault) == (body, None)
        head = f"POST {listener.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        for rest, status in (
            (b"1;a=b\r\nx\r\n0\r\nT: t\r\n\r\n", b"401"),
            (b"x\r\n", b"400"),
            (b"2\r\nxyz\r\n", b"400"),
        ):
            with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as client:
                client.sendall(head + rest)
                assert client.recv(100).split()[1] == status
        last = listener.arrived.get(timeout=5)
        assert last is not None
        assert last.body == b"x"
        assert listener.arrived.empty()
    assert good is not None
    assert bad is not None
    assert (good.delivery_id, good.fault, bad.delivery_id) == ("d1", None, None)
    for one in (good, bad):
        _print(one, as_json=False)
        _print(one, as_json=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["a.b delivery d1 attempt 2  verified", '  {"a": 1}']
    assert "NOT VERIFIED: No signature fits" in shown[3]
    assert shown[4] == "  \ufffd\\x1b"
    assert json.loads(shown[2])["body"] == '{"a": 1}'
    assert (json.loads(shown[5])["verified"], json.loads(shown[5])["body_base64"]) == (False, "/xs=")
