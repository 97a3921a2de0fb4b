"""The pages on the client and the commands against the code."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

import click
import pytest

from relay import client
from relay.cli import doctor_around, doctor_database
from relay.cli.main import main
from relay.client.endpoints import Endpoints
from relay.client.history import Deliveries, Events, Jobs, Replays
from relay.core.model import Signing
from relay.core.signing import signature_headers, signing_key

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLIENT = (DOCS / "client.md").read_text("utf-8")
CLI = (DOCS / "cli.md").read_text("utf-8")


def test_the_page_of_the_client_has_every_call_and_error() -> None:
    """What can be called and what can be raised is named there."""
    called = {
        f"`{name}" if cls is client.Relay else name
        for cls in (client.Relay, Endpoints, Deliveries, Events, Jobs, Replays)
        for name, member in vars(cls).items()
        if not name.startswith("_") and callable(member) and name != "close"
    }
    raised = [name for name in client.__all__ if isinstance(getattr(client, name), type) and "Error" in name]
    raised += ["Conflict", "Forbidden", "InvalidRequest", "NotFound", "NotVerified", "ServerFault", "Unreachable"]

    assert [name for name in [*sorted(called), *raised] if name not in CLIENT and name != "FieldError"] == []


def signed(secret: str, body: bytes) -> dict[str, str]:
    """The headers that Relay signs a body with."""
    lines = signature_headers(
        Signing.RELAY,
        secrets=[signing_key(Signing.RELAY, secret)],
        delivery_id="d",
        event_id="e",
        event_type="a.b",
        attempt=1,
        timestamp=int(time.time()),
        body=body,
    )
    return dict(line.split(": ", 1) for line in lines)


def test_the_printed_receiver_verifies() -> None:
    """The example takes what Relay signs, and answers 401 to the rest."""
    found = re.search(r"^```python\n(from flask.*?)^```$", CLIENT, re.MULTILINE | re.DOTALL)
    assert found is not None
    shown: dict[str, Any] = {"__name__": __name__}
    exec(compile(found[1], "docs/client.md", "exec"), shown)
    body = b'{"amount": 4999}'
    headers = signed(shown["SECRET"], body)
    receiver = shown["app"].test_client()

    assert receiver.post("/webhooks", data=body, headers=headers).status_code == 204
    assert receiver.post("/webhooks", data=body + b" ", headers=headers).status_code == 401


def test_the_page_of_commands_has_every_command() -> None:
    """All but the roles, with what is under them; and every check of the doctor."""
    context = click.Context(main)
    roles = {"api", "publisher", "worker", "beat", "flower", "migrate", "up", "testkit"}
    assert roles < set(main.list_commands(context))
    for name in set(main.list_commands(context)) - roles:
        command = main.get_command(context, name)
        row = re.search(rf"^\| `relay {name}\b.*$", CLI, re.MULTILINE)
        assert row is not None, name
        if isinstance(command, click.Group):
            assert [one for one in command.commands if not re.search(rf"[` ]{one}`", row[0])] == []
    source = "".join(Path(str(module.__file__)).read_text("utf-8") for module in (doctor_around, doctor_database))
    checks = set(re.findall(r'(?:\b(?:ok|warn|fail|judge_clock)\()"([^"]+)"', source))
    assert len(checks) > 12
    assert [one for one in sorted(checks) if f"`{one}`" not in CLI] == []


def typed(text: str) -> list[str]:
    """The `relay` commands in a page's listings, one as it would be typed, what is piped or redirected left out."""
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    found = [re.search(r"(?:^|\$\(|\| |\bdo |xargs -r )(relay (?!up\b).*)", line) for line in lines]
    return [re.split(r" \| | > |  #|\)\"|; done", one[1])[0] for one in found if one is not None]


@pytest.mark.parametrize("name", ["quickstart", "cli", "jobs"])
def test_the_printed_commands_can_be_typed(name: str) -> None:
    """Commands, options and arguments are such as there are; nothing is run."""
    for line in typed((DOCS / f"{name}.md").read_text("utf-8")):
        words = shlex.split(line)[1:]
        command: click.Command = main
        context = click.Context(main)
        while isinstance(command, click.Group):
            _, found, words = command.resolve_command(context, words)
            assert found is not None, line
            command = found
        command.make_context(line, words)


def test_the_first_receiver_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the first ten minutes takes what Relay signs, says when it is broken, and answers 401 to the rest."""
    page = (DOCS / "quickstart.md").read_text("utf-8")
    found = re.search(r"^```python\n(from pathlib.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    shown: dict[str, Any] = {"__name__": __name__}
    exec(compile(found[1], "docs/quickstart.md", "exec"), shown)
    monkeypatch.chdir(tmp_path)
    secret, body = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", b'{"amount": 1}'
    Path("secret").write_text(secret + "\n")
    receiver = shown["app"].test_client()

    def answer(given: bytes) -> int:
        return int(receiver.post("/hooks", data=given, headers=signed(secret, body)).status_code)

    assert (answer(body), answer(body + b" ")) == (204, 401)
    Path("broken").touch()
    assert answer(body) == 503
