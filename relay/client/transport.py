"""One request to the API and its answer, or the error that it comes to."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3 import HTTPHeaderDict
from urllib3.exceptions import ReadTimeoutError

from relay import __version__
from relay.client.errors import FieldError, UnexpectedAnswer, Unreachable, class_of
from relay.client.retries import Tries, reason_of, retry_after_of
from relay.core.errors import ConfigurationError, InvalidInput, RelayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
#: The media type of everything that Relay refuses with.
_PROBLEM: Final = "application/problem+json"


class Transport:
    """A connection pool and what every request has. May be used by several threads at once, not across a fork."""

    def __init__(self, url: str, key: str, *, timeout: float, retries: int, headers: Mapping[str, str]) -> None:
        """Take the API's base URL and a key. Raises ConfigurationError for what can be neither, InvalidInput for headers
        that HTTP cannot carry.
        """
        if not re.match(r"https?://[^/?#\s]+[^?#\s]*$", url):
            raise ConfigurationError(f"{url!r} is not the API's URL: give one such as https://relay.example.com")
        if not _KEY.fullmatch(key):
            raise ConfigurationError(
                "the API key is not one: give the whole of it, rk_…, without spaces or line breaks"
            )
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._auth = _Bearer(key)
        _check(headers.items())
        self._headers = {"User-Agent": f"relay-python/{__version__}", "Accept": "application/json", **headers}
        self._retries = retries
        self._lock = threading.Lock()
        self._session: requests.Session | None = None

    def close(self) -> None:
        """Close the kept connections. The next request makes new ones."""
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

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
        lines: Sequence[tuple[str, str]] = (),
        repeatable: bool = False,
        idempotency_key: str | None = None,
    ) -> requests.Response:
        """Send a request and return its answer, which is a success. `lines` are headers whose names may come repeatedly.

        It is sent again by itself where it is a GET, or `repeatable`. Raises ApiError for a refusal, Unreachable where
        no whole answer comes, UnexpectedAnswer for a redirect and for a refusal that is not Relay's, InvalidInput for a
        header that HTTP cannot carry.
        """
        request_id = uuid.uuid4().hex
        named = {**self._headers, "X-Request-Id": request_id, **(headers or {})}
        _check([*named.items(), *lines])
        session = self._kept()
        request = self._prepared(session, method, path, query=query, body=body, headers=named, lines=lines)
        tries = Tries(self._retries, repeatable=repeatable or method == "GET")
        while True:
            try:
                answer = self._once(session, request)
            except requests.RequestException as error:
                pause = tries.after_error(error)
                if pause is None:
                    raise self._unreachable(error, request_id, idempotency_key) from error
            else:
                pause = tries.after_answer(answer.status_code, retry_after_of(answer))
                if pause is None:
                    break
            time.sleep(pause)
        if answer.status_code >= 400:
            raise _refusal(answer, idempotency_key, was_repeated=tries.may_be_done)
        if not 200 <= answer.status_code < 300:
            where = printable(answer.headers.get("Location", "somewhere else"))
            raise UnexpectedAnswer(
                f"{self.url} leads on to {where}: give the API's own URL, which answers itself",
                idempotency_key=idempotency_key,
            )
        return answer

    def _kept(self) -> requests.Session:
        with self._lock:
            if self._session is None:
                self._session = requests.Session()
                for scheme in ("https://", "http://"):
                    # Tries are counted here, so that one whose answer broke off is among them.
                    self._session.mount(scheme, HTTPAdapter(pool_maxsize=_POOL, max_retries=0))
            return self._session

    def _prepared(
        self,
        session: requests.Session,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None,
        body: bytes | None,
        headers: Mapping[str, str],
        lines: Sequence[tuple[str, str]],
    ) -> requests.PreparedRequest:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        plain = requests.Request(
            method, self.url + path, params=params, data=body, headers=dict(headers), auth=self._auth
        )
        try:
            request = session.prepare_request(plain)
        except requests.exceptions.InvalidURL as error:
            raise ConfigurationError(f"{self.url!r} is not the API's URL: {error}") from None
        except UnicodeEncodeError:
            raise InvalidInput("a filter is not text that UTF-8 can carry: it has half of a surrogate pair") from None
        if lines:
            every = HTTPHeaderDict(dict(request.headers))
            for name, value in lines:
                every.add(name, value)
            request.headers = every  # type: ignore[assignment]  # a mapping whose items are lines, which urllib3 sends
        return request

    def _once(self, session: requests.Session, request: requests.PreparedRequest) -> requests.Response:
        """Send a request and read its answer to the end. Raises what `requests` raises, also where it was cut."""
        settings = session.merge_environment_settings(request.url, {}, None, None, None)
        answer = session.send(request, timeout=self._timeout, allow_redirects=False, **settings)
        if _is_cut(answer):
            raise requests.exceptions.ChunkedEncodingError("the answer ended within its headers")
        return answer

    def _unreachable(self, error: requests.RequestException, request_id: str, key: str | None) -> Unreachable:
        broken = (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)
        if isinstance(error, broken):
            return Unreachable(
                f"no whole answer came from {self.url}: it broke off midway",
                request_id=request_id,
                idempotency_key=key,
            )
        if isinstance(error, requests.exceptions.SSLError):
            why = "the TLS connection failed: check its certificate and REQUESTS_CA_BUNDLE"
        elif isinstance(error, requests.exceptions.ProxyError):
            why = "the proxy does not let through: check HTTPS_PROXY and NO_PROXY"
        elif isinstance(error, requests.ReadTimeout) or isinstance(reason_of(error), ReadTimeoutError):
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
    """Write JSON: compact, UTF-8. Raises InvalidInput for what JSON has no word for, NaN and infinities among it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"what was given cannot be written as JSON: {error}", code="invalid_json") from None
    return encode(text)


def encode(text: str) -> bytes:
    """Write text as UTF-8. Raises InvalidInput for half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise InvalidInput(
            f"what was given has {half}, half of a surrogate pair, which UTF-8 cannot carry: give whole characters",
            code="invalid_text",
        ) from None


def object_of(answer: requests.Response) -> dict[str, Any]:
    """Read an answer's JSON object; UnexpectedAnswer where it is none."""
    value = _object(answer)
    if value is None:
        raise _unexpected(answer)
    return value


def printable(text: str) -> str:
    """Make text fit for a terminal: what controls it is shown as an escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _object(answer: requests.Response) -> dict[str, Any] | None:
    try:
        value = answer.json()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_cut(answer: requests.Response) -> bool:
    """Whether the connection ended within the headers, which Python's HTTP takes for their end.

    The body's length is missing then, and so is the body.
    """
    if answer.content or answer.status_code in {204, 304} or "Location" in answer.headers:
        return False
    length, coding = (answer.headers.get(name, "").strip() for name in ("Content-Length", "Transfer-Encoding"))
    return not length.isdecimal() and coding.lower() != "chunked"


def _check(lines: Iterable[tuple[str, str]]) -> None:
    """Refuse what would not arrive as it is, or as more than one header."""
    for name, value in lines:
        if not isinstance(value, str):
            kind = type(value).__name__
            raise InvalidInput(f"{printable(name)}: a header's value is text, not {kind}: give a str", field=name)
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidInput(f"{printable(name)}: a header is visible ASCII on one line: encode it", field=name)


def _segment(text: object) -> str:
    if not isinstance(text, str) or text in {"", ".", ".."}:
        raise InvalidInput(f"{text!r} is no id: give one as Relay answered it", code="invalid_id")
    return quote(encode(text), safe="")


def _refusal(answer: requests.Response, idempotency_key: str | None, *, was_repeated: bool) -> RelayError:
    """Read what Relay refuses with; UnexpectedAnswer where it is not Relay that refuses."""
    media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    problem = _object(answer) if media_type == _PROBLEM else None
    code, detail = ("", "") if problem is None else (problem.get("code"), problem.get("detail"))
    if problem is None or not isinstance(code, str) or not isinstance(detail, str) or not code:
        return _unexpected(answer, idempotency_key)
    given = problem.get("errors")
    errors = [
        FieldError(**{name: str(one.get(name, "")) for name in ("field", "message", "code")})
        for one in (given if isinstance(given, list) else ())
        if isinstance(one, dict)
    ]
    usual = {"type", "title", "status", "code", "detail", "errors"}
    return class_of(answer.status_code)(
        answer.status_code,
        code,
        detail,
        errors=errors,
        request_id=answer.headers.get("X-Request-Id"),
        retry_after=retry_after_of(answer),
        members={name: value for name, value in problem.items() if name not in usual},
        idempotency_key=idempotency_key,
        was_repeated=was_repeated,
    )


def _unexpected(answer: requests.Response, idempotency_key: str | None = None) -> UnexpectedAnswer:
    text = " ".join(answer.content.decode("utf-8", "replace").split())
    shown = f'it says "{printable(text[:_SHOWN])}"' if text else "it says nothing"
    return UnexpectedAnswer(
        f"what answers {answer.status_code} at {printable(answer.url)} is not Relay's API: {shown}. "
        "Check the URL, and what stands in front of the API",
        idempotency_key=idempotency_key,
    )
