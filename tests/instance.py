"""The API over a real database, as tests call it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from relay.bootstrap.api import Api, make_api
from relay.config_sources import load_settings
from relay.web.app import create_app
from tests.conftest import MASTER_KEYS
from tests.described import DescribedClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flask.testing import FlaskClient
    from werkzeug.test import TestResponse

ADMIN_KEY = "instance-key-for-tests"
ALL_SCOPES = ("ingest", "read", "write", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An API process's parts and a client for it."""

    api: Api
    client: FlaskClient
    database: str

    def admin(self, workspace: str | None = None) -> dict[str, str]:
        """Headers of the instance key, acting in `workspace`."""
        named = {} if workspace is None else {"Relay-Workspace": workspace}
        return {"Authorization": f"Bearer {ADMIN_KEY}", **named}

    def workspace(self, name: str = "acme", **limits: int) -> str:
        """Make a workspace; return its id."""
        made = self.client.post("/v1/workspaces", json={"name": name, **limits}, headers=self.admin())
        assert made.status_code == 201, made.text
        return str(made.json["id"])  # type: ignore[index]  # an object, as asserted

    def key(self, workspace: str = "acme", scopes: tuple[str, ...] = ALL_SCOPES) -> dict[str, str]:
        """Make a key; return the headers that use it."""
        made = self.client.post(
            "/v1/keys", json={"name": "test", "scopes": list(scopes)}, headers=self.admin(workspace)
        )
        assert made.status_code == 201, made.text
        return {"Authorization": f"Bearer {made.json['key']}"}  # type: ignore[index]  # an object, as asserted

    def endpoint(self, key: Mapping[str, str], **fields: Any) -> dict[str, Any]:
        """Make an endpoint; return the answer."""
        made = self.client.post(
            "/v1/endpoints", json={"url": "https://hooks.example.com/in", **fields}, headers=dict(key)
        )
        assert made.status_code == 201, made.text
        return dict(made.json)  # type: ignore[arg-type]  # an object, as asserted

    def event(self, key: Mapping[str, str], body: bytes, **headers: str) -> TestResponse:
        """Post an event as JSON, or under the Content-Type given as `Content_Type`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(
            "/v1/events", data=body, headers={"Content-Type": "application/json", **named, **dict(key)}
        )

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Ask the database."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def instance(database: str, **settings: str) -> Iterator[Instance]:
    """Run an API in this process; settings by their names in the environment."""
    environment = {
        "DATABASE_URL": database,
        "RELAY_ADMIN_KEY": ADMIN_KEY,
        "RELAY_MASTER_KEYS": MASTER_KEYS,
        "RELAY_DB_POOL": "4",
        **settings,
    }
    api = make_api(load_settings({name: value for name, value in environment.items() if value}))
    try:
        app = create_app(api)
        app.test_client_class = DescribedClient
        yield Instance(api=api, client=app.test_client(), database=database)
    finally:
        # What writes behind the requests holds connections that a disposed pool would drop unclosed.
        for thread in threading.enumerate():
            if thread.name in {"relay-last-use", "relay-readiness"}:
                thread.join(20)
        api.engine.dispose()
        api.hot.dispose()
        if api.grouped is not None:
            api.grouped.dispose()


def fields_of(answer: TestResponse) -> dict[str, str]:
    """The fields at fault of a problem, with their codes."""
    assert answer.mimetype == "application/problem+json", answer.text
    return {error["field"]: error["code"] for error in (answer.json or {}).get("errors", [])}
