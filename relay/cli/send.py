"""`relay send`: one event over the HTTP API, and what becomes of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import requests

from relay.core.errors import ConfigurationError, InvalidInput

#: Written by `relay up`, and read here when nothing else says where the API is.
DEV_ENV = Path(".relay/dev.env")
#: Seconds for one request.
TIMEOUT_SECS = 10
#: A delivery has come to rest in these.
SETTLED = frozenset({"delivered", "dead", "canceled"})


def send_event(event_type: str, *, data: str | None, url: str | None, wait: float) -> int:
    """Send and report; return 0 when all deliveries were made, 1 when one failed for good or the API said no, 2 when
    some are still under way after `wait` seconds.

    Raises ConfigurationError where it is not known where the API is, InvalidInput where `data` names no file to read.
    """
    base, key = _target(url)
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {key}"
    body = _payload(data)
    try:
        answer = session.post(
            f"{base}/v1/events",
            data=body,
            headers={"Content-Type": "application/json", "Relay-Event-Type": event_type},
            timeout=TIMEOUT_SECS,
        )
        if answer.status_code != 202:
            click.echo(f"relay: {_problem(answer)}", err=True)
            return 1
        event = answer.json()
        click.echo(f"event {event['id']} accepted, {_counted(len(event['deliveries']), 'delivery', 'deliveries')}")
        return _watch(session, base, [delivery["id"] for delivery in event["deliveries"]], wait)
    except (requests.ConnectionError, requests.Timeout):
        click.echo(f"relay: no API answers at {base}: is `relay up` or `relay api` running?", err=True)
        return 1


def _watch(session: requests.Session, base: str, ids: list[str], wait: float) -> int:
    deadline = time.monotonic() + wait
    waiting = list(ids)
    failed = False
    while waiting and time.monotonic() < deadline:
        for id_ in list(waiting):
            delivery = session.get(f"{base}/v1/deliveries/{id_}", timeout=TIMEOUT_SECS).json()
            if delivery.get("status") in SETTLED:
                waiting.remove(id_)
                failed = failed or delivery["status"] != "delivered"
                click.echo(_line(delivery))
        if waiting:
            time.sleep(0.1)
    for id_ in waiting if wait else ():
        click.echo(f"  {id_}  still under way")
    return 1 if failed else 2 if waiting and wait else 0


def _line(delivery: dict[str, Any]) -> str:
    last = delivery["attempts"][-1] if delivery["attempts"] else {}
    answered = f"HTTP {last['status']}" if last.get("status") else last.get("error") or "no attempt"
    attempts = _counted(delivery["attempt_count"], "attempt", "attempts")
    return f"  {delivery['id']}  {delivery['status']} after {attempts}: {answered}"


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _target(url: str | None) -> tuple[str, str]:
    known = _read_env(DEV_ENV) | _read_env(Path(".env")) | dict(os.environ)
    base, key = url or known.get("RELAY_URL"), known.get("RELAY_API_KEY")
    if not base or not key:
        raise ConfigurationError("set RELAY_URL and RELAY_API_KEY, or run `relay up` in this folder first")
    return base.rstrip("/"), key


def _read_env(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def _payload(data: str | None) -> bytes:
    if data is None:
        return json.dumps({"sent_by": "relay send", "at": time.time()}).encode()
    if data == "-":
        return sys.stdin.buffer.read()
    if data.startswith("@"):
        try:
            return Path(data[1:]).read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidInput(
                f"--data: {data[1:]!r} cannot be read ({reason}): name another file", field="data"
            ) from None
    return data.encode()


def _problem(answer: requests.Response) -> str:
    try:
        problem = answer.json()
        errors = problem.get("errors", [])
        # The detail tells the first of them already.
        told = [f"{error['field']}: {error['message']}" for error in errors] if len(errors) > 1 else [problem["detail"]]
        return f"{answer.status_code} {'; '.join(told)}"
    except (ValueError, KeyError):
        return f"{answer.status_code} {answer.text[:200]}"
