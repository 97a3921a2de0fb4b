"""The receiver in the foreground, for demos and load tests: one line a request, until a signal ends it."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

from relay.core.errors import InvalidInput
from relay.testkit.receiver import Receiver
from relay.testkit.verification import has_signature

if TYPE_CHECKING:
    from types import FrameType

    from relay.testkit.record import Received

DEFAULT_BIND = "127.0.0.1:9099"
#: How often the main thread looks up from waiting, so that a signal that another thread took is served.
_WAIT_SECS = 3600.0


def main(bind: str, secret: str | None) -> int:
    """`run` on `host:port`, with `[...]` around an IPv6 host; raises InvalidInput where `bind` is something else."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidInput("the address to bind is not host:port", field="bind")
    return run(host.removeprefix("[").removesuffix("]"), int(port), secret)


def run(host: str, port: int, secret: str | None) -> int:
    """Serve until SIGTERM or SIGINT and return 0; raises OSError where the address cannot be bound.

    Must be called in the main thread. Raises the soft limit on open files to the hard one. Anyone who
    reaches the port can read the record and set the secret: bind to loopback or a network of your own.
    """
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Receiver(host, port, secret, on_request=_Log().request) as receiver:
            sys.stdout.write(f"receiver listens on {receiver.url}\n")
            sys.stdout.flush()
            while not ended.wait(_WAIT_SECS):
                pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


class _Log:
    """Lines on stdout, until nobody reads them."""

    def __init__(self) -> None:
        self._read = True

    def request(self, received: Received) -> None:
        if not self._read:
            return
        verified = {None: "unchecked", True: "verified", False: "NOT verified"}[received.verified]
        if received.verified is False and not has_signature(received.headers):
            verified = "not signed"
        target = received.target.encode("unicode_escape").decode()
        delivery_id = (received.delivery_id or "-").encode("unicode_escape").decode()
        try:
            sys.stdout.write(f"{received.method} {target} -> {received.answer}  {delivery_id}  {verified}\n")
            sys.stdout.flush()
        except OSError:
            self._read = False
