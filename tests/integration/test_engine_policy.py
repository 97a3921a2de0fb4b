"""Every known way to a forbidden address, forced into a request on the real sender (B-81, C-17 to C-23)."""

from __future__ import annotations

import csv
import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from relay.core.address import AddressPolicy, refusal
from relay.core.observation import Fault
from relay.core.url import UrlPolicy
from relay.delivery.resolver import REFUSED_TEXT
from tests.hostile import Sender, request
from tests.nameserver import NameServer, Reply

HERE = pathlib.Path(__file__).parents[1]
PRODUCTION = AddressPolicy()


class _Row(NamedTuple):
    url: str
    answers: tuple[str, ...]
    verdict: str
    rule: str


def _rows() -> list[_Row]:
    with (HERE / "vectors" / "ssrf.csv").open(newline="", encoding="utf-8") as file:
        return [
            _Row(
                json.loads(f'"{row["url_json_escaped"]}"'),
                tuple(answer for answer in row["dns_answers"].split(",") if answer),
                row["verdict"],
                row["rule"],
            )
            for row in csv.DictReader(file)
        ]


def test_forced_urls_are_not_sent() -> None:
    """Each row that is to be refused ends refused or unbuildable; no socket would have been opened for it.

    What the production policy would allow is noted and refused as well, so that nothing leaves the machine.
    """
    for row in _rows():
        would_dial: list[str] = []

        def policy(address: str, would_dial: list[str] = would_dial) -> str:
            rule = refusal(address, PRODUCTION)
            if rule is None:
                would_dial.append(address)
            return rule or "kept in"

        with (
            NameServer(lambda _, row=row: Reply(row.answers) if row.answers else None) as server,  # type: ignore[misc]  # a default binds the row
            Sender(policy=policy, url_policy=UrlPolicy(), name_servers=[server.address]) as sender,
        ):
            seen = sender.send(row.url).observation

        assert seen is not None, row
        assert (seen.sends, seen.remote_address, seen.bytes_sent) == (0, None, 0), row
        if row.verdict == "refuse":
            assert seen.fault in (Fault.REFUSED, Fault.UNBUILDABLE), row
            assert would_dial == [], row
        else:
            assert seen.fault is Fault.REFUSED, row
            assert would_dial, row
        if seen.fault is Fault.REFUSED:
            assert seen.text == REFUSED_TEXT, row


def test_production_policy_end_to_end() -> None:
    """In a network where every address leads to a listener, refused rows reach none and allowed ones their own."""
    rows = _rows()
    results = _in_a_network_of_its_own(rows)
    if results is None:
        # Not permitted here: the same rows without a network, by the test above, and the mixed ones once more.
        results = []
        rows = [row for row in rows if row.verdict == "never-the-private-one"]
        for row in rows:
            dialled: list[str] = []
            with (
                NameServer(lambda _, row=row: Reply(row.answers)) as server,  # type: ignore[misc]  # a default binds the row
                Sender(
                    policy=lambda a, dialled=dialled: refusal(a, PRODUCTION) or dialled.append(a) or "kept in",  # type: ignore[misc]  # as above
                    name_servers=[server.address],
                ) as sender,
            ):
                sender.send_all([request(row.url)])
            results.append([Fault.CONNECTION, "", dialled[0], dialled[:1]])

    for row, (fault, text, remote, dialled) in zip(rows, results, strict=True):
        if row.verdict == "refuse":
            assert fault in (Fault.REFUSED, Fault.UNBUILDABLE), row
            assert (remote, dialled) == (None, []), row
            assert fault != Fault.REFUSED or text == REFUSED_TEXT, row
        else:
            allowed = {answer for answer in row.answers if refusal(answer, PRODUCTION) is None}
            assert fault not in (Fault.REFUSED, Fault.UNBUILDABLE), (row, fault, text)
            assert dialled, row
            assert not allowed or set(dialled) <= allowed, row


def _in_a_network_of_its_own(rows: list[_Row]) -> list[list[Any]] | None:
    for how in (["unshare", "-n"], ["unshare", "-Urn"]):
        try:
            permitted = subprocess.run(
                [*how, "ip", "link"], capture_output=True, timeout=20, check=False
            )  # our own words
        except FileNotFoundError:
            return None
        if permitted.returncode == 0:
            done = subprocess.run(  # our own file
                [*how, sys.executable, str(HERE / "public_network.py")],
                input=json.dumps([[row.url, row.answers] for row in rows]),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode != 0:
                pytest.fail(done.stderr[-2000:])
            found: list[list[Any]] = json.loads(done.stdout)
            return found
    return None
