"""How the commands show what the API answered: tables for people, JSON for programs.

What comes from elsewhere (URLs, receivers' answers) is never handed to a terminal as it is: it could control it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any, Final

import click

from relay.client import Job
from relay.client.transport import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from relay.client import Delivery

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Moment(click.ParamType[datetime]):
    """A time, as RFC 3339, or as so long ago: `90s`, `30m`, `2h`, `7d`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Read one; `now` is this machine's."""
        if isinstance(value, datetime):
            return value
        if ago := re.fullmatch(r"(\d{1,6})([smhd])", value):
            return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time: write 2026-01-31T12:00:00Z, or 2h for two hours ago", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no offset: write Z or +01:00 after it", param, ctx)
        return moment


def read_secret(file: IO[str] | None) -> str | None:
    """Read what `--secret-file` names, if it was given. Raises click's BadParameter for what is no text."""
    try:
        return None if file is None else file.read().strip()
    except UnicodeDecodeError:
        raise click.BadParameter("the file is not UTF-8 text", param_hint="--secret-file") from None


def show_json(value: object) -> None:
    """Print a value of the client's as one line of JSON."""
    click.echo(json.dumps(plain(value), separators=(",", ":")))


def plain(value: object) -> Any:
    """Turn a value of the client's into JSON's own types, under the API's names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name.removesuffix("_"): plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        # A secret is there once, and an endpoint without one has no such field.
        return {name: shown for name, shown in fields.items() if name != "secret" or shown is not None}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value


def show_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: drawn on a terminal, else a line each with tabs between."""
    wanted = iter(rows)
    # Rows come as they are asked for: where the first one fails, there is no table.
    first = list(itertools.islice(wanted, 1))
    texts = ([cell(one) for one in row] for row in itertools.chain(first, wanted))
    if not sys.stdout.isatty():
        click.echo("\t".join(names))
        for row in texts:
            click.echo("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        # Ids and times are copied by hand: whole, on one line.
        table.add_column(name, no_wrap=name in {"id", "endpoint", "created", "at"}, overflow="fold")
    for row in texts:
        table.add_row(*(Text(one) for one in row))
    Console().print(table)


def show_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values, a line each; those without a value are left out."""
    shown = [(name, cell(value)) for name, value in pairs if value is not None and value not in ("", (), [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        click.echo(f"{name:<{width}}  {text}")


def cell(value: object) -> str:
    """One value as text for people, safe for a terminal."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return printable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return ", ".join(cell(one) for one in value)
    return printable(str(value))


def standing(one: Delivery | Job) -> str:
    """Say how a delivery or a job stands, in the API's word."""
    return one.state if isinstance(one, Job) else one.status


def counted(count: int, one: str, more: str) -> str:
    """`1 delivery`, `2 deliveries`."""
    return f"{count} {one if count == 1 else more}"
