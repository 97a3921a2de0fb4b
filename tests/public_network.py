"""Run as a program in a network of its own, in which every address there is leads to one listener.

So the production policy is tried end to end without reaching anybody: what the sender dials, whatever it is, arrives
here, and the listener knows at which address. Reads rows as JSON from its input, each `[url, answers]`; writes for each
`[fault, text, remote address, addresses that were dialled]`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from relay.core.address import AddressPolicy, refusal
from relay.core.url import UrlPolicy
from tests.hostile import Sender
from tests.nameserver import NameServer, Reply

PORTS = (80, 443)


def main() -> None:
    """Answer all rows of the standard input."""
    for command in (
        "link set lo up",
        "route add local 0.0.0.0/0 dev lo",
        "-6 route add local ::/0 dev lo",
    ):
        subprocess.run(["ip", *command.split()], check=True)  # our own words, the system's tool
    dialled: list[str] = []
    for port in PORTS:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # its own network
            listener = socket.socket(family, socket.SOCK_STREAM)
            if family is socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, port))
            listener.listen(64)
            threading.Thread(target=_accept, args=(listener, dialled), daemon=True).start()
    policy = AddressPolicy()
    results = []
    for url, answers in json.load(sys.stdin):
        dialled.clear()
        with (
            NameServer(functools.partial(_answer, tuple(answers))) as server,
            Sender(
                policy=lambda address: refusal(address, policy),
                url_policy=UrlPolicy(),
                name_servers=[server.address],
            ) as sender,
        ):
            seen = sender.send(url, connect_timeout_ms=2_000).observation
        time.sleep(0.01)
        assert seen is not None
        results.append([seen.fault, seen.text, seen.remote_address, list(dialled)])
    json.dump(results, sys.stdout)


def _answer(addresses: tuple[str, ...], _name: str) -> Reply | None:
    return Reply(addresses) if addresses else None


def _accept(listener: socket.socket, dialled: list[str]) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            dialled.append(connection.getsockname()[0])
            connection.close()


if __name__ == "__main__":
    main()
