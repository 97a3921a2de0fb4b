"""`relay up` from nothing: everything runs, shows itself, stops without a trace, and is found again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import requests

from relay.embedded.home import discard
from tests.stack import quiet_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds for all to be there: two servers made from nothing and eight processes, on a busy machine.
START_SECS = 90.0

#: What the tests started, so that none is left behind by one that fails.
_started: list[subprocess.Popen[bytes]] = []


class Up:
    """One `relay up` in a directory."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        kept = {name: value for name, value in os.environ.items() if name != "DATABASE_URL" and name[:6] != "RELAY_"}
        binds = {f"RELAY_{name}_BIND".replace("_API", ""): f"127.0.0.1:{port}" for name, port in ports.items()}
        self.url = f"http://127.0.0.1:{ports['API']}"
        self._output = folder / "up.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relay.cli.main", "up", "--workers", "1"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=kept | binds,
                cwd=folder,
                start_new_session=True,
            )
        _started.append(self.process)

    def ready(self) -> None:
        """Wait until it has said what to do next, and /readyz says 200."""
        wait_until(lambda: self.curl_lines() or self.process.poll() is not None, START_SECS, "it greets")
        wait_until(lambda: self._status("/readyz") == 200 or self.process.poll() is not None, START_SECS, "all is up")
        assert self.process.poll() is None, self.text()[-3000:]

    def text(self) -> str:
        """What it printed."""
        return self._output.read_text("utf-8", "replace")

    def curl_lines(self) -> list[dict[str, Any]]:
        """The printed curl commands, as arguments of `requests.request`."""
        commands = re.findall(r"^curl -s (.+?)(?<!\\)$", self.text(), re.MULTILINE | re.DOTALL)
        return [_request(shlex.split(command.replace("\\\n", " "))) for command in commands]

    def family(self) -> list[psutil.Process]:
        """It and everything that it started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def _status(self, path: str) -> int | None:
        try:
            return requests.get(self.url + path, timeout=5).status_code
        except requests.RequestException:
            return None


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for `relay up`; whatever runs in it afterwards is ended."""
    folder = Path(tempfile.mkdtemp(prefix="relay-up-"))
    try:
        yield folder
    finally:
        left = [one for one in psutil.process_iter() if _works_in(one, folder)]
        for one in left:
            one.kill()
        psutil.wait_procs(left, timeout=10)
        while _started:
            _started.pop().wait(10)
        discard(folder / ".relay")
        discard(folder)


@pytest.fixture
def ports() -> dict[str, int]:
    """Ports for everything that listens; workers take those that follow the publisher's."""
    return {name: quiet_port() for name in ("API", "METRICS", "TESTKIT", "FLOWER")}


def test_up_delivers_stops_and_finds_its_data_again(place: Path, ports: dict[str, int]) -> None:
    """The printed commands work as they stand; Ctrl-C ends every process and frees the lock; the next start has it all,
    and obeys what `.env` says by then, in every process: it comes before what `relay up` presets."""
    up = Up(place, ports)
    up.ready()
    create, post, read = up.curl_lines()
    assert requests.request(**create, timeout=10).status_code == 201
    answer = requests.request(**post, timeout=10)
    assert answer.status_code == 202, answer.text
    delivery_id = answer.json()["deliveries"][0]["id"]
    read["url"] = read["url"].replace("ID", delivery_id)
    wait_until(lambda: requests.request(**read, timeout=10).json()["status"] == "delivered", 30, "it is delivered")
    came = requests.get(f"http://127.0.0.1:{ports['TESTKIT']}/_requests?path=/verify", timeout=5).json()["requests"]
    assert [(one["delivery_id"], one["status"], one["verified"]) for one in came] == [(delivery_id, 200, True)]
    _flower_shows_tasks(place, ports["FLOWER"], post)

    family = up.family()
    assert len(family) >= 9
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.text()[-3000:]
    assert [one for one in family if one.is_running()] == []
    assert not list((place / ".relay").glob("*.lock"))

    (place / ".env").write_text("RELAY_ALLOW_PRIVATE_ENDPOINTS=false\nRELAY_ADMIN_KEY=from-the-file-of-here\n")
    again = Up(place, ports)
    again.ready()
    assert requests.request(**read, timeout=10).json()["status"] == "delivered"
    refused = requests.post(
        f"{again.url}/v1/endpoints",
        json={"url": "http://127.0.0.1:9/"},
        headers={"Authorization": f"Bearer {_kept(place, 'RELAY_API_KEY')}"},
        timeout=5,
    )
    assert refused.status_code == 400, refused.text
    listed = requests.get(
        f"{again.url}/v1/workspaces", headers={"Authorization": "Bearer from-the-file-of-here"}, timeout=5
    )
    assert listed.status_code == 200, listed.text
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(60) == 0, again.text()[-3000:]


def test_up_killed_leaves_nothing_running(place: Path, ports: dict[str, int]) -> None:
    """kill -9 of `relay up`: what it started ends by itself, and the next start works on the same data."""
    up = Up(place, ports)
    up.ready()
    create, post, _ = up.curl_lines()
    assert requests.request(**create, timeout=10).status_code == 201
    assert requests.request(**post, timeout=10).status_code == 202
    family = up.family()
    up.process.kill()
    up.process.wait(10)
    gone, left = psutil.wait_procs(family, timeout=60)
    assert left == [], [one.cmdline() for one in left]
    assert len(gone) == len(family)

    again = Up(place, ports)
    again.ready()
    _, post_again, _ = again.curl_lines()
    assert post_again == post
    assert len(requests.request(**post_again, timeout=10).json()["deliveries"]) == 1
    family = again.family()
    again.process.send_signal(signal.SIGINT)
    assert again.process.wait(60) == 0, again.text()[-3000:]
    assert [one for one in family if one.is_running()] == []


def _flower_shows_tasks(place: Path, port: int, post: dict[str, Any]) -> None:
    """Flower lists `relay.deliver` to who logs in, and nothing to who does not. It sees what happens while it looks."""
    login = re.search(r"^RELAY_FLOWER_AUTH=(.+):(.+)$", (place / ".relay/generated.env").read_text(), re.MULTILINE)
    assert login is not None
    url = f"http://127.0.0.1:{port}/api/tasks?taskname=relay.deliver"
    wait_until(lambda: _answers(url), 30, "Flower answers")
    assert requests.get(url, timeout=10).status_code == 401
    assert requests.get(url, auth=("relay", "wrong"), timeout=10).status_code == 401

    def shown() -> list[Any]:
        assert requests.request(**post, timeout=10).status_code == 202
        tasks = requests.get(url, auth=(login[1], login[2]), timeout=10).json()
        return [task for task in tasks.values() if task["name"] == "relay.deliver" and task["state"] == "SUCCESS"]

    wait_until(shown, 30, "Flower shows relay.deliver")


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code > 0
    except requests.RequestException:
        return False


def _request(words: list[str]) -> dict[str, Any]:
    """Read a curl command line."""
    request: dict[str, Any] = {"method": "GET", "url": words[0], "headers": {}}
    for option, value in zip(words[1::2], words[2::2], strict=True):
        if option == "-H":
            name, _, text = value.partition(": ")
            request["headers"][name] = text
        else:
            assert option == "-d", option
            request |= {"method": "POST", "data": value}
    return request


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


def test_a_taken_port_is_named_at_start(place: Path, ports: dict[str, int]) -> None:
    """What cannot be listened on is said at once, all of it, and nothing is left running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports["FLOWER"]))
        taken.listen()
        up = Up(place, ports)
        assert up.process.wait(START_SECS) == 1

    assert f"RELAY_FLOWER_BIND=127.0.0.1:{ports['FLOWER']}" in up.text()
    assert "Traceback" not in up.text()


def _kept(place: Path, name: str) -> str:
    lines = (place / ".relay" / "dev.env").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))
