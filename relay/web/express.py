"""The short way for single events: from a request to its answer without a thread of its own, and without Flask.

What producers do all day is one call that goes well. Such a request is judged where it is read, by the very functions
that the view uses, its event is committed with those that came beside it, and whoever ran the statement answers all of
them. Anything else, a fault in the request not excepted, is left to the application as it came, which finds the same
again and words it: so there is one place that refuses.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.core.model import Scope
from relay.web import bodies
from relay.web.auth import request_id_of
from relay.web.events import draft, payload_limit
from relay.web.gateway import EVERYWHERE, Reply, reply_of
from relay.web.lanes import Lane
from relay.web.problems import problem_of
from relay.web.together import LEADERS, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.process.metrics_api import ApiFigures
    from relay.web.admission import Admission
    from relay.web.auth import Gate
    from relay.web.lanes import Ticket
    from relay.web.parts import Api
    from relay.web.together import Together

_METHOD: Final = "POST"
_PATH: Final = "/v1/events"
#: Bytes of a body up to which it is judged on the reading thread: it keeps the others from being read meanwhile.
MOST_BYTES: Final = 16_384
#: A Host that any framework takes.
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]+")
_STATUS: Final = "202 ACCEPTED"


class Express:
    """The short way of one process. Whoever serves with it starts and stops it."""

    def __init__(self, api: Api, gate: Gate, admission: Admission, together: Together) -> None:
        self._api = api
        self._gate = gate
        self._admission = admission
        self._together = together
        self._lane: Lane[Waiting] | None = None

    def start(self) -> None:
        """Make its threads: as many as can lead at once."""
        self._lane = Lane("relay-express", LEADERS, self._together.lead)

    def stop(self, timeout: float) -> None:
        """End its threads, waiting `timeout` seconds at most."""
        if self._lane is not None:
            self._lane.stop(timeout)

    def take(self, environ: dict[str, Any], ticket: Ticket, done: Callable[[Reply | None], None]) -> bool:
        """Answer a request that came whole, if it is for here; return whether it is. From any thread, without waiting.

        Then `done` gets the answer on another thread; None where it is the application's after all. It is not called
        where somebody else takes the `ticket` before the event is being stored.
        """
        if self._lane is None or environ["PATH_INFO"] != _PATH or environ["REQUEST_METHOD"] != _METHOD:
            return False
        try:
            parcel = self._parcel(self._lane, environ, ticket, done)
        except Exception:  # noqa: BLE001 - the boundary: whatever it is, the application meets it too, and words it
            return False
        if parcel is None:
            return False
        self._together.post(parcel)
        return True

    def _parcel(
        self, lane: Lane[Waiting], environ: dict[str, Any], ticket: Ticket, done: Callable[[Reply | None], None]
    ) -> _Parcel | None:
        began = time.perf_counter()
        body: bytes | None = environ[bodies.HELD]
        if body is None or len(body) > MOST_BYTES or _HOST.fullmatch(environ.get("HTTP_HOST", "")) is None:
            return None
        caller = self._gate.known(environ, Scope.INGEST)
        # What would have to ask the database first, waits elsewhere.
        if caller is None or not self._admission.is_open(caller.workspace):
            return None
        name = request_id_of(environ)
        event = draft(
            environ,
            caller,
            name,
            read=lambda: bodies.read_held(environ, payload_limit(self._api, caller)),
        )
        return _Parcel(
            event=event,
            request_name=name,
            began=began,
            figures=self._api.figures,
            lane=lane,
            ticket=ticket,
            done=done,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class _Parcel(Waiting):
    """An event for which no thread waits."""

    request_name: str
    #: By time.perf_counter.
    began: float
    figures: ApiFigures
    lane: Lane[Waiting]
    ticket: Ticket
    done: Callable[[Reply | None], None]

    def take(self) -> bool:
        """Unless it was answered for want of a thread."""
        return self.ticket.take()

    def lead(self) -> None:
        """Have a thread of the lane lead."""
        self.lane.put(self)

    def settle(self) -> None:
        """Answer."""
        if self.answer is not None:
            status = 202
            headers = (
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(self.answer))),
                ("X-Request-Id", self.request_name),
                *EVERYWHERE,
            )
            reply = Reply(_STATUS, headers, self.answer)
        elif self.error is not None:
            problem = problem_of(self.error, request_id=self.request_name, method=_METHOD, path=_PATH)
            status = problem.status
            reply = reply_of(problem, self.request_name)
        else:
            self.done(None)
            return
        self.figures.answered(status, ingest_secs=time.perf_counter() - self.began)
        self.done(reply)
