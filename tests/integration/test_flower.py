"""Flower as `relay flower` runs it: for looking, behind its login, with nothing in it that is secret."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import requests
from flower import urls

from relay.config_sources import load_settings
from tests.stack import Stack, quiet_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGIN = ("looker", "a-long-password")
#: What asks for no login: the looks of the login page.
_STATIC = ("/static/", "/login")


@pytest.fixture
def flower(database: str, broker: str) -> Iterator[tuple[Stack, str]]:
    """A `relay flower`, with an environment that would open it, and its URL."""
    port = quiet_port()
    with Stack(database_url=database, broker_url=broker) as stack:
        role = stack.launch(
            "flower",
            RELAY_FLOWER_BIND=f"127.0.0.1:{port}",
            RELAY_FLOWER_AUTH=":".join(LOGIN),
            FLOWER_UNAUTHENTICATED_API="true",
            FLOWER_READ_ONLY="false",
        )
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(url) or not role.alive, 60, "Flower answers")
        assert role.alive, role.tail()
        yield stack, url


def test_flower_shows_to_who_logs_in_and_does_nothing(flower: tuple[Stack, str]) -> None:
    """Each route of Flower's own table is refused without the login; with it none of those that do something is there,
    and no page has the broker's password."""
    stack, url = flower
    routes = [str((getattr(one, "regex", None) and one.regex.pattern) or one[0]) for one in urls.handlers]
    paths = [route.rstrip("$").replace("/?", "").replace("(.+)", "x").replace("(.*)", "x") for route in routes]
    paths = [path for path in paths if path != ".*" and not path.startswith(_STATIC) and not path.startswith("/logout")]
    assert {"/api/task/apply/x", "/api/worker/shutdown/x", "/metrics", "/healthcheck", "/tasks"} <= set(paths)
    for path in paths:
        for method in ("GET", "POST"):
            answer = requests.request(method, url + path, timeout=10, allow_redirects=False)
            assert answer.status_code in {401, 403, 404, 405}, (method, path, answer.status_code)
    for path in ("/metrics", "/healthcheck", "/api/task/apply/relay.reap", "/api/task/send-task/relay.reap"):
        for method in ("GET", "POST"):
            answer = requests.request(method, url + path, auth=LOGIN, timeout=10)
            assert answer.status_code in {403, 404, 405}, (method, path, answer.status_code)
    assert requests.post(f"{url}/api/worker/shutdown/x", auth=LOGIN, timeout=10).status_code in {403, 404}

    assert requests.get(f"{url}/api/tasks", auth=LOGIN, timeout=10).json() == {}
    password = urlsplit(stack.broker_url).password
    assert password
    for path in ("/", "/workers", "/tasks", "/broker"):
        page = requests.get(url + path, auth=LOGIN, timeout=20)
        assert page.status_code == 200, (path, page.text[-500:])
        assert password not in page.text
        assert LOGIN[1] not in page.text
    assert requests.get(f"{url}/", auth=("looker", "wrong"), timeout=10).status_code == 401


def test_flower_is_not_run_open(database: str, broker: str) -> None:
    """Without a login it does not start, and by default it listens on loopback alone."""
    with Stack(database_url=database, broker_url=broker) as stack:
        role = stack.launch("flower")
        assert role.process.wait(60) == 1
    assert socket.inet_aton(load_settings({}).flower_bind.host)[0] == 127


def _answers(url: str) -> Any:
    try:
        return requests.get(url, timeout=5).status_code
    except requests.ConnectionError:
        return None
