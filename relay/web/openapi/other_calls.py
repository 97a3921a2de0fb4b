"""Calls about keys, workspaces and the audit log, and those that need no key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CONTENT_TYPE_LATEST

from relay.web import answers, models
from relay.web.openapi import parameters
from relay.web.openapi.operation import JSON, Answer, Operation, Page, takes

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS: Final = "Keys and audit"
_WORKSPACES: Final = "Workspaces"
_OPEN: Final = "Without a key"
_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_LEADS: Final = Operation(
    tag=_OPEN, answers={302: Answer(says="To /docs.", headers=("Location", "Cache-Control"))}, stored=False
)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "keys.create_key": Operation(
        tag=_KEYS,
        body=takes(models.KeyRequest, {"name": "shop", "scopes": ["ingest"]}),
        answers={201: Answer(says="It is made.", shape=answers.NewKey)},
    ),
    "keys.list_keys": Operation(
        tag=_KEYS,
        parameters=parameters.PAGING,
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.Key))},
    ),
    "keys.revoke_key": Operation(
        tag=_KEYS, answers={204: Answer(says="It is revoked.")}, problems={404: ("unknown_key",)}
    ),
    "audit.list_audit": Operation(
        tag=_KEYS,
        parameters=(parameters.SINCE, parameters.UNTIL, *parameters.PAGING),
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.AuditRecord))},
    ),
    "workspaces.create_workspace": Operation(
        tag=_WORKSPACES,
        body=takes(models.WorkspaceRequest, {"name": "billing"}),
        answers={201: Answer(says="It is made.", shape=answers.Workspace)},
        problems={409: ("name_taken",)},
    ),
    "workspaces.list_workspaces": Operation(
        tag=_WORKSPACES,
        parameters=parameters.PAGING,
        answers={200: Answer(says="A page of them.", shape=Page(of=answers.Workspace))},
    ),
    "workspaces.change_workspace": Operation(
        tag=_WORKSPACES,
        body=takes(models.WorkspaceChange, {"max_endpoints": 100}),
        answers={200: Answer(says="The workspace as it is now.", shape=answers.Workspace)},
        problems={404: ("unknown_workspace",)},
    ),
    "webhook_keys.get_webhook_keys": Operation(
        tag=_OPEN,
        answers={200: Answer(says="The keys.", shape=answers.PublicKeys, headers=("Cache-Control",))},
        problems={404: ("unknown_endpoint",)},
    ),
    "health.healthz": Operation(tag=_OPEN, answers={200: Answer(says="It runs.", shape=answers.Alive)}, stored=False),
    "health.readyz": Operation(
        tag=_OPEN,
        parameters=(parameters.READY_FOR,),
        answers={200: Answer(says="It does its work.", shape=answers.Ready)},
        problems={503: ("not_ready",)},
        stored=False,
    ),
    "metrics.metrics": Operation(
        tag=_OPEN,
        answers={200: Answer(says="The figures.", media_type=CONTENT_TYPE_LATEST, schema=_TEXT)},
        stored=False,
    ),
    "docs_page.openapi": Operation(
        tag=_OPEN,
        answers={
            200: Answer(
                says="The description, in OpenAPI 3.1.",
                media_type=JSON,
                schema={"type": "object", "required": ["openapi", "info", "paths"]},
                headers=("Cache-Control", "ETag"),
            ),
            304: Answer(says="It is what If-None-Match names.", headers=("Cache-Control", "ETag")),
        },
        stored=False,
    ),
    "docs_page.docs": Operation(
        tag=_OPEN,
        answers={
            200: Answer(
                says="The page.",
                media_type="text/html; charset=utf-8",
                schema=_TEXT,
                headers=("Cache-Control", "Content-Security-Policy"),
            )
        },
        stored=False,
    ),
    "docs_page.begin": _LEADS,
    "docs_page.slashed": _LEADS,
    "docs_page.style": Operation(
        tag=_OPEN,
        answers={
            200: Answer(
                says="The sheet.", media_type="text/css; charset=utf-8", schema=_TEXT, headers=("Cache-Control",)
            )
        },
        stored=False,
    ),
}
