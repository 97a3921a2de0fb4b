"""What stands between a well-formed event and the database: its workspace's rate, and its type's schema.

Neither costs anything where it is not used: both are known from the look-up that let the caller in.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relay.core.payload_schema import MAX_VIOLATIONS, PayloadSchema
from relay.store import event_types, ingest_rate
from relay.web.problems import FieldError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from relay.store.workspaces import Workspace
    from relay.web.parts import Api

#: Seconds of processor time for checking one request's payloads.
MAX_CHECK_SECS: Final = 1.0
#: Types after which what is known of schemas is forgotten, all at once: callers choose the types.
_MOST_KNOWN: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An event that asks to be let in."""

    type: str
    payload: bytes
    is_json: bool
    #: The payload's name in an answer's `errors`: `$`, or `[3].payload`.
    field: str = "$"


class Admission:
    """The rates and schemas of one process."""

    def __init__(self, api: Api) -> None:
        self._api = api
        #: By workspace and type: the registry's version, and the schema that the type had in it.
        self._schemas: dict[tuple[UUID, str], tuple[int, PayloadSchema | None]] = {}

    def admit(self, workspace: Workspace, count: int, candidates: Callable[[], Iterable[Candidate]]) -> None:
        """Let `count` events in; they are only asked for where the workspace has registered types.

        Raises Problem: 429 with Retry-After, or 422 naming the places that a schema refuses.
        """
        self.charge(workspace, count)
        if workspace.event_types_version:
            self._check(workspace, candidates())

    def is_open(self, workspace: Workspace) -> bool:
        """Whether all well-formed events of the workspace are let in: it has no rate, and no event types."""
        return not workspace.event_types_version and self._rate_of(workspace) is None

    def charge(self, workspace: Workspace, count: int) -> None:
        """Count so many events against the workspace's rate. Raises the Problem of a 429 where that is too many now."""
        rate = self._rate_of(workspace)
        if rate is None:
            return
        with self._api.hot.connect() as connection:
            wait = ingest_rate.take(connection, workspace_id=workspace.id, rate=rate, count=count)
        if wait is not None:
            raise Problem(
                429,
                "ingest_rate",
                f"The workspace may send in {rate:g} events per second, and sends more: try again after Retry-After.",
                headers={"Retry-After": str(max(1, math.ceil(wait)))},
            )

    def _rate_of(self, workspace: Workspace) -> float | None:
        own = workspace.ingest_rate
        return self._api.settings.workspace_ingest_rate if own is None else own

    def _check(self, workspace: Workspace, candidates: Iterable[Candidate]) -> None:
        faults: list[FieldError] = []
        end = time.thread_time() + MAX_CHECK_SECS
        for one in candidates:
            schema = self._schema(workspace, one.type)
            if schema is None:
                continue
            if not one.is_json:
                message = "The event's type has a JSON schema: send JSON, with Content-Type: application/json."
                faults.append(FieldError(field="Content-Type", message=message, code="not_json"))
            elif time.thread_time() > end:
                message = "Checking the payloads against their schemas takes too long: send fewer at once."
                faults.append(FieldError(field=one.field, message=message, code="too_costly"))
            else:
                faults += [
                    FieldError(field=one.field + found.path, message=found.message, code=found.code)
                    for found in schema.violations(one.payload, time.thread_time)
                ]
            if len(faults) >= MAX_VIOLATIONS:
                break
        if faults:
            first = faults[0]
            raise Problem(
                422,
                "schema_mismatch",
                f"The payload is not what its event type's schema asks for: {first.field}: {first.message}",
                errors=faults[:MAX_VIOLATIONS],
            )

    def _schema(self, workspace: Workspace, event_type: str) -> PayloadSchema | None:
        version = workspace.event_types_version
        known = self._schemas.get((workspace.id, event_type))
        if known is not None and known[0] == version:
            return known[1]
        with self._api.hot.connect() as connection:
            text = event_types.schema_of(connection, workspace_id=workspace.id, name=event_type)
        schema = None if text is None else PayloadSchema(text)
        if len(self._schemas) >= _MOST_KNOWN:
            self._schemas.clear()
        self._schemas[workspace.id, event_type] = (version, schema)
        return schema
