"""`relay partitions status`: which days of the attempt log have their partition, and how large they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from relay.config import require
from relay.core.days import days_ahead, partition_name
from relay.store import partitions, schema
from relay.store.engine import make_engine

if TYPE_CHECKING:
    from relay.config import Settings


def show(settings: Settings, *, as_json: bool) -> int:
    """Print the partitions; return 1 where something is wrong: a day ahead lacks, or the default one holds rows."""
    engine = make_engine(require(settings.database_url, "DATABASE_URL"), name="partitions", size=1)
    try:
        with engine.connect() as connection:
            schema.check(connection)
            sizes = partitions.sizes(connection)
            stray = partitions.default_rows(connection)
            today = partitions.today(connection)
    finally:
        engine.dispose()
    wanted = [partition_name(day) for day in days_ahead(today, partitions.DAYS_AHEAD)]
    missing = [name for name in wanted if name not in sizes]
    healthy = not missing and not stray
    if as_json:
        found = {"ok": healthy, "missing": missing, "default_rows": stray, "bytes": sizes}
        click.echo(json.dumps(found))
        return 0 if healthy else 1
    for name, size in sorted(sizes.items()):
        note = " (today)" if name == partition_name(today) else ""
        click.echo(f"{name:<30} {size / 1024:>12,.0f} KiB{note}")
    for name in missing:
        click.echo(f"{name:<30} {'missing':>16}")
    if missing:
        click.echo("Days ahead have no partition: beat and a worker make them within the hour. Are both running?")
    if stray:
        click.echo(f"{stray} rows lie in the default partition: the hourly sweep moves them to their days.")
    return 0 if healthy else 1
