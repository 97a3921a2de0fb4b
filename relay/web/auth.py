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
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from flask import g, request

from relay.store import keys, workspaces
from relay.web.last_use import LastUse
from relay.web.parts import new_id, path_id
from relay.web.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from flask.typing import ResponseReturnValue

    from relay.core.model import Scope
    from relay.store.keys import Holder
    from relay.store.workspaces import Workspace
    from relay.web.parts import Api

#: Seconds: under one, to leave room for the look-up's own time.
_KNOWN_FOR_SECS: Final = 0.9
#: Seconds after which one request asks anew, so that the others go on meanwhile.
_RENEWED_AFTER_SECS: Final = 0.5
#: Entries after which what is known is forgotten, all at once: callers choose what is looked up.
_MOST_KNOWN: Final = 10_000
_BEARER: Final = re.compile(r"bearer +([\x21-\x7e]+) *", re.IGNORECASE)

#: A caller's own request id: visible ASCII, since it goes into logs and headers.
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

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
        self._workspace_optional: set[Callable[..., object]] = set()

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

    def scoped_or_instance(
        self, scope: Scope
    ) -> Callable[[Callable[Concatenate[Caller | None, P], ResponseReturnValue]], Callable[P, ResponseReturnValue]]:
        """Decorate a view as `scoped` does, but that the instance key may leave out Relay-Workspace.

        Then the view's first argument is None: what it shows is the instance's own, and no workspace's.
        """

        def decorate(
            view: Callable[Concatenate[Caller | None, P], ResponseReturnValue],
        ) -> Callable[P, ResponseReturnValue]:
            @functools.wraps(view)
            def checked(*args: P.args, **kwargs: P.kwargs) -> ResponseReturnValue:
                alone = "HTTP_RELAY_WORKSPACE" not in request.environ and self._is_instance(_token())
                return view(None if alone else self._caller(scope, ()), *args, **kwargs)

            self._asked[checked] = (scope,)
            self._workspace_optional.add(checked)
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

    def known(self, environ: Mapping[str, Any], scope: Scope) -> Caller | None:
        """Return who calls, where that is known without asking the database and a view of `scope` would let them in.

        None says nothing: whoever gets it asks in the usual way.
        """
        match = _BEARER.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
        if match is None or "HTTP_RELAY_WORKSPACE" in environ:
            return None
        # The instance's key is in nobody's hands as a holder's.
        digest = keys.digest_of(match.group(1))
        holder = self._holders.get(digest)
        if holder is None or self._holders.is_ageing(digest) or scope not in holder.scopes:
            return None
        return Caller(workspace=holder.workspace, key_id=holder.key_id)

    def scopes_of(self, view: Callable[..., object]) -> tuple[Scope, ...] | None:
        """Return the scopes of which a view wants one; none for one that wants the instance key, None for no key."""
        return self._asked.get(view)

    def needs_workspace(self, view: Callable[..., object]) -> bool:
        """Say whether a view that wants a scope wants a workspace's name of the instance key."""
        return view not in self._workspace_optional

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
        if named is not None and named != holder.workspace.name and path_id(named) != holder.workspace.id:
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
        if holder is None or self._holders.renews(digest):
            asked_at = time.monotonic()
            with self._api.hot.connect() as connection:
                holder = keys.find(connection, token)
            if holder is None:
                self._holders.forget(digest)
                raise _unauthorized("The API key is not valid: it is misspelled, revoked or of another installation.")
            self._holders.put(digest, holder, asked_at)
            self._last_use.note(holder.key_id)
        return holder

    def _workspace(self, named: str) -> Workspace:
        found = self._workspaces.get(named)
        if found is None:
            asked_at = time.monotonic()
            as_id = path_id(named)
            with self._api.engine.connect() as connection:
                # No name has the form of an id.
                found = workspaces.by_name(connection, named) if as_id is None else workspaces.by_id(connection, as_id)
            if found is None:
                raise Problem(404, "unknown_workspace", "Relay-Workspace names no workspace: make it first.")
            self._workspaces.put(named, found, asked_at)
        return found


class _Known(Generic[K, V]):
    """Answers of the database that still hold. Reads and writes of a dict are atomic, so there is no lock."""

    def __init__(self) -> None:
        #: What is known, until when, and from when on somebody should ask anew; None while somebody does.
        self._entries: dict[K, tuple[V, float, float | None]] = {}

    def get(self, name: K) -> V | None:
        entry = self._entries.get(name)
        return entry[0] if entry is not None and entry[1] > time.monotonic() else None

    def put(self, name: K, value: V, asked_at: float) -> None:
        if len(self._entries) >= _MOST_KNOWN:
            self._entries.clear()
        self._entries[name] = (value, asked_at + _KNOWN_FOR_SECS, asked_at + _RENEWED_AFTER_SECS)

    def is_ageing(self, name: K) -> bool:
        """Whether somebody should ask anew."""
        entry = self._entries.get(name)
        return entry is not None and entry[2] is not None and entry[2] <= time.monotonic()

    def renews(self, name: K) -> bool:
        """Whether the caller should ask anew: true for one of those that come while it is so, or hardly more."""
        entry = self._entries.get(name)
        if entry is None or entry[2] is None or entry[2] > time.monotonic():
            return False
        self._entries[name] = (*entry[:2], None)
        return True

    def forget(self, name: K) -> None:
        """Take back what is known."""
        self._entries.pop(name, None)


def request_id_of(environ: Mapping[str, Any]) -> str:
    """Return the id that a request brings, or make one."""
    given: str | None = environ.get("HTTP_X_REQUEST_ID")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else str(new_id())


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
