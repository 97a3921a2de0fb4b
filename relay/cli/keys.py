"""`relay keys rotate`: seal every secret with the first master key, while everything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from relay.bootstrap.policies import make_vault
from relay.config import require
from relay.core.errors import ConfigurationError
from relay.store import heartbeats, schema
from relay.store.engine import make_engine
from relay.store.sealed_values import PLACES, Tally, reseal_batch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import sqlalchemy as sa

    from relay.config import Settings
    from relay.config_values import MasterKey
    from relay.store.heartbeats import LiveProcess
    from relay.store.vault import Vault

#: Rows of one transaction: others wait for it no longer than some tens of milliseconds.
BATCH: Final = 200
#: Seconds since its last beat for which a process counts as running: six beats.
LIVE_SECS: Final = 30.0
#: Walks over all values; each after the first takes what was written during the one before.
MOST_PASSES: Final = 5


def rotate(settings: Settings) -> int:
    """Seal anew, say what was done and which keys may go; return 1 where a value does not open or was not reached.

    Raises ConfigurationError where a process runs that could not open what would be sealed here.
    """
    keys = [key.id for key in settings.master_keys]
    if not keys:
        raise ConfigurationError("RELAY_MASTER_KEYS is not set: give the list that the workers have, the new key first")
    engine = make_engine(require(settings.database_url, "DATABASE_URL"), name="keys", size=1)
    try:
        with engine.connect() as connection:
            schema.check(connection)
        vault = make_vault(settings)
        resealed = 0
        for _ in range(MOST_PASSES):
            refuse_lacking(_live(engine), settings.master_keys[0])
            tally = _walk(engine, vault)
            resealed += tally.resealed
            if not tally.resealed and not tally.missed:
                break
        _report(keys, tally, resealed)
        older = sealing_otherwise(_live(engine), keys[0])
        _say_what_may_go(keys, tally, older)
        return 1 if tally.unreadable or tally.missed or older else 0
    finally:
        engine.dispose()


def refuse_lacking(processes: Sequence[LiveProcess], first: MasterKey) -> None:
    """Raise ConfigurationError where a running process cannot open what the key `first` seals.

    Workers open every secret. An API process only seals, but without this key it goes on doing so with an older one;
    one without any keys seals nothing and is passed over.
    """
    lacking = []
    for process in processes:
        held = process.details.get("master_keys")
        if process.role not in {"worker", "api"} or (process.role == "api" and held == []):
            continue
        if not isinstance(held, list):
            lacking.append(f"{_named(process)} (of a release that does not say which keys it has)")
        elif first.id not in [one[0] for one in held]:
            lacking.append(_named(process))
        elif [first.id, first.fingerprint] not in held:
            lacking.append(f"{_named(process)} (has another value under this id)")
    if lacking:
        raise ConfigurationError(
            f"these processes run without the master key {first.id!r}: {', '.join(lacking)}. Add it to their "
            f"RELAY_MASTER_KEYS, second at first, and restart them; one that has just ended is forgotten after "
            f"{LIVE_SECS:.0f} s"
        )


def sealing_otherwise(processes: Sequence[LiveProcess], first: str) -> list[LiveProcess]:
    """Return the running API processes that seal with another key than `first`: new secrets would not be under it."""
    return [process for process in processes if process.role == "api" and _sealing_key(process) not in {None, first}]


def _live(engine: sa.Engine) -> list[LiveProcess]:
    with engine.connect() as connection:
        return heartbeats.live(connection, within_secs=LIVE_SECS)


def _walk(engine: sa.Engine, vault: Vault) -> Tally:
    tally = Tally()
    for place in PLACES:
        after: UUID | None = None
        while True:
            with engine.begin() as connection:
                after = reseal_batch(connection, place, vault, tally, after=after, limit=BATCH)
            if after is None:
                break
    return tally


def _report(keys: Sequence[str], tally: Tally, resealed: int) -> None:
    click.echo(f"{resealed} values were sealed anew with {keys[0]}; {tally.held_by[keys[0]]} are sealed with it now.")
    for one in tally.unreadable:
        click.echo(f"{one.noun} {one.id}: {one.place}: {one.why}", err=True)
    if tally.unreadable:
        click.echo(f"{len(tally.unreadable)} values do not open and stay as they are.", err=True)
    if tally.missed:
        click.echo(f"{tally.missed} rows were written by others each time: run this again.", err=True)


def _say_what_may_go(keys: Sequence[str], tally: Tally, older: Sequence[LiveProcess]) -> None:
    """Say of each older key, and of those that are only named by what they sealed, whether it is needed."""
    seals = {_sealing_key(process): _named(process) for process in older}
    for key in dict.fromkeys([*keys[1:], *tally.held_by]):
        count = tally.held_by[key]
        if key in {keys[0], ""}:
            continue
        if count and key not in keys:
            click.echo(f"{key}: {count} values are sealed with it, and it is not in RELAY_MASTER_KEYS: add it.")
        elif count:
            click.echo(f"{key}: keep it, {count} values are sealed with it.")
        elif key in seals:
            click.echo(f"{key}: keep it, {seals[key]} seals with it: put {keys[0]} first there and run this again.")
        elif tally.missed:
            click.echo(f"{key}: keep it until a run reaches every row.")
        else:
            click.echo(
                f"{key}: nothing is sealed with it. It may go from RELAY_MASTER_KEYS everywhere; keep a copy for as "
                "long as you keep backups of the database from before."
            )


def _sealing_key(process: LiveProcess) -> str | None:
    held = process.details.get("master_keys")
    return str(held[0][0]) if isinstance(held, list) and held else None


def _named(process: LiveProcess) -> str:
    return f"{process.role} {process.host}:{process.pid}"
