"""The manual's page of settings, made from the settings themselves: `relay config --markdown`, docs/configuration.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config import describe

if TYPE_CHECKING:
    from relay.config import Described

_HEAD = """\
# Settings

<!-- Made by `relay config --markdown`. Change the descriptions in relay/config.py, then make this file again. -->

A process reads its settings once, when it starts: from the environment, then from a file `.env` in the folder that it
is started in, then from what `relay up` presets. An empty value counts as unset. A value is taken as it stands:
`${NAME}` in `.env` is not replaced.

All faults are reported at once, and a process with a fault does not start. A variable that begins with `RELAY_` and
is no setting is a fault too, with the nearest name that is one; those that Kubernetes makes for services called
`relay-…` are passed over. `relay config` prints what is in force and where each value comes from; secrets are hidden.
It knows nothing of what `relay up` presets: it shows what a role would run with that you start yourself, here.

Lists are separated by commas or white space. Settings marked *secret* are never printed or logged.

| variable | default | what |
|---|---|---|
"""

_IN_PART = """
## With less effect than the name promises

- `RELAY_EGRESS_PROXY` leaves some of the address policy to the proxy: see [security.md](security.md#egress-proxy).
- `RELAY_URL` and `RELAY_API_KEY` are for the [client](client.md), which reads the environment, and for the
  [commands](cli.md), which read `.env` and `.relay/dev.env` after it. No role reads them.
- `RELAY_DB_POOL` is for API processes: so many connections each, of which a quarter, but three at least, are kept for
  what is not ingest, and one more while `/readyz` looks. A worker has `RELAY_WORKER_THREADS` + 8 at most, a publisher 4.
"""


def markdown() -> str:
    """Return the page, whole, as docs/configuration.md holds it."""
    rows = "".join(_row(one) for one in describe())
    return _HEAD + rows + _IN_PART


def _row(one: Described) -> str:
    """Return a setting's line of the table."""
    description = _cell(one.description) + (" *Secret.*" if one.secret else "")
    return f"| `{one.variable}` | {_cell(one.default) or 'none'} | {description} |\n"


def _cell(text: str) -> str:
    """Spell text for a table's cell."""
    return text.replace("|", "\\|").replace("*", "\\*")
