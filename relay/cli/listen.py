"""`relay listen`: a receiver on this machine that registers itself, prints what arrives, verified, and unregisters."""

from __future__ import annotations

import base64
import contextlib
import queue
import re
import secrets
import signal
import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

import click

from relay.cli.left_behind import Note, remove_left
from relay.cli.output import show_json
from relay.cli.target import talks
from relay.client import NotFound, NotVerified, RelayError, verify
from relay.client.transport import printable
from relay.core.secret import new_secret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from io import BufferedIOBase

    from relay.client import Relay

#: Bytes of a body that is read at most, and characters that are printed of it.
_MOST_BODY: Final = 64 * 1_048_576
_SHOWN: Final = 2_000
#: Bytes of a line between chunks, and how many lines may follow the last.
_MOST_LINE: Final = 4_096
_MOST_TRAILERS: Final = 100
#: Seconds for which a connection may be silent.
_SILENCE_SECS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request that came. `fault` is why it was refused, None where it was verified."""

    headers: dict[str, str]
    body: bytes
    delivery_id: str | None
    fault: str | None


class Listener:
    """Answers on one secret path: 200 to what is verified, 401 to the rest, 400 to what is not whole; 404 elsewhere."""

    def __init__(self, host: str, port: int, secret: str, status: int) -> None:
        """Listen. Raises OSError where the address is taken."""
        self.path = f"/{secrets.token_urlsafe(12)}"
        self.arrived: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _SILENCE_SECS

            def do_POST(self) -> None:
                body = _read_body(self.headers, self.rfile) if self.path == owner.path else None
                if body is None:
                    self.close_connection = True
                    self.answer(404 if self.path != owner.path else 400)
                    return
                pairs = [(name, value) for name, value in self.headers.items()]
                fault = delivery_id = None
                try:
                    delivery_id = verify(pairs, body, secret).delivery_id
                except NotVerified as error:
                    fault = str(error)
                owner.arrived.put(Arrival(headers=dict(pairs), body=body, delivery_id=delivery_id, fault=fault))
                self.answer(401 if fault else status)

            def answer(self, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing: what arrives is printed by the command."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: a client that leaves is no news."""

        self._server = Server((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free one.")
@click.option("--event-types", default=None, help="A list with commas, such as order.*,user.created. Default: all.")
@click.option("--signing", type=click.Choice(["relay", "standard"]), default="relay", show_default=True)
@click.option("--public-url", default=None, help="Where Relay reaches this machine, such as a tunnel's URL.")
@click.option("--answer", "status", type=click.IntRange(200, 599), default=200, show_default=True, help="What to say.")
@click.option("--count", type=click.IntRange(1), default=None, help="End after so many. Default: at Ctrl-C.")
@talks
def listen(
    *,
    host: str,
    port: int,
    event_types: str | None,
    signing: str,
    public_url: str | None,
    status: int,
    count: int | None,
    relay: Relay,
    as_json: bool,
) -> None:
    """Receive here: registers an endpoint, prints what arrives, and removes the endpoint at the end.

    Relay must be able to reach this machine: one that runs here and may send to private addresses, as under `relay up`,
    or any other with --public-url.
    """
    secret = new_secret(secrets.token_bytes(32)).reveal()
    try:
        listener = Listener(host, port, secret, status)
    except OSError as error:
        raise click.UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    url = (public_url or _own_url(host, listener.port)).rstrip("/") + listener.path
    with listener, _endpoint(relay, url, event_types=event_types, signing=signing, secret=secret):
        before = signal.signal(signal.SIGTERM, lambda *_: listener.arrived.put(None))
        try:
            _print_arrivals(listener, count, as_json=as_json)
        except KeyboardInterrupt:
            click.echo("", err=True)
        finally:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _endpoint(relay: Relay, url: str, *, event_types: str | None, signing: str, secret: str) -> Iterator[None]:
    """Register, and unregister whatever happens; before that, unregister what killed ones left."""
    for left in remove_left(relay):
        click.echo(f"endpoint {left}, left by a `relay listen` that was killed, was removed", err=True)
    types = [] if event_types is None else [one.strip() for one in event_types.split(",")]
    made = relay.endpoints.create(
        url,
        event_types=types,
        signing=signing,
        secret=secret,
        description="relay listen",
        metadata={"made_by": "relay listen", "host": socket.gethostname()},
    )
    note = Note(relay.url, made.id)
    click.echo(f"listening at {printable(made.url)} as endpoint {made.id}; Ctrl-C ends it", err=True)
    try:
        yield
    finally:
        try:
            relay.endpoints.delete(made.id)
            note.remove()
            click.echo(f"endpoint {made.id} was removed", err=True)
        except NotFound:
            note.remove()
            click.echo(f"endpoint {made.id} was removed before by somebody else", err=True)
        except RelayError as error:
            click.echo(
                f"relay: endpoint {made.id} is still there ({error}): relay endpoints delete {made.id}", err=True
            )


def _read_body(headers: Message, source: BufferedIOBase) -> bytes | None:
    """Read a request's body; None for one without a known end, one that breaks off, and one that is too large."""
    if headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
        return _read_chunks(source)
    length = headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > _MOST_BODY:
        return None
    body = source.read(int(length))
    return body if len(body) == int(length) else None


def _read_chunks(source: BufferedIOBase) -> bytes | None:
    """Read a body in chunks (RFC 9112 section 7.1), as tunnels send them; trailers are passed over."""
    body = bytearray()
    while True:
        digits = source.readline(_MOST_LINE).partition(b";")[0].strip()
        if re.fullmatch(rb"[0-9A-Fa-f]{1,8}", digits) is None:
            return None
        size = int(digits, 16)
        if size == 0:
            ends = (source.readline(_MOST_LINE) == b"\r\n" for _ in range(_MOST_TRAILERS))
            return bytes(body) if any(ends) else None
        if len(body) + size > _MOST_BODY:
            return None
        body += source.read(size)
        if source.readline(_MOST_LINE) != b"\r\n":
            return None


def _print_arrivals(listener: Listener, count: int | None, *, as_json: bool) -> None:
    printed = 0
    while count is None or printed < count:
        arrival = listener.arrived.get()
        if arrival is None:
            return
        printed += 1
        _print(arrival, as_json=as_json)


def _print(arrival: Arrival, *, as_json: bool) -> None:
    headers = {name.lower(): value for name, value in arrival.headers.items()}
    if as_json:
        try:
            text: dict[str, str] = {"body": arrival.body.decode()}
        except UnicodeDecodeError:
            text = {"body_base64": base64.b64encode(arrival.body).decode()}
        show_json({"verified": arrival.fault is None, "fault": arrival.fault, "headers": headers, **text})
        return
    kind = headers.get("relay-event-type", "")
    attempt = headers.get("relay-attempt")
    facts = [f"delivery {arrival.delivery_id}"] if arrival.delivery_id else []
    facts += [f"attempt {attempt}"] if attempt else []
    mark = "verified" if arrival.fault is None else f"NOT VERIFIED: {arrival.fault}"
    click.echo(printable(" ".join([kind, *facts])) + f"  {printable(mark)}")
    for line in arrival.body.decode("utf-8", "replace")[:_SHOWN].splitlines():
        click.echo(f"  {printable(line)}")


def _own_url(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
