"""A name server on loopback that answers to order: real DNS over UDP, so that the real resolver is what is tried."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

A, AAAA, CNAME = 1, 28, 5
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5
PATIENCE = 20.0
_KINDS = {4: A, 6: AAAA}


@dataclass(frozen=True)
class Reply:
    """What one question gets: its records are those of `addresses` that are of the type asked for."""

    addresses: tuple[str, ...] = ()
    code: int = NOERROR
    ttl: int = 60
    #: No answer at all.
    silent: bool = False
    #: Bytes sent in place of a DNS message.
    raw: bytes | None = None
    #: Put before the addresses: the name is an alias of this one.
    alias: str | None = None
    #: Seconds that it is held back.
    delay: float = 0.0


#: What a name answers: the same each time, one after the other (the last for ever), or by the type asked for.
Script = Reply | list[Reply] | dict[int, Reply]


class NameServer:
    """Answers on 127.0.0.1 within a `with` block; names that it does not know do not exist."""

    def __init__(
        self, names: Mapping[str, Script] | Callable[[str], Script | None], *, host: str = "127.0.0.1"
    ) -> None:
        self._names = names
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._socket.bind((host, 0))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        #: Questions by (name, type).
        self.asked: Counter[tuple[str, int]] = Counter()
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        # It waits for a datagram.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(PATIENCE)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(4096)
            if self._ending.is_set():
                return
            self._answer(question, peer)

    def _answer(self, question: bytes, peer: tuple[str, int]) -> None:
        name, end = _read_name(question, 12)
        kind = struct.unpack_from("!H", question, end)[0]
        reply = self._reply(name, kind)
        self.asked[name, kind] += 1
        if reply.silent:
            return
        data = reply.raw if reply.raw is not None else _message(question, end + 4, kind, reply)
        if reply.delay:
            timer = threading.Timer(reply.delay, self._send, (data, peer))
            timer.daemon = True
            timer.start()
        else:
            self._send(data, peer)

    def _send(self, data: bytes, peer: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(data, peer)

    def _reply(self, name: str, kind: int) -> Reply:
        script = self._names(name) if callable(self._names) else self._names.get(name)
        if script is None:
            return Reply(code=NXDOMAIN)
        if isinstance(script, dict):
            return script.get(kind, Reply())
        if isinstance(script, list):
            return script[min(self.asked[name, kind], len(script) - 1)]
        return script


def _read_name(message: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("latin-1").lower())
        at += 1 + length
    return ".".join(labels), at + 1


def _name(text: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".")) + b"\0"


def _message(question: bytes, end: int, kind: int, reply: Reply) -> bytes:
    records = []
    owner = b"\xc0\x0c"
    if reply.alias is not None:
        data = _name(reply.alias)
        records.append(owner + struct.pack("!HHIH", CNAME, 1, reply.ttl, len(data)) + data)
        owner = data
    found = [
        address.packed for address in map(ipaddress.ip_address, reply.addresses) if kind == _KINDS[address.version]
    ]
    records += [owner + struct.pack("!HHIH", kind, 1, reply.ttl, len(packed)) + packed for packed in found]
    head = question[:2] + struct.pack("!HHHHH", 0x8180 | reply.code, 1, len(records), 0, 0)
    return head + question[12:end] + b"".join(records)
