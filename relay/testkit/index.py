"""What the receiver can do, for people: `GET /` shows it, and the manual has the same lines in a table."""

from __future__ import annotations

from typing import Final

#: Path with its parameters, each with its default (none after `=`: left out), and what comes; without a method,
#: whatever the method.
ROUTES: Final = (
    ("/verify", "200 if the signature is right and fresh, else 401 with the reason"),
    ("/ok", "200"),
    ("/status?code=200&body=", "this status, with this body"),
    ("/always500", "500"),
    ("/slow?ms=1000&code=200", "an answer after so many milliseconds"),
    ("/flaky?pct=50&code=500&seed=", "fails so often in a hundred, else 200; with a seed, in the same order each time"),
    ("/429?retry_after=", "429, with this Retry-After if one is given"),
    ("/503?retry_after=", "503, the same"),
    ("/toggle", "200, or 503 while it is down"),
    ("PUT /toggle?up=1", "takes the path down (up=0) or up again (up=1); /toggle/a and /toggle/b are two"),
    ("/redirect?code=302&to=/ok", "a redirect"),
    ("/no-body?code=200", "an empty body"),
    ("/bigbody?kb=1024", "200 with so many KiB of body"),
    ("/cookie", "200; sets a cookie, and says whether one came"),
    ("/expect?mode=refuse", "417 to Expect: 100-continue, or with mode=continue goes on to 200"),
    ("/1xx?code=103&n=1&ms=0", "n interim answers, a pause after each, then 200"),
    ("/close-idle?ms=1000&how=fin", "200, then closes the idle connection; how: fin, reset, or 408 (says 408 first)"),
    ("/stale?half=0&then=fin", "200 to a connection's first request; cuts at the second, half=1 in mid status line"),
    ("/hang?ms=0&then=fin", "nothing until the client leaves; with ms, the end after so long"),
    ("/reset?when=after", "a reset after the request was read, or with when=before before its body was"),
    ("/trickle?ms=100&n=", "a byte of body every so many milliseconds, n of them or without end"),
    ("/trickle-headers?ms=100", "a status line and headers without end, a byte every so many milliseconds"),
    ("/half-status?then=fin", "half a status line"),
    ("/half-headers?then=fin", "a status line and some headers, no blank line"),
    ("/short-body?then=fin", "ten bytes of the 1000 that were promised"),
    ("/early-reply?status=200&then=fin&ms=30000", "answers before the body was read; then: fin, reset, or hold for ms"),
    ("/endless-1xx?code=100&ms=0", "interim answers without end"),
    ("/huge-header?kb=70", "200 with one header line of so many KiB"),
    ("/many-headers?n=200", "200 with so many header lines more"),
    ("/gzip-bomb?mb=64", "200 with a small gzip body that unpacks to so many MiB"),
    ("/garbage?kind=ssh&then=fin", "bytes that are not quite HTTP; an unknown kind is answered with the list"),
    ("/upgrade?then=hang", "101 to another protocol"),
)
#: The receiver's own affairs.
OWN: Final = (
    ("GET /", "this list"),
    ("GET /_requests?limit=100&path=&status=&delivery_id=", "the last requests that came, as JSON"),
    ("DELETE /_requests", "forgets them"),
    ("GET /_count?path=&status=&delivery_id=", "how many came"),
    ("GET /_ids", "each delivery's id, and how often it came"),
    ("GET /_stats", "counts of answers, paths and connections"),
    ("GET /secret?path=", "whether there is a secret to verify with"),
    (
        "PUT /secret?path=",
        "makes the body the secret (or public key, or JWK Set), of one path if one is given; an empty body removes it",
    ),
)
_HEAD: Final = """\
A receiver of webhooks that does what it is asked to. Parameters stand with their defaults. A path may go on: /ok/17 is
served as /ok. `then` is how the connection ends: fin, reset, half (closed on this side alone) or hang.
"""


def text() -> str:
    """Return the list as `GET /` shows it."""
    width = max(len(target) for target, _ in ROUTES + OWN)
    blocks = ("\n".join(f"{target:{width}}  {what}" for target, what in block) for block in (ROUTES, OWN))
    return _HEAD + "\n" + "\n\n".join(blocks) + "\n"
