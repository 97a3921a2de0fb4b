"""Who is calling: `Authorization: Bearer`, judged before anything of the body is read.

What the database said of a key or a workspace is kept for less than a second, so that a busy producer costs one look-up
a second and a revocation holds within one everywhere.
"""

from __future__ import annotations

import functools
import hmac
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, Final, Generic, ParamSpec, TypeVar

from flask import g, request

from relay.core.errors import InvalidInput
from relay.core.ids import parse_id
from relay.store import keys, workspaces
from relay.web.last_use import LastUse
from relay.web.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from flask.typing import ResponseReturnValue

    from relay.core.model import Scope
    from relay.store.keys import Holder
    from relay.store.workspaces import Workspace
    from relay.web.parts import Api

#: Seconds: under one, to leave room for the look-up's own time.
_KNOWN_FOR_SECS: Final = 0.9
#: Entries after which what is known is forgotten, all at once: callers choose what is looked up.
_MOST_KNOWN: Final = 10_000
_BEARER: Final = re.compile(r"bearer +([\x21-\x7e]+) *", re.IGNORECASE)

P = ParamSpec("P")
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who acts, and in which workspace."""

    workspace: Workspace
    #: None: the instance key.
    key_id: UUID | None

    @property
    def actor(self) -> str:
        """The name in the audit log."""
        return "instance" if self.key_id is None else f"key:{self.key_id}"


class Gate:
    """Lets callers in by their key. Views behind it get the Caller as their first argument."""

    def __init__(self, api: Api) -> None:
        self._api = api
        admin_key = api.settings.admin_key
        self._admin_digest = None if admin_key is None else keys.digest_of(admin_key.get_secret_value())
        self._holders: _Known[bytes, Holder] = _Known()
        self._workspaces: _Known[str, Workspace] = _Known()
        self._last_use = LastUse(api.engine)
        self._asked: dict[Callable[..., object], tuple[Scope, ...]] = {}

    def scoped(
        self, scope: Scope, *others: Scope
    ) -> Callable[[Callable[Concatenate[Caller, P], ResponseReturnValue]], Callable[P, ResponseReturnValue]]:
        """Decorate a view that needs a key with `scope` or one of `others`, or the instance key and a workspace's name.

        Answers 401 without a good key, 403 without the scope, and, to the instance key, 400 where Relay-Workspace is
        missing and 404 where it names none.
        """

        def decorate(view: Callable[Concatenate[Caller, P], ResponseReturnValue]) -> Callable[P, ResponseReturnValue]:
            @functools.wraps(view)
            def checked(*args: P.args, **kwargs: P.kwargs) -> ResponseReturnValue:
                return view(self._caller(scope, others), *args, **kwargs)

            self._asked[checked] = (scope, *others)
            return checked

        return decorate

    def instance_only(self, view: Callable[P, ResponseReturnValue]) -> Callable[P, ResponseReturnValue]:
        """Decorate a view that needs the instance key (RELAY_ADMIN_KEY), and acts in no workspace."""

        @functools.wraps(view)
        def checked(*args: P.args, **kwargs: P.kwargs) -> ResponseReturnValue:
            token = _token()
            if not self._is_instance(token):
                self._holder(token)
                raise Problem(403, "instance_key_only", "Only the instance's key (RELAY_ADMIN_KEY) may do this.")
            return view(*args, **kwargs)

        self._asked[checked] = ()
        return checked

    def scopes_of(self, view: Callable[..., object]) -> tuple[Scope, ...] | None:
        """Return the scopes of which a view wants one; none for one that wants the instance key, None for no key."""
        return self._asked.get(view)

    def _caller(self, scope: Scope, others: tuple[Scope, ...]) -> Caller:
        token = _token()
        named: str | None = request.environ.get("HTTP_RELAY_WORKSPACE")
        if self._is_instance(token):
            if named is None:
                raise Problem(
                    400,
                    "workspace_required",
                    "The instance's key acts in the workspace that Relay-Workspace names: send its name or id.",
                )
            return Caller(workspace=self._workspace(named), key_id=None)
        holder = self._holder(token)
        if named is not None and named not in {holder.workspace.name, str(holder.workspace.id)}:
            raise Problem(403, "other_workspace", "This key belongs to another workspace: leave out Relay-Workspace.")
        if scope not in holder.scopes and not any(other in holder.scopes for other in others):
            lacking = " or ".join(one.value for one in (scope, *others))
            raise Problem(
                403,
                "missing_scope",
                f"This key lacks the scope {lacking}: use one that has it.",
                members={"missing_scope": scope.value},
            )
        return Caller(workspace=holder.workspace, key_id=holder.key_id)

    def _is_instance(self, token: str) -> bool:
        return self._admin_digest is not None and hmac.compare_digest(keys.digest_of(token), self._admin_digest)

    def _holder(self, token: str) -> Holder:
        digest = keys.digest_of(token)
        holder = self._holders.get(digest)
        if holder is None:
            asked_at = time.monotonic()
            with self._api.hot.connect() as connection:
                holder = keys.find(connection, token)
            if holder is None:
                raise _unauthorized("The API key is not valid: it is misspelled, revoked or of another installation.")
            self._holders.put(digest, holder, asked_at)
            self._last_use.note(holder.key_id)
        return holder

    def _workspace(self, named: str) -> Workspace:
        found = self._workspaces.get(named)
        if found is None:
            asked_at = time.monotonic()
            with self._api.engine.connect() as connection:
                try:
                    found = workspaces.by_id(connection, parse_id(named))
                except InvalidInput:
                    found = workspaces.by_name(connection, named)
            if found is None:
                raise Problem(404, "unknown_workspace", "Relay-Workspace names no workspace: make it first.")
            self._workspaces.put(named, found, asked_at)
        return found


class _Known(Generic[K, V]):
    """Answers of the database that still hold. Reads and writes of a dict are atomic, so there is no lock."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, V]] = {}

    def get(self, name: K) -> V | None:
        entry = self._entries.get(name)
        return entry[1] if entry is not None and entry[0] > time.monotonic() else None

    def put(self, name: K, value: V, asked_at: float) -> None:
        if len(self._entries) >= _MOST_KNOWN:
            self._entries.clear()
        self._entries[name] = (asked_at + _KNOWN_FOR_SECS, value)


def request_id() -> str:
    """Return the id of the request under way."""
    value: str = g.request_id
    return value


def _token() -> str:
    header: str | None = request.environ.get("HTTP_AUTHORIZATION")
    if header is None:
        raise _unauthorized("An API key is needed: send Authorization: Bearer rk_...", known=False)
    match = _BEARER.fullmatch(header)
    if match is None:
        raise _unauthorized("The Authorization header is not of the form: Bearer rk_...", known=False)
    return match.group(1)


def _unauthorized(detail: str, *, known: bool = True) -> Problem:
    # RFC 6750 section 3: the error word only where credentials were given.
    challenge = 'Bearer realm="relay"' + (', error="invalid_token"' if known else "")
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": challenge})
