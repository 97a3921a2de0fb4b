"""The receiver as one object: `with Receiver() as receiver: ... receiver.url ...`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from relay.core.errors import InvalidInput
from relay.testkit.control import Control, Secrets
from relay.testkit.record import DEFAULT_KEPT, Received, Record
from relay.testkit.request import Request, header_pairs
from relay.testkit.routes import ROUTES, Context, RouteState
from relay.testkit.script import Answer, End, reply_json
from relay.testkit.server import OnConnect, Server
from relay.testkit.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Receiver:
    """A webhook receiver in a thread of this process.

    Port 0 lets the system choose; after `stop()`, `start()` takes the same port again, and the
    record is kept. `keep` bounds the requests remembered; `keep_bodies=False` keeps hashes instead of
    bodies; `send_buffer` is SO_SNDBUF in bytes (Linux doubles it), which keeps the kernel from
    swallowing what the client never takes. `on_request` is called in the server's thread for each
    recorded request and must be quick. All methods may be called from any thread.

    A client that closes its side, even only for writing, counts as gone.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        *,
        keep: int = DEFAULT_KEPT,
        keep_bodies: bool = True,
        send_buffer: int | None = None,
        on_request: Callable[[Received], None] | None = None,
    ) -> None:
        self._secrets = Secrets(secret)
        self._record = Record(keep=keep, keep_bodies=keep_bodies)
        self._control = Control(self._record, self._secrets, self.stats)
        self._state = RouteState()
        self._on_request = on_request
        self._server = Server(self, host, port, send_buffer=send_buffer)
        self.requests = self._record.requests
        self.count = self._record.count
        self.wait_for = self._record.wait_for
        self.ids = self._record.ids
        self.clear = self._record.clear
        self.max_concurrent = self._record.most_in_flight
        self.bytes_written_on = self._server.bytes_written_on

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Listen and serve; raises OSError where the address is taken or not ours."""
        self._server.start()

    def stop(self) -> None:
        """Close the port and all connections; hanging requests end as cut."""
        self._server.stop()

    @property
    def port(self) -> int:
        """The port in use; 0 before the first start if the system is to choose."""
        return self._server.address[1]

    @property
    def url(self) -> str:
        """`http://host:port`, without a slash at the end."""
        host = self._server.address[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def on_connect(self) -> OnConnect:
        """What becomes of new connections; may be set while running."""
        return self._server.on_connect

    @on_connect.setter
    def on_connect(self, value: OnConnect) -> None:
        self._server.on_connect = value

    @property
    def bytes_written(self) -> int:
        """Bytes the kernel took on all connections. What lies unsent in its buffers counts (see `send_buffer`)."""
        return self._server.bytes_written

    @property
    def connections(self) -> int:
        """How many connections were accepted since it was made."""
        return self._server.accepted

    @property
    def open_connections(self) -> int:
        """How many connections are open."""
        return self._server.open_connections

    def set_secret(self, secret: str | None, path: str | None = None) -> None:
        """The secret to verify with from now on: of one path, or of all paths without their own. None removes it."""
        self._secrets.set(secret, path)

    def set_up(self, path: str = "/toggle", *, up: bool) -> None:
        """Switch a `/toggle` path."""
        self._state.up[path] = up

    def stats(self) -> dict[str, Any]:
        """Counts of requests, answers, connections and bytes, as `GET /_stats` shows them."""
        server = self._server
        connections = {"accepted": server.accepted, "open": server.open_connections}
        return {**self._record.stats(), "connections": connections, "bytes_written": server.bytes_written}

    # For the server: relay.testkit.server.Application

    def begin(self, request: Request) -> Answer | None:
        """Choose and record the answer; None while the body is to be waited for. In the server's thread only."""
        route = ROUTES.get(request.route)
        if not request.complete and (route is None or not route.early):
            return None
        secret = self._secrets.find(request.head.path) if request.complete else None
        verdict = None
        if secret is not None:
            verdict = verify(header_pairs(request.head.raw), request.body, secret, now=time.time())
        context = Context(state=self._state, verdict=verdict)
        try:
            if self._control.answers(request):
                answer: Answer | None = self._control.answer(request)
            elif route is None:
                answer = reply_json(request, 404, {"error": f"there is no {request.route}"})
            else:
                answer = route.handler(request, context)
        except InvalidInput as error:
            answer = reply_json(request, 400, {"error": str(error)}, end=End.KEEP if request.complete else End.CLOSE)
        if answer is None or not _is_recorded(request, self._control):
            return answer
        received = self._record.add(request, answer, verified=None if verdict is None else verdict.valid)
        if self._on_request is not None:
            self._on_request(received)
        return answer

    def finished(self, request: Request, *, cut: bool) -> None:
        """An answer is over. In the server's thread only."""
        if _is_recorded(request, self._control):
            self._record.finished(request.head.path, cut=cut)


def _is_recorded(request: Request, control: Control) -> bool:
    """Whether the request is a delivery rather than a word to the receiver itself."""
    return not control.answers(request) and not (request.head.method == "PUT" and request.route == "/toggle")
