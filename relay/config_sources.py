"""Reads the settings from where they come: the environment, a `.env` file, and what `relay up` makes.

Every fault is named at once, each with its variable and its remedy, and none shows a secret.
"""

from __future__ import annotations

import difflib
import re
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from dotenv.parser import parse_stream
from pydantic import ValidationError

from relay.config import Settings, describe, variable_of
from relay.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_PREFIX: Final = "RELAY_"
#: Kubernetes tells every container of its namespace's services: one called relay-api makes RELAY_API_PORT and more.
_SERVICE_LINK: Final = re.compile(
    r"RELAY(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def load_settings(
    environ: Mapping[str, str], *, dotenv: Path | None = None, preset: Mapping[str, str] | None = None
) -> Settings:
    """The settings of `environ`; then of the `.env` file, if there is one; then of `preset` (what `relay up` makes).

    An empty value counts as unset, and hides one of a lower source. White space around a value is dropped. Values in
    the file are taken as they stand: `${NAME}` is not replaced. Other programs' variables are not looked at.

    Raises ConfigurationError with a line for every fault, each naming its variable and what to do about it.
    """
    faults: list[str] = []
    layers = [("preset", preset or {}), (".env", _read_dotenv(dotenv, faults)), ("environment", environ)]
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    fields = {variable_of(name): name for name in Settings.model_fields}
    for source, layer in layers:
        for variable, text in layer.items():
            if variable in fields:
                values[fields[variable]] = text.strip()
                sources[fields[variable]] = source
            elif variable.upper().startswith(_PREFIX) and not _SERVICE_LINK.fullmatch(variable):
                faults.append(_unknown(variable, fields))
    values = {name: text for name, text in values.items() if text}

    settings, wrong = _build(values, faults)
    if settings is None and wrong:
        # Rules between settings are judged on the sound ones, so that one start names everything.
        settings, _ = _build({name: text for name, text in values.items() if name not in wrong}, faults, ignore=wrong)
    if faults or settings is None:
        raise ConfigurationError("the settings cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))
    settings.note_sources({name: source for name, source in sources.items() if name in values})
    return settings


def _build(
    values: Mapping[str, str], faults: list[str], ignore: Iterable[str] = ()
) -> tuple[Settings | None, set[str]]:
    """Settings from raw texts; else None and the faulty fields, a line for each added to `faults`.

    Rules that concern a field of `ignore` say nothing: its value is not the one that was given.
    """
    try:
        return Settings(**values), set()  # type: ignore[arg-type]  # texts: the fields' validators make values of them
    except ValidationError as error:
        wrong: set[str] = set()
        for item in error.errors(include_url=False):
            if item["type"] == "contradiction":
                faults += [text for names, text in item["ctx"]["faults"] if not set(names) & set(ignore)]
            elif item["type"] != "default_factory_not_called" and (name := str(item["loc"][0])) not in wrong:
                wrong.add(name)
                faults.append(_fault(name, values.get(name, ""), dict(item)))
        return None, wrong


def _fault(name: str, given: str, item: Mapping[str, Any]) -> str:
    """One field's fault as a line for the operator. Never shows a secret."""
    context = item.get("ctx", {})
    kind = item["type"]
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "less_than_equal": ("at most", "le"),
        "greater_than": ("above", "gt"),
    }
    if kind in bounds:
        word, key = bounds[kind]
        remedy = f"must be {word} {context[key]}"
    elif kind == "value_error":
        remedy = str(context["error"])
    elif kind == "literal_error":
        remedy = f"must be {context['expected']}"
    elif kind == "string_pattern_mismatch":
        remedy = f"must match {context['pattern']}"
    else:
        words = {"int": "must be a whole number", "float": "must be a number", "finite": "must be a number"}
        words["bool"] = "must be true or false"
        remedy = words.get(kind.partition("_")[0], "must be readable UTF-8 text")
    secret = any(d.secret for d in describe() if d.variable == variable_of(name))
    return f"{variable_of(name)}{'' if secret else f'={given[:80]!r}'}: {remedy}"


def _unknown(variable: str, known: Iterable[str]) -> str:
    shown = variable[:80].encode("ascii", "backslashreplace").decode()
    # What nearly all begin with makes none of them near.
    bare = {name.removeprefix(_PREFIX): name for name in known}
    near = difflib.get_close_matches(variable.upper().removeprefix(_PREFIX), bare, n=1, cutoff=0.6)
    return f"{shown}: there is no such setting" + (f"; did you mean {bare[near[0]]}?" if near else ": remove it")


def _read_dotenv(path: Path | None, faults: list[str]) -> dict[str, str]:
    """The file's variables, the last of equal ones; a line in `faults` for what cannot be read. Absent: none."""
    if path is None or not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{path}: cannot be read as UTF-8 text ({type(error).__name__})")
        return {}
    found: dict[str, str] = {}
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            faults.append(f"{path}, line {binding.original.line}: must be NAME=value")
        elif binding.key is not None:
            found[binding.key] = binding.value or ""
    return found
