"""`relay send` as a person meets it: its sentences, and what it does with what it cannot use."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from relay.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AT = "2026-11-30T20:17:35.616211Z"


@pytest.fixture
def api() -> Iterator[Callable[[int, dict[str, Any]], str]]:
    """Start something that answers every POST alike, and every GET as a delivery; called, it returns its URL."""
    servers = []

    def start(status: int, value: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(status, value)

            def do_GET(self) -> None:
                attempts = [{"at": AT, "class": "success", "status": 200}]
                ids = {"id": "d", "event_id": "e", "endpoint_id": "p", "created_at": AT, "reason": None}
                self.answer(200, {**ids, "status": "delivered", "attempt_count": 1, "attempts": attempts})

            def answer(self, code: int, body: dict[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(code)
                # A problem is Relay's where it has a code; what stands in front of it answers JSON, too.
                self.send_header("Content-Type", "application/problem+json" if "code" in body else "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(url: str, *arguments: str) -> tuple[int, str, str]:
    """Run the command; return its exit code and what it said on stdout and stderr."""
    result = CliRunner().invoke(main, ["send", "a.b", "--url", url, *arguments], env={"RELAY_API_KEY": "rk_x"})
    return result.exit_code, result.stdout, result.stderr


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    """`--data @missing` says which file and why, and exits with 1; nothing is sent."""
    for path in (tmp_path / "missing.json", tmp_path):
        code, _, said = send("http://127.0.0.1:1", "--data", f"@{path}")

        assert (code, said.count("\n")) == (1, 1)
        assert said.startswith(f"relay: --data: '{path}' cannot be read (")


def test_a_fault_is_told_once(api: Callable[[int, dict[str, Any]], str]) -> None:
    """Of one field at fault the detail is shown, which names it; of several each of them."""
    errors = [{"field": "body", "message": "The body is not JSON", "code": "invalid_json"}]
    url = api(400, {"code": "x", "detail": "The body is not JSON", "errors": errors})
    assert send(url, "--data", "{")[2] == "relay: 400 The body is not JSON\n"

    errors = [{"field": name, "message": f"{name} is bad", "code": "x"} for name in ("a", "b")]
    url = api(400, {"code": "x", "detail": "a: a is bad (1 more in errors)", "errors": errors})
    assert send(url)[2] == "relay: 400 a: a is bad; b: b is bad\n"

    assert send(api(401, {"code": "x", "detail": "No key came"}))[2] == "relay: 401 No key came\n"
    code, _, said = send(api(418, {"message": "from a proxy"}), "--idempotency-key", "k")
    assert (code, said.count("\n"), said.count("key")) == (3, 1, 1)
    assert '{"message": "from a proxy"}' in said
    assert said.endswith(" (sent again with --idempotency-key k it counts once)\n")


@pytest.mark.parametrize(("count", "counted"), [(0, "0 deliveries"), (1, "1 delivery"), (2, "2 deliveries")])
def test_deliveries_are_counted_in_good_english(
    api: Callable[[int, dict[str, Any]], str], count: int, counted: str
) -> None:
    """One delivery is no deliveries, and one attempt no attempts."""
    planned = [{"id": "d", "endpoint_id": "p"}] * count
    url = api(202, {"id": "e", "type": "a.b", "created_at": AT, "deliveries": planned})

    code, said, _ = send(url)

    assert code == 0
    assert said.splitlines() == [f"event e accepted, {counted}"] + ["  d  delivered after 1 attempt: HTTP 200"] * count
