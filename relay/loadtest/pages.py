"""Lists by the real API, walked deep: does page 400 come as fast as page 1?"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from relay.core.errors import Unavailable
from relay.core.model import Scope
from relay.loadtest import load
from relay.loadtest.report import percentile

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from relay.loadtest.seed import Workspace
    from relay.loadtest.stack import Stack

#: The page that is compared with the first, and how often each is read.
DEEP: Final = 400
CALLS: Final = 30
#: Rows of a page: what a caller gets who does not say.
LIMIT: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One list: milliseconds of its first page and of a deep one, medians of `CALLS` calls each, in turn."""

    #: The deep page's number: less than `DEEP` where the list ends before.
    page: int
    first_p50_ms: float
    deep_p50_ms: float
    ratio: float


def measure(stack: Stack, workspace: Workspace, say: Callable[[str], None] = lambda _: None) -> dict[str, object]:
    """Walk a workspace's deliveries, one endpoint's, and the dead ones; return each list's figures by its name.

    Starts the API. Raises Unavailable where it does not answer with a page.
    """
    stack.start_role("api")
    stack.wait_for(lambda: load.answers(stack), "the start of the API")
    reader = _Reader(stack, workspace.id)
    lists = {
        "deliveries": ("/v1/deliveries", {}),
        "endpoint": (f"/v1/endpoints/{workspace.endpoint_ids[0]}/deliveries", {}),
        "endpoint_delivered": (f"/v1/endpoints/{workspace.endpoint_ids[0]}/deliveries", {"status": "delivered"}),
        "dead": ("/v1/deliveries", {"status": "dead"}),
    }
    found: dict[str, object] = {}
    for name, (path, query) in lists.items():
        say(f"reading {path} to page {DEEP}")
        found[name] = asdict(_walk(reader, path, query))
    reader.close()
    return found


class _Reader:
    """A client with a kept connection and a key that may read."""

    def __init__(self, stack: Stack, workspace_id: UUID) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.api_port, timeout=60)
        self._headers = {"Authorization": f"Bearer {load.make_key(stack, workspace_id, Scope.READ)}"}

    def page(self, path: str, query: dict[str, str]) -> tuple[dict[str, Any], float]:
        """Read a page; return it and the milliseconds that it took."""
        began = time.perf_counter()
        self._connection.request("GET", f"{path}?{urlencode(query)}", headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        took = (time.perf_counter() - began) * 1000
        if answer.status != 200:
            raise Unavailable(f"the API answered {answer.status} to a list: {body[:500]!r}")
        page: dict[str, Any] = json.loads(body)
        return page, took

    def close(self) -> None:
        self._connection.close()


def _walk(reader: _Reader, path: str, query: dict[str, str]) -> Walked:
    first = {**query, "limit": str(LIMIT)}
    deep, number = first, 1
    page, _ = reader.page(path, first)
    while number < DEEP and page["next_cursor"] is not None:
        following = {**first, "cursor": page["next_cursor"]}
        page, _ = reader.page(path, following)
        if len(page["data"]) < LIMIT:
            # The rest of a list: less work than a page.
            break
        deep, number = following, number + 1
    # In turn, so that a slow second of the machine falls on both.
    took: list[tuple[float, float]] = [(reader.page(path, first)[1], reader.page(path, deep)[1]) for _ in range(CALLS)]
    medians = [percentile(sorted(times), 0.5) or 0.0 for times in zip(*took, strict=True)]
    return Walked(
        page=number,
        first_p50_ms=round(medians[0], 2),
        deep_p50_ms=round(medians[1], 2),
        ratio=round(medians[1] / medians[0], 2),
    )
