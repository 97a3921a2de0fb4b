"""One request to the API and its answer, or the error that it comes to."""

from __future__ import annotations

import json
import re
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.exceptions import ReadTimeoutError

from relay import __version__
from relay.client.errors import ApiError, FieldError, UnexpectedAnswer, Unreachable, class_of
from relay.client.retries import Careful
from relay.core.errors import ConfigurationError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What a POST's answer is read with, and the rest of its life: seconds to connect, and of silence.
DEFAULT_TIMEOUT_SECS: Final = 15.0
#: How often a request is sent again by itself.
DEFAULT_RETRIES: Final = 3
#: Connections that are kept, for as many threads.
_POOL: Final = 16
#: Characters of a foreign answer that an error shows.
_SHOWN: Final = 200

_KEY: Final = re.compile(r"[\x21-\x7e]+")
#: A header's name (RFC 9110 section 5.6.2) and the part of its value that arrives everywhere.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\t]*")


class Transport:
    """A connection pool and what every request has. May be used by several threads at once, not across a fork."""

    def __init__(self, url: str, key: str, *, timeout: float, retries: int, headers: Mapping[str, str]) -> None:
        """Take the API's base URL and a key. Raises ConfigurationError for what can be neither."""
        if not re.match(r"https?://[^/?#\s]+[^?#\s]*$", url):
            raise ConfigurationError(f"{url!r} is not the API's URL: give one such as https://relay.example.com")
        if not _KEY.fullmatch(key):
            raise ConfigurationError(
                "the API key is not one: give the whole of it, rk_…, without spaces or line breaks"
            )
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._auth = _Bearer(key)
        self._headers = {"User-Agent": f"relay-python/{__version__}", "Accept": "application/json", **headers}
        self._retries = retries
        self._lock = threading.Lock()
        self._sessions: dict[bool, requests.Session] = {}

    def close(self) -> None:
        """Close the kept connections. The next request makes new ones."""
        with self._lock:
            while self._sessions:
                self._sessions.popitem()[1].close()

    def get(self, path: str, query: Mapping[str, str | int | None] | None = None) -> dict[str, Any]:
        """Read an object."""
        return object_of(self.send("GET", path, query=query))

    def call(self, method: str, path: str, value: object = None, *, repeatable: bool = False) -> dict[str, Any]:
        """Send `value` as JSON, or no body where it is None, and read an object: {} where the answer has no body."""
        body = None if value is None else dump(value)
        headers = {} if value is None else {"Content-Type": "application/json"}
        answer = self.send(method, path, body=body, headers=headers, repeatable=repeatable)
        return {} if answer.status_code == 204 else object_of(answer)

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        idempotency_key: str | None = None,
    ) -> requests.Response:
        """Send a request and return its answer, which is a success.

        It is sent again by itself where it is a GET, or `repeatable`. Raises ApiError for a refusal, Unreachable where
        none answers, UnexpectedAnswer for a redirect, InvalidInput for a header that HTTP cannot carry.
        """
        request_id = uuid.uuid4().hex
        named = {**self._headers, "X-Request-Id": request_id, **_checked(headers or {})}
        session = self._session(repeatable=repeatable or method == "GET")
        try:
            answer = session.request(
                method,
                self.url + path,
                params={name: value for name, value in (query or {}).items() if value is not None},
                data=body,
                headers=named,
                auth=self._auth,
                timeout=self._timeout,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise self._unreachable(error, request_id, idempotency_key) from error
        if answer.status_code >= 400:
            raise _refusal(answer, idempotency_key)
        if not 200 <= answer.status_code < 300:
            where = printable(answer.headers.get("Location", "somewhere else"))
            raise UnexpectedAnswer(f"{self.url} leads on to {where}: give the API's own URL, which answers itself")
        return answer

    def _session(self, *, repeatable: bool) -> requests.Session:
        with self._lock:
            if repeatable not in self._sessions:
                session = requests.Session()
                adapter = HTTPAdapter(
                    pool_maxsize=_POOL, max_retries=Careful.times(self._retries, repeatable=repeatable)
                )
                session.mount("https://", adapter)
                session.mount("http://", adapter)
                self._sessions[repeatable] = session
            return self._sessions[repeatable]

    def _unreachable(self, error: requests.RequestException, request_id: str, key: str | None) -> Unreachable:
        if isinstance(error, requests.exceptions.SSLError):
            why = "the TLS connection failed: check its certificate and REQUESTS_CA_BUNDLE"
        elif isinstance(error, requests.exceptions.ProxyError):
            why = "the proxy does not let through: check HTTPS_PROXY and NO_PROXY"
        elif isinstance(error, requests.ReadTimeout) or isinstance(_reason(error), ReadTimeoutError):
            why = f"it was silent for {self._timeout:g} s"
        elif isinstance(error, requests.ConnectTimeout):
            why = f"it could not be connected to within {self._timeout:g} s"
        else:
            why = "is `relay up` or `relay api` running?"
        return Unreachable(f"no API answers at {self.url}: {why}", request_id=request_id, idempotency_key=key)


class _Bearer(AuthBase):
    """The API key as a header. Given as `auth`, so that no .netrc takes its place."""

    def __init__(self, key: str) -> None:
        self._value = f"Bearer {key}"

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = self._value
        return request


def path(*segments: str) -> str:
    """Put a path together, each segment escaped: an id that holds a slash is not another address."""
    return "/" + "/".join(_segment(one) for one in segments)


def dump(value: object) -> bytes:
    """Write JSON: compact, UTF-8. Raises TypeError for what JSON has no word for, ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def object_of(answer: requests.Response) -> dict[str, Any]:
    """Read an answer's JSON object; UnexpectedAnswer where it is none."""
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        _unexpected(answer)
    return value


def printable(text: str) -> str:
    """Make text fit for a terminal: what controls it is shown as an escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _retry_after(answer: requests.Response) -> float | None:
    text = answer.headers.get("Retry-After", "").strip()
    # urllib3 reads dates as well, and cuts what it takes for too long.
    return float(text) if re.fullmatch(r"[0-9]{1,9}", text) else Careful().get_retry_after(answer.raw)


def _reason(error: requests.RequestException) -> object:
    """What the last try came to, where tries ran out."""
    return getattr(error.args[0], "reason", None) if error.args else None


def _checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse what would not arrive as it is, or as more than one header."""
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidInput(f"{printable(name)}: a header is visible ASCII on one line: encode it", field=name)
    return headers


def _segment(text: str) -> str:
    if text in {"", ".", ".."}:
        raise ValueError(f"{text!r} is no id")
    return quote(text, safe="")


def _refusal(answer: requests.Response, idempotency_key: str | None) -> ApiError:
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    problem = problem if isinstance(problem, dict) else {}
    known = isinstance(problem.get("detail"), str)
    errors = [
        FieldError(**{name: str(one.get(name, "")) for name in ("field", "message", "code")})
        for one in problem.get("errors", ())
        if isinstance(one, dict)
    ]
    usual = {"type", "title", "status", "code", "detail", "errors"}
    return class_of(answer.status_code)(
        answer.status_code,
        str(problem.get("code", "unknown")),
        problem["detail"] if known else printable(answer.text[:_SHOWN]) or answer.reason,
        errors=errors if known else (),
        request_id=answer.headers.get("X-Request-Id"),
        retry_after=_retry_after(answer),
        members={name: value for name, value in problem.items() if name not in usual},
        idempotency_key=idempotency_key,
        was_repeated=bool(answer.raw.retries and answer.raw.retries.history),
    )


def _unexpected(answer: requests.Response) -> NoReturn:
    shown = printable(answer.text[:_SHOWN])
    raise UnexpectedAnswer(f"what answers at {answer.url} is not Relay's API: it says {shown!r}. Check the URL")
