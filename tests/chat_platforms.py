"""Stand-ins for chat platforms: HTTP servers that take the documented requests, keep to the documented limits and
answer with the documented errors.

Each keeps what a person in the channel would see, and whom a message would have pinged.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What Telegram takes for the credential of no bot at all.
_BOT_TOKEN = re.compile(r"[0-9]+:[A-Za-z0-9_-]+")
_MENTION = re.compile(r"@\w+")
_FENCED = re.compile(r"```\n(.*?)\n```", re.DOTALL)


class Answer(NamedTuple):
    """What a platform says to one request."""

    status: int
    body: str
    headers: Mapping[str, str] = {}


class Platform:
    """An HTTP server on loopback. `said` and `pinged` grow as messages come."""

    #: A credential and where it leads.
    token: str
    address: str

    def __init__(self) -> None:
        self.said: list[str] = []
        self.pinged: list[str] = []
        #: Requests that came, good and bad ones.
        self.requests = 0
        #: How long the next requests are told to wait, one entry each.
        self.waits: list[float] = []
        #: Answers that come before any judgement, one entry each.
        self.scripted: list[Answer] = []

    def __enter__(self) -> Self:
        platform = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = platform._take(self.path, self.headers.get("Content-Type", ""), body)
                self.send_response(answer.status)
                data = answer.body.encode()
                for name, value in {**answer.headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The base URL, as the platform's setting has it."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, path: str, content_type: str, body: bytes) -> Answer:
        self.requests += 1
        if self.scripted:
            return self.scripted.pop(0)
        if content_type.partition(";")[0] != "application/json":
            return Answer(415, "")
        try:
            value = json.loads(body)
        except ValueError:
            return self.unreadable()
        return self.judge(path, value)

    def unreadable(self) -> Answer:
        """Answer a body that is no JSON."""
        raise NotImplementedError

    def judge(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a request."""
        raise NotImplementedError


class TelegramServer(Platform):
    """The Bot API's sendMessage, for one bot and one chat."""

    token = "123456789:AAF-markerMARKERmarkerMARKER_marker12"
    address = "telegram://-1001234567890"
    chat = -1001234567890
    text_units = 4096

    def unreadable(self) -> Answer:
        return self._refuse(400, "Bad Request: can't parse JSON object")

    def judge(self, path: str, body: dict[str, Any]) -> Answer:
        matched = re.fullmatch(r"/bot([^/]+)/sendMessage", path)
        if matched is None or not _BOT_TOKEN.fullmatch(matched[1]):
            return self._refuse(404, "Not Found")
        if matched[1] != self.token:
            return self._refuse(401, "Unauthorized")
        if self.waits:
            wait = int(self.waits.pop(0))
            refused = self._refuse(429, f"Too Many Requests: retry after {wait}", {"retry_after": wait})
            return refused._replace(headers={**refused.headers, "Retry-After": str(wait)})
        if body.get("chat_id") != self.chat:
            return self._refuse(400, "Bad Request: chat not found")
        text = body.get("text", "")
        units = text.encode("utf-16-le")
        if not text.strip():
            return self._refuse(400, "Bad Request: message text is empty")
        if len(units) // 2 > self.text_units:
            return self._refuse(400, "Bad Request: message is too long")
        if "parse_mode" in body:
            return self._refuse(400, "Bad Request: can't parse entities: this stand-in parses none")
        plain = units
        for entity in body.get("entities", []):
            start, end = 2 * entity["offset"], 2 * (entity["offset"] + entity["length"])
            if not 0 <= start < end <= len(units) or entity["type"] != "pre":
                return self._refuse(400, "Bad Request: entity is out of bounds")
            plain = plain[:start] + plain[end:]
        self.said.append(text)
        # Names are found by Telegram itself, but not within preformatted text.
        self.pinged += _MENTION.findall(plain.decode("utf-16-le"))
        return Answer(200, json.dumps({"ok": True, "result": {"message_id": len(self.said), "text": text}}))

    @staticmethod
    def _refuse(code: int, description: str, parameters: Mapping[str, int] | None = None) -> Answer:
        body: dict[str, Any] = {"ok": False, "error_code": code, "description": description}
        if parameters:
            body["parameters"] = parameters
        return Answer(code, json.dumps(body), {"Content-Type": "application/json"})


class DiscordServer(Platform):
    """Execute Webhook, for one webhook."""

    token = "markerMARKER-markerMARKER_markerMARKER0123456789"
    webhook = "223704706495545344"
    address = f"discord://{webhook}"
    content_characters = 2000

    def unreadable(self) -> Answer:
        return self._refuse(400, {"message": "The request body contains invalid JSON.", "code": 50109})

    def judge(self, path: str, body: dict[str, Any]) -> Answer:
        matched = re.fullmatch(r"/api/v10/webhooks/([0-9]+)/([^/?]+)(\?wait=true)?", path)
        if matched is None:
            return self._refuse(404, {"message": "404: Not Found", "code": 0})
        if matched[1] != self.webhook:
            return self._refuse(404, {"message": "Unknown Webhook", "code": 10015})
        if matched[2] != self.token:
            return self._refuse(401, {"message": "Invalid Webhook Token", "code": 50027})
        if self.waits:
            wait = self.waits.pop(0)
            limited = {"message": "You are being rate limited.", "retry_after": wait, "global": False}
            refused = self._refuse(429, limited)
            return refused._replace(headers={**refused.headers, "Retry-After": str(int(wait + 1))})
        content = body.get("content", "")
        if not content.strip():
            return self._refuse(400, {"message": "Cannot send an empty message", "code": 50006})
        # The stricter of the two ways to count.
        if len(content.encode("utf-16-le")) // 2 > self.content_characters:
            reason = {"code": "BASE_TYPE_MAX_LENGTH", "message": "Must be 2000 or fewer in length."}
            errors = {"content": {"_errors": [reason]}}
            return self._refuse(400, {"message": "Invalid Form Body", "code": 50035, "errors": errors})
        self.said.append(self._shown(content))
        if body.get("allowed_mentions", {}).get("parse") != []:
            self.pinged += _MENTION.findall(content)
        return Answer(200, json.dumps({"id": "1", "content": content})) if matched[3] else Answer(204, "")

    @staticmethod
    def _shown(content: str) -> str:
        """The text of a message: markup outside of code blocks would be eaten, and is therefore marked."""
        pieces = _FENCED.split(content)
        for place in range(0, len(pieces), 2):
            unescaped = re.sub(r"\\([^0-9A-Za-z\s])|([*_~`|<>])", lambda m: m[1] or "[markup]", pieces[place])
            pieces[place] = unescaped
        # Zero-width spaces take no room on the screen.
        return "".join(pieces).replace("\u200b", "")

    @staticmethod
    def _refuse(status: int, body: Mapping[str, Any]) -> Answer:
        return Answer(status, json.dumps(body), {"Content-Type": "application/json"})


class SlackServer(Platform):
    """One incoming webhook. Its answers are words."""

    token = "T0AAAAAAA/B0BBBBBBB/markerMARKERmarkerMARKER"
    address = "slack://T000/B000"
    text_characters = 40_000

    def unreadable(self) -> Answer:
        return Answer(400, "invalid_payload")

    def judge(self, path: str, body: dict[str, Any]) -> Answer:
        team, service, token = self.token.split("/")
        matched = re.fullmatch(r"/services/([^/]+)/([^/]+)/([^/]+)", path)
        if matched is None or matched[1] != team:
            return Answer(404, "no_team")
        if matched[2] != service:
            return Answer(404, "no_service")
        if matched[3] != token:
            return Answer(403, "invalid_token")
        if self.waits:
            return Answer(429, "rate_limited", {"Retry-After": str(int(self.waits.pop(0)))})
        text = body.get("text", "")
        if not text:
            return Answer(400, "no_text")
        sequences = re.findall(r"<([^<>]*)>", text)
        self.pinged += [sequence for sequence in sequences if sequence[:1] in "@!#"]
        if body.get("mrkdwn", True):
            text = re.sub(r"([*_~`])(.+?)\1", "[markup]", text)
        self.said.append(html.unescape(text)[: self.text_characters])
        return Answer(200, "ok")


#: By the name of the transport that speaks to it.
PLATFORMS: dict[str, type[Platform]] = {
    "telegram": TelegramServer,
    "discord": DiscordServer,
    "slack": SlackServer,
}
