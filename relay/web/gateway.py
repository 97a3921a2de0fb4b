"""From requests to answers as bytes: calls the WSGI application (PEP 3333), and words what never comes to it."""

from __future__ import annotations

import logging
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from relay.web.http1 import render, status_line
from relay.web.parts import new_id
from relay.web.problems import MEDIA_TYPE, Problem, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from wsgiref.types import WSGIApplication

    from relay.web.http1 import Incoming

log = logging.getLogger(__name__)


#: What every answer says that does not say otherwise.
EVERYWHERE: Final = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


class Reply(NamedTuple):
    """An answer that is not yet bytes."""

    #: A code and its phrase.
    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes


def reply_of(problem: Problem, request_id: str) -> Reply:
    """Word a problem that no application answers."""
    body = text_of(problem).encode()
    headers = {
        "Content-Type": MEDIA_TYPE,
        "Content-Length": str(len(body)),
        **problem.headers,
        "X-Request-Id": request_id,
        **dict(EVERYWHERE),
    }
    return Reply(status_line(problem.status), tuple(headers.items()), body)


class Gateway:
    """Asks one application. From any thread."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self._date = (0, "")

    def answer(self, incoming: Incoming, *, close: bool) -> bytes:
        """Return the application's answer; it says that the connection ends where it does: `close`, or as asked.

        Raises what the application raises and is no Exception (bodies.BodyAwaited).
        """
        try:
            status, headers, body = self._call(incoming.environ)
        except Exception:  # the boundary: an application answers its errors itself, so this is one in doing that
            log.exception("the application failed")
            status, headers, body = status_line(500), [("Content-Length", "0")], b""
        return render(status, headers, body, date=self._now(), close=close)

    def refusal(self, problem: Problem) -> bytes:
        """Return the answer to what does not come to the application. The connection ends with it."""
        return self.render(reply_of(problem, str(new_id())), close=True)

    def render(self, reply: Reply, *, close: bool) -> bytes:
        """Return an answer's bytes; they say that the connection ends where `close`."""
        return render(reply.status, reply.headers, reply.body, date=self._now(), close=close)

    def _call(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        answer: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], _exc_info: object = None) -> Any:
            # What PEP 3333 returns here for programs that write by themselves, no application of ours calls.
            answer[:] = (status, headers)

        parts = self._app(environ, start_response)
        try:
            body = b"".join(parts)
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()
        status, headers = answer
        if not any(name == "Content-Length" for name, _ in headers) and status[:3] not in {"204", "304"}:
            headers = [*headers, ("Content-Length", str(len(body)))]
        return status, headers, body

    def _now(self) -> str:
        second = int(time.time())
        date = self._date
        if date[0] != second:
            self._date = date = (second, formatdate(second, usegmt=True))
        return date[1]
