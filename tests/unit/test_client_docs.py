"""The pages on the client and the commands against the code."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

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


def test_the_printed_receiver_verifies() -> None:
    """The example takes what Relay signs, and answers 401 to the rest."""
    found = re.search(r"^```python\n(from flask.*?)^```$", CLIENT, re.MULTILINE | re.DOTALL)
    assert found is not None
    shown: dict[str, Any] = {"__name__": __name__}
    exec(compile(found[1], "docs/client.md", "exec"), shown)
    body = b'{"amount": 4999}'
    lines = signature_headers(
        Signing.RELAY,
        secrets=[signing_key(Signing.RELAY, shown["SECRET"])],
        delivery_id="d",
        event_id="e",
        event_type="a.b",
        attempt=1,
        timestamp=int(time.time()),
        body=body,
    )
    headers = dict(line.split(": ", 1) for line in lines)
    receiver = shown["app"].test_client()

    assert receiver.post("/webhooks", data=body, headers=headers).status_code == 204
    assert receiver.post("/webhooks", data=body + b" ", headers=headers).status_code == 401


def test_the_page_of_commands_has_every_command() -> None:
    """Those that talk to the API, with what is under them; and every check of the doctor."""
    context = click.Context(main)
    for name in ("send", "endpoints", "deliveries", "events", "replay", "listen", "doctor", "completion"):
        command = main.get_command(context, name)
        row = re.search(rf"^\| `relay {name}\b.*$", CLI, re.MULTILINE)
        assert row is not None, name
        if isinstance(command, click.Group):
            assert [one for one in command.commands if f"`{one}`" not in row[0]] == []
    source = "".join(Path(str(module.__file__)).read_text("utf-8") for module in (doctor_around, doctor_database))
    checks = set(re.findall(r'(?:\b(?:ok|warn|fail|judge_clock)\()"([^"]+)"', source))
    assert len(checks) > 12
    assert [one for one in sorted(checks) if f"`{one}`" not in CLI] == []
