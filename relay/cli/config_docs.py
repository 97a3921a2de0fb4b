"""The manual's page of settings, made from the settings themselves: `relay config --markdown`, docs/configuration.md.

A setting whose part is not built is taken and checked, so that a configuration written for a later release starts
here; the page says which those are, and a test holds the list to the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config import describe, variable_of

if TYPE_CHECKING:
    from relay.config import Described

#: Fields that nothing reads yet, each with what it will act on.
NOT_YET = {
    "max_batch_bytes": "batches of events; it is checked against RELAY_MAX_PAYLOAD_BYTES",
    "breaker": "the circuit breaker",
    "breaker_threshold": "the circuit breaker",
    "breaker_cooldown_secs": "the circuit breaker",
    "breaker_max_cooldown_secs": "the circuit breaker",
    "secret_overlap_secs": "rotation of secrets",
    "idempotency_retention_secs": "idempotency keys",
    "retain_attempts_days": "retention: nothing is deleted yet",
    "retain_delivered_days": "retention: nothing is deleted yet",
    "retain_dead_days": "retention: nothing is deleted yet",
    "retain_audit_days": "retention: nothing is deleted yet",
    "max_replays": "replays",
    "auto_disable_after_secs": "disabling of endpoints that only fail",
    "workspace_ingest_rate": "limits on a workspace's rate",
    "telegram_url": "the chat transports",
    "discord_url": "the chat transports",
    "slack_url": "the chat transports",
}

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

Lists are separated by commas or white space. Settings marked *secret* are never printed or logged. Some settings
belong to parts that are not built yet: they are listed at the end.

| variable | default | what |
|---|---|---|
"""

_NOT_YET_HEAD = """
## Without effect in this release

These are read and checked, and nothing acts on them yet:

| variable | waits for |
|---|---|
"""

_IN_PART = """
## With less effect than the name promises

- `RELAY_EGRESS_PROXY` cannot be used in this release: a worker refuses to start with it. See
  [security.md](security.md#egress-proxy).
- `RELAY_URL` and `RELAY_API_KEY` are read by `relay send` alone: from the environment, then from `.env`, then from
  `.relay/dev.env`, each of the two by itself.
- `RELAY_DB_POOL` is for API processes: so many connections each, of which a quarter, but three at least, are kept for
  what is not ingest, and one more while `/readyz` looks. A worker has `RELAY_WORKER_THREADS` + 8 at most, a publisher 4.
"""


def markdown() -> str:
    """Return the page, whole, as docs/configuration.md holds it."""
    rows = "".join(_row(one) for one in describe())
    waiting = "".join(f"| `{variable_of(name)}` | {what} |\n" for name, what in NOT_YET.items())
    return _HEAD + rows + _NOT_YET_HEAD + waiting + _IN_PART


def _row(one: Described) -> str:
    """Return a setting's line of the table."""
    description = _cell(one.description) + (" *Secret.*" if one.secret else "")
    return f"| `{one.variable}` | {_cell(one.default) or 'none'} | {description} |\n"


def _cell(text: str) -> str:
    """Spell text for a table's cell."""
    return text.replace("|", "\\|").replace("*", "\\*")
