"""What `relay doctor` finds: a verdict on each thing, what was seen, and what to do where it is not well."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How a thing is. Only `FAIL` makes the command end with 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `remedy` is empty where it is well."""

    check: str
    verdict: Verdict
    said: str
    remedy: str = ""


def ok(check: str, said: str) -> Finding:
    """It is well."""
    return Finding(check=check, verdict=Verdict.OK, said=said)


def warn(check: str, said: str, remedy: str) -> Finding:
    """It works, and will surprise somebody."""
    return Finding(check=check, verdict=Verdict.WARN, said=said, remedy=remedy)


def fail(check: str, said: str, remedy: str) -> Finding:
    """Deliveries suffer from it, or do not go at all."""
    return Finding(check=check, verdict=Verdict.FAIL, said=said, remedy=remedy)
