"""How commands end: interrupted, without an answer, with what cannot be read or written; one sentence, no traceback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from relay.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AT = "2026-11-30T20:17:35.616211Z"
#: What is never done.
PENDING = {"id": "d", "event_id": "e", "endpoint_id": "p", "created_at": AT, "reason": None, "attempt_count": 0}
ROOT = Path(__file__).resolve().parents[2]


class _Pending(BaseHTTPRequestHandler):
    """Takes events and jobs that nothing becomes of, and refuses all else as Relay does."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))  # type: ignore[attr-defined]  # put there below
        if self.path == "/v1/events":
            self.answer(
                202, {"id": "e", "type": "a.b", "created_at": AT, "deliveries": [{"id": "d", "endpoint_id": "p"}]}
            )
        elif self.path == "/enqueue":
            self.answer(202, {"id": "j", "state": "queued", "created_at": AT, "due_at": AT})
        elif self.path == "/v1/deliveries/good/replay":
            self.answer(202, {**PENDING, "id": "good", "status": "pending"})
        else:
            detail = 'The delivery has arrived: replay it with {"force": true}.'
            self.answer(409, {"status": 409, "code": "delivery_delivered", "detail": detail})

    def do_GET(self) -> None:
        self.answer(200, {**PENDING, "status": "pending", "state": "queued", "url": "http://x/"})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
        self.send_header("X-Request-Id", self.headers.get("X-Request-Id", "r"))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def api() -> Iterator[ThreadingHTTPServer]:
    """Such an API; `bodies` are what came."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pending)
    server.bodies = []  # type: ignore[attr-defined]  # for the handler
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


def _env(port: int) -> dict[str, str]:
    return {"RELAY_URL": f"http://127.0.0.1:{port}", "RELAY_API_KEY": "rk_x"}


def _start(port: int, arguments: Sequence[str | bytes], **options: Any) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "relay.cli.main", *arguments]
    return subprocess.Popen(argv, env=os.environ | _env(port), stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize(
    ("command", "goes_on"),
    [
        (("send", "a.b", "--wait", "600"), b"\nIt goes on: relay events get e\n"),
        (("jobs", "send", "http://x/", "--wait", "600"), b"\nIt goes on: relay jobs get j\n"),
    ],
)
def test_an_interrupted_wait_is_130_and_says_how_to_look(
    api: ThreadingHTTPServer, command: tuple[str, ...], goes_on: bytes
) -> None:
    """Ctrl-C ends the waiting alone, with the exit code that shells have for it."""
    with _start(api.server_port, command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"accepted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, goes_on)


def test_an_interrupted_call_is_130(monkeypatch: pytest.MonkeyPatch, api: ThreadingHTTPServer) -> None:
    """Any other command that is interrupted ends the same way, without a word."""

    def interrupt(self: _Pending) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # Who was interrupted may be gone.
        with contextlib.suppress(ConnectionError):
            self.answer(200, {"data": [], "next": None})

    monkeypatch.setattr(_Pending, "do_GET", interrupt)
    done = CliRunner().invoke(main, ["events", "list"], env=_env(api.server_port))
    assert (done.exit_code, done.output) == (130, "\n")


def test_what_got_no_answer_tells_its_key() -> None:
    """The key that was made for an event, so that it can be sent again and counts once; a list has none."""
    told = r"relay: no API answers at \S+ .* \(sent again with --idempotency-key (\S+) it counts once\)\n"
    for command in (["send", "a.b"], ["jobs", "send", "http://x/"], ["send", "a.b", "--idempotency-key", "a'b"]):
        done = CliRunner().invoke(main, command, env=_env(1))
        match = re.fullmatch(told, done.stderr)
        assert (done.exit_code, match is not None) == (3, True), done.stderr
    assert match is not None
    assert match[1] == """'a'"'"'b'"""
    assert "--idempotency-key" not in CliRunner().invoke(main, ["events", "list"], env=_env(1)).stderr


def test_ids_and_values_that_are_none_are_one_sentence(api: ThreadingHTTPServer, tmp_path: Path) -> None:
    """No traceback for an empty id or a value that JSON has not; of several ids the good one is done all the same."""
    (tmp_path / "secret").write_bytes(b"\xff")
    for command, code in (
        (["endpoints", "get", ""], 1),
        (["endpoints", "get", ".."], 1),
        (["jobs", "get", ""], 1),
        (["events", "get", ""], 1),
        (["events", "payload", ""], 1),
        (["endpoints", "create", "http://x/", "headers=abc"], 1),
        (["endpoints", "create", "http://x/", 'metadata={"a":NaN}'], 1),
        (["endpoints", "create", "http://x/", "timeout_ms=1e999"], 1),
        (["endpoints", "create", "http://x/", "--secret-file", str(tmp_path / "secret")], 2),
        (["deliveries", "get", "\udcff"], None),
        (["send", "\udcff"], None),
    ):
        done = CliRunner().invoke(main, command, env=_env(api.server_port))
        assert isinstance(done.exception, SystemExit), (command, done.exception)
        assert done.exit_code == code or (code is None and done.exit_code in {1, 2}), (command, done.output)
        assert done.stdout == ""
        assert done.stderr.startswith("relay: " if code == 1 else ("relay: ", "Usage: ")), (command, done.stderr)
    done = CliRunner().invoke(main, ["deliveries", "replay", "", "good", "old"], env=_env(api.server_port))
    assert (done.exit_code, done.stdout) == (1, "good: pending\n")
    assert done.stderr.splitlines()[1] == "relay: old: 409 The delivery has arrived: replay it with --force."


def test_data_goes_out_as_it_was_typed(api: ThreadingHTTPServer) -> None:
    """Also bytes that are no UTF-8: what is wrong with them is the API's to say."""
    with _start(
        api.server_port, ("send", "a.b", "--wait", "0", "--data", b"\xff\xfe"), stdout=subprocess.PIPE
    ) as process:
        process.communicate(timeout=60)
    assert (process.returncode, api.bodies) == (0, [b"\xff\xfe"])  # type: ignore[attr-defined]  # put there above


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [("send", "a.b", "--wait", "0"), ("--help",), ("events", "payload", "e")])
def test_a_full_disk_is_one_sentence(api: ThreadingHTTPServer, command: tuple[str, ...]) -> None:
    """Output that cannot be written is told on stderr, once, and the command failed."""
    with Path("/dev/full").open("wb") as full, _start(api.server_port, command, stdout=full) as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, b"relay: the output cannot be written (No space left on device)\n")


def test_an_installation_without_its_packages_says_so() -> None:
    """After `pip install --no-deps` the program names what is missing."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from relay.cli.entry import main; main()"
    # Without the site's packages, as in a fresh environment.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("relay: the package click is missing: ")
