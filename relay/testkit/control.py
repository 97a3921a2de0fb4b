"""The receiver's own affairs over HTTP: its secret, its record, what it can do. These requests are not recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.core.errors import InvalidInput
from relay.testkit import index
from relay.testkit.script import Answer, reply, reply_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.testkit.record import Record
    from relay.testkit.request import Request

DEFAULT_LISTED = 100
#: JSON is made in the server's thread: a longer list would hold up everybody's answers.
MAX_LISTED = 10_000


class Secrets:
    """The secret for all paths, and those of single paths, which win. Shows none of them."""

    def __init__(self, secret: str | None) -> None:
        self._by_path: dict[str | None, str] = {}
        self.set(secret)

    def set(self, secret: str | None, path: str | None = None) -> None:
        """Set, or with None (or nothing in it) remove, the secret of one path or of all others."""
        if secret:
            self._by_path[path] = secret
        else:
            self._by_path.pop(path, None)

    def find(self, path: str) -> str | None:
        """The secret to check requests to `path` with."""
        return self._by_path.get(path) or self._by_path.get(None)

    def is_set(self, path: str | None) -> bool:
        """Whether exactly this path (None: all others) has a secret."""
        return path in self._by_path


class Control:
    """Answers `GET /`, `/secret`, `/_requests`, `/_count`, `/_ids` and `/_stats`."""

    def __init__(self, record: Record, secrets: Secrets, stats: Callable[[], dict[str, Any]]) -> None:
        self._record = record
        self._secrets = secrets
        self._stats = stats
        self._handlers: dict[tuple[str, str], Callable[[Request], Answer]] = {
            ("GET", "/"): self._get_index,
            ("GET", "/secret"): self._get_secret,
            ("PUT", "/secret"): self._put_secret,
            ("GET", "/_requests"): self._get_requests,
            ("DELETE", "/_requests"): self._delete_requests,
            ("GET", "/_count"): self._get_count,
            ("GET", "/_ids"): self._get_ids,
            ("GET", "/_stats"): self._get_stats,
        }
        # A delivery to `/` is one that goes astray, and is recorded.
        self._paths = frozenset(path for _, path in self._handlers) - {"/"}

    def answers(self, request: Request) -> bool:
        """Whether this request is one of these."""
        path = request.head.path
        return path in self._paths or (path == "/" and request.head.method == "GET")

    def answer(self, request: Request) -> Answer:
        """Serve one of these; raises InvalidInput for a bad parameter or body."""
        handler = self._handlers.get((request.head.method, request.head.path))
        if handler is None:
            return reply_json(request, 405, {"error": f"{request.head.path} does not take {request.head.method}"})
        return handler(request)

    def _get_index(self, request: Request) -> Answer:
        return reply(request, 200, index.text().encode())

    def _get_secret(self, request: Request) -> Answer:
        return reply_json(request, 200, {"set": self._secrets.is_set(request.optional_text("path"))})

    def _put_secret(self, request: Request) -> Answer:
        path = request.optional_text("path")
        try:
            secret = request.body.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise InvalidInput("the secret is not UTF-8 text") from None
        self._secrets.set(secret, path)
        return reply_json(request, 200, {"set": self._secrets.is_set(path)})

    def _get_requests(self, request: Request) -> Answer:
        limit = int(request.number("limit", DEFAULT_LISTED, least=1, most=MAX_LISTED))
        found = self._record.requests(*_filters(request))
        return reply_json(request, 200, {"requests": [one.as_json() for one in found[-limit:]], "matching": len(found)})

    def _delete_requests(self, request: Request) -> Answer:
        self._record.clear()
        return reply(request, 204)

    def _get_count(self, request: Request) -> Answer:
        return reply_json(request, 200, {"count": self._record.count(*_filters(request))})

    def _get_ids(self, request: Request) -> Answer:
        return reply_json(request, 200, self._record.ids())

    def _get_stats(self, request: Request) -> Answer:
        return reply_json(request, 200, self._stats())


def _filters(request: Request) -> tuple[str | None, str | None, int | None]:
    status = request.number("status", 0, most=9999)
    return request.optional_text("delivery_id"), request.optional_text("path"), int(status) or None
