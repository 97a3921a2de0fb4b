"""What a route answers with: a list of steps that the server plays, so that no fault needs a thread of its own."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from http.client import responses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from relay.testkit.request import Request

_BODILESS = frozenset({204, 304})


class End(enum.Enum):
    """How an exchange leaves its connection."""

    KEEP = "keep"  # ready for the next request, unless the client asked to close
    CLOSE = "fin"  # close(); the kernel turns it into a reset when bytes of the request are still unread
    RESET = "reset"  # a reset, whatever is unread or unsent
    HALF_CLOSE = "half"  # FIN now, and reads on until the client leaves
    HANG = "hang"  # reads and says nothing more until the client leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Do nothing for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Keep the connection; if no request comes for `seconds`, write `last_words` and leave it by `end`."""

    seconds: float
    last_words: bytes
    end: End


Step = bytes | Pause | Idle | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The steps of one answer.

    `status` is the final status that a sound client would read, None where there is none; `name` is
    the status as text, or a word for the fault. `steps` may be endless: it is asked for the next
    step only when the kernel has taken the one before. Steps that run out mean `End.KEEP`.
    """

    status: int | None
    name: str
    steps: Iterable[Step]


def response_head(status: int | str, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A status line and header block with its blank line; a `str` status is put in as it stands."""
    reason = responses.get(status, "Unnamed") if isinstance(status, int) else "Odd"
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace")


def reply(
    request: Request,
    status: int,
    body: bytes = b"",
    *,
    headers: Sequence[tuple[str, str]] = (),
    content_type: str = "text/plain; charset=utf-8",
    delay: float = 0.0,
    end: Step = End.KEEP,
) -> Answer:
    """A well-formed answer after `delay` seconds, framed by Content-Length except where the status forbids a body."""
    fields = list(headers)
    if status in _BODILESS or status < 200:
        body = b""
    else:
        fields += [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    if (isinstance(end, End) and end is not End.KEEP) or not request.head.keep_alive:
        fields.append(("Connection", "close"))
    message = response_head(status, fields) + (b"" if request.head.method == "HEAD" else body)
    steps: tuple[Step, ...] = (message, end) if delay <= 0 else (Pause(seconds=delay), message, end)
    return Answer(status=status, name=str(status), steps=steps)


def reply_json(request: Request, status: int, value: Any, *, end: Step = End.KEEP) -> Answer:
    """`reply` with `value` as JSON and a newline."""
    body = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    return reply(request, status, body, content_type="application/json", end=end)
