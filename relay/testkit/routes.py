"""The table of paths, and those of them that answer in good HTTP."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relay.testkit import misbehaviours
from relay.testkit.script import Answer, End, Idle, Pause, Step, reply, reply_json, response_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.testkit.request import Request
    from relay.testkit.verification import Verdict

_LATE_408 = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(slots=True, kw_only=True)
class RouteState:
    """What routes remember between requests, by whole path. A path that is not in `up` is up."""

    up: dict[str, bool] = field(default_factory=dict)
    randoms: dict[tuple[str, str], random.Random] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a route may look at besides the request. `verdict` is None where no secret is set."""

    state: RouteState
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, which raises InvalidInput for a bad parameter; an `early` one is asked before the body has come, and
    may decline with None."""

    handler: Callable[[Request, Context], Answer | None]
    early: bool = False


def _verify(request: Request, context: Context) -> Answer:
    if context.verdict is None:
        return reply_json(request, 401, {"error": "the receiver has no secret: PUT one to /secret"})
    if not context.verdict.valid:
        return reply_json(request, 401, {"error": context.verdict.reason, "scheme": context.verdict.scheme})
    return reply_json(request, 200, {"verified": True, "scheme": context.verdict.scheme})


def _ok(request: Request) -> Answer:
    return reply(request, 200, b"ok\n")


def _status(request: Request) -> Answer:
    code = int(request.number("code", 200, most=9999))
    body = request.text("body", f"{code}\n").encode("latin-1")
    return reply(request, code, body)


def _always500(request: Request) -> Answer:
    return reply(request, 500, b"always\n")


def _slow(request: Request) -> Answer:
    code = int(request.number("code", 200, most=999))
    return reply(request, code, b"slow\n", delay=request.number("ms", 1000) / 1000)


def _flaky(request: Request, context: Context) -> Answer:
    seed = request.optional_text("seed")
    chance = random.random()
    if seed is not None:
        chance = context.state.randoms.setdefault((request.head.path, seed), random.Random(seed)).random()
    if chance * 100 < request.number("pct", 50, most=100):
        return reply(request, int(request.number("code", 500, least=200, most=999)), b"flaky\n")
    return reply(request, 200, b"ok\n")


def _with_retry_after(status: int) -> Callable[[Request], Answer]:
    def handler(request: Request) -> Answer:
        value = request.optional_text("retry_after")
        return reply(request, status, b"later\n", headers=[] if value is None else [("Retry-After", value)])

    return handler


def _big_body(request: Request) -> Answer:
    size = int(request.number("kb", 1024, most=10_000_000)) * 1024
    whole, rest = divmod(size, 65536)
    head = response_head(200, [("Content-Type", "text/plain"), ("Content-Length", str(size))])
    block = b"b" * 65536
    steps = (step for source in ([head], (block for _ in range(whole)), [block[:rest]]) for step in source if step)
    return Answer(status=200, name="200", steps=steps)


def _toggle(request: Request, context: Context) -> Answer:
    path = request.head.path
    if request.head.method == "PUT":
        context.state.up[path] = request.choice("up", "1", ("0", "1")) == "1"
        return reply_json(request, 200, {"up": context.state.up[path]})
    return reply(request, 200, b"up\n") if context.state.up.get(path, True) else reply(request, 503, b"down\n")


def _redirect(request: Request) -> Answer:
    code = int(request.number("code", 302, least=300, most=399))
    return reply(request, code, headers=[("Location", request.text("to", "/ok"))])


def _no_body(request: Request) -> Answer:
    return reply(request, int(request.number("code", 200, least=200, most=999)))


def _cookie(request: Request) -> Answer:
    cookies = [("Set-Cookie", "testkit=crumb; Path=/; Max-Age=3600")]
    came = b"a cookie came\n" if request.head.has_cookie else b"no cookie came\n"
    return reply(request, 200, came, headers=cookies)


def _expect(request: Request) -> Answer | None:
    if not request.head.expects_continue or request.choice("mode", "refuse", ("refuse", "continue")) == "continue":
        return reply(request, 200, b"ok\n") if request.complete else None
    return reply(request, 417, b"no expectations\n", end=End.CLOSE)


def _close_idle(request: Request) -> Answer:
    how = request.choice("how", "fin", ("fin", "reset", "408"))
    end = End.RESET if how == "reset" else End.CLOSE
    last_words = _LATE_408 if how == "408" else b""
    idle = Idle(seconds=request.number("ms", 1000) / 1000, last_words=last_words, end=end)
    return reply(request, 200, b"ok\n", end=idle)


def _interim(request: Request) -> Answer:
    code = int(request.number("code", 103, least=100, most=199))
    final = reply(request, 200, b"ok\n")
    pause = Pause(seconds=request.number("ms", 0) / 1000)
    count = int(request.number("n", 1, most=10_000))
    steps: list[Step] = [response_head(code), pause] * count
    return Answer(status=200, name="200", steps=[*steps, *final.steps])


def _plain(handler: Callable[[Request], Answer | None], *, early: bool = False) -> Route:
    return Route(lambda request, _: handler(request), early)


#: By the first segment of the path.
ROUTES: dict[str, Route] = {
    "/verify": Route(_verify),
    "/ok": _plain(_ok),
    "/status": _plain(_status),
    "/always500": _plain(_always500),
    "/slow": _plain(_slow),
    "/flaky": Route(_flaky),
    "/429": _plain(_with_retry_after(429)),
    "/503": _plain(_with_retry_after(503)),
    "/bigbody": _plain(_big_body),
    "/toggle": Route(_toggle),
    "/redirect": _plain(_redirect),
    "/no-body": _plain(_no_body),
    "/cookie": _plain(_cookie),
    "/expect": _plain(_expect, early=True),
    "/close-idle": _plain(_close_idle),
    "/1xx": _plain(_interim),
    "/trickle": _plain(misbehaviours.trickle),
    "/trickle-headers": _plain(misbehaviours.trickle_headers),
    "/reset": _plain(misbehaviours.reset, early=True),
    "/hang": _plain(misbehaviours.hang),
    "/stale": _plain(misbehaviours.stale),
    "/half-status": _plain(misbehaviours.half_status),
    "/half-headers": _plain(misbehaviours.half_headers),
    "/garbage": _plain(misbehaviours.garbage),
    "/endless-1xx": _plain(misbehaviours.endless_1xx),
    "/huge-header": _plain(misbehaviours.huge_header),
    "/many-headers": _plain(misbehaviours.many_headers),
    "/gzip-bomb": _plain(misbehaviours.gzip_bomb),
    "/early-reply": _plain(misbehaviours.early_reply, early=True),
    "/short-body": _plain(misbehaviours.short_body),
    "/upgrade": _plain(misbehaviours.upgrade),
}
