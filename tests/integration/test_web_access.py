"""Keys, scopes and workspaces: who gets in, and what nobody gets to see."""

from __future__ import annotations

import io
import re
import time
from typing import TYPE_CHECKING

import pytest
from werkzeug.test import EnvironBuilder, run_wsgi_app

from relay.core.model import Scope
from relay.store import keys
from relay.web.parts import new_id
from tests.instance import ADMIN_KEY, Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


@pytest.fixture(scope="module")
def guarded(still_database: str) -> Iterator[Instance]:
    """The same, shared by tests whose requests are all refused."""
    with instance(still_database) as made:
        made.workspace()
        yield made


UNKNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"
#: Every route behind a workspace's key, with the scope it asks for.
ROUTES = [
    ("POST", "/v1/events", "ingest"),
    ("POST", "/v1/events/batch", "ingest"),
    ("GET", "/v1/event-types", "write"),
    ("GET", f"/v1/event-types/{UNKNOWN}", "write"),
    ("PUT", f"/v1/event-types/{UNKNOWN}", "write"),
    ("DELETE", f"/v1/event-types/{UNKNOWN}", "write"),
    ("POST", "/v1/endpoints", "write"),
    ("GET", "/v1/endpoints", "read"),
    ("GET", f"/v1/endpoints/{UNKNOWN}", "read"),
    ("GET", f"/v1/deliveries/{UNKNOWN}", "read"),
    ("GET", "/v1/events", "read"),
    ("GET", f"/v1/events/{UNKNOWN}", "read"),
    ("GET", f"/v1/events/{UNKNOWN}/payload", "read"),
    ("GET", f"/v1/endpoints/{UNKNOWN}/deliveries", "read"),
    ("POST", f"/v1/endpoints/{UNKNOWN}/replay", "write"),
    ("GET", "/v1/replays", "read"),
    ("GET", f"/v1/replays/{UNKNOWN}", "read"),
    ("POST", f"/v1/replays/{UNKNOWN}/cancel", "write"),
    ("GET", "/v1/deliveries", "read"),
    ("POST", f"/v1/deliveries/{UNKNOWN}/replay", "write"),
    ("POST", f"/v1/deliveries/{UNKNOWN}/cancel", "write"),
    ("PATCH", f"/v1/endpoints/{UNKNOWN}", "write"),
    ("DELETE", f"/v1/endpoints/{UNKNOWN}", "write"),
    *(
        ("POST", f"/v1/endpoints/{UNKNOWN}/{call}", "write")
        for call in (
            "enable",
            "disable",
            "reset-breaker",
            "retry-now",
            "cancel-pending",
            "rotate-secret",
            "test",
        )
    ),
    ("POST", "/v1/job-secret/rotate", "write"),
    ("POST", "/enqueue", "ingest"),
    ("DELETE", f"/jobs/{UNKNOWN}", "ingest"),
    ("POST", f"/jobs/{UNKNOWN}/replay", "write"),
    ("GET", "/v1/audit", "admin"),
    ("POST", "/v1/keys", "admin"),
    ("GET", "/v1/keys", "admin"),
    ("DELETE", f"/v1/keys/{UNKNOWN}", "admin"),
]
#: One that either of two scopes opens.
EITHER = ("GET", f"/jobs/{UNKNOWN}", ("ingest", "read"))
#: Those that everybody may ask.
OPEN = {
    ("GET", path)
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/",
        "/docs",
        "/docs/",
        "/docs/style.css",
        f"/.well-known/webhook-keys/{UNKNOWN}",
    )
}
INSTANCE_ROUTES = [
    ("POST", "/v1/workspaces"),
    ("GET", "/v1/workspaces"),
    ("PATCH", f"/v1/workspaces/{UNKNOWN}"),
]


def test_every_route_is_listed(relay: Instance) -> None:
    """The tables above hold every route, so that no new one goes unguarded."""
    found = {
        (method, re.sub("<[^>]*>", UNKNOWN, rule.rule))
        for rule in relay.client.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    listed = {(method, path) for method, path, _ in ROUTES} | set(INSTANCE_ROUTES)
    assert found == listed | OPEN | {EITHER[:2]}


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, _ in ROUTES] + INSTANCE_ROUTES + [EITHER[:2]])
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic cms6cms=", "Bearer rk_x", "Bearer rk_abcdefghijkl_" + "A" * 43, "rk_é"],
)
def test_no_key_no_entry(guarded: Instance, method: str, path: str, header: str | None) -> None:
    """B-141: without a good key every route answers 401 with a challenge, having read nothing of the body."""

    class Untouchable(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("the body was read")

    environ = EnvironBuilder(path, method=method, content_type="application/json").get_environ() | {
        "wsgi.input": Untouchable(),
        "CONTENT_LENGTH": "10",
    }
    if header is not None:
        environ["HTTP_AUTHORIZATION"] = header
    body, status, headers = run_wsgi_app(guarded.client.application, environ, buffered=True)
    assert status.startswith("401"), b"".join(body)
    assert headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
def test_scopes_do_not_include_one_another(relay: Instance, method: str, path: str, scope: str) -> None:
    """B-141: a key with every scope but the needed one is refused with that scope's name; with it alone it gets in."""
    others = tuple(other for other in ("ingest", "read", "write", "admin") if other != scope)
    refused = relay.client.open(path, method=method, json={}, headers=relay.key(scopes=others))
    assert (refused.status_code, refused.get_json()["missing_scope"]) == (403, scope)
    allowed = relay.client.open(path, method=method, json={}, headers=relay.key(scopes=(scope,)))
    assert allowed.status_code in {200, 201, 202, 400, 404}


def test_either_scope_opens_a_job(relay: Instance) -> None:
    """A job can be read by whoever may make one and by whoever may read, and by nobody else."""
    method, path, scopes = EITHER
    for scope in scopes:
        assert relay.client.open(path, method=method, headers=relay.key(scopes=(scope,))).status_code == 404
    assert relay.client.open(path, method=method, headers=relay.key(scopes=("write", "admin"))).status_code == 403


@pytest.mark.parametrize(("method", "path"), INSTANCE_ROUTES)
def test_workspaces_are_the_instances(guarded: Instance, method: str, path: str) -> None:
    """B-141: a workspace's key, with all scopes, neither makes nor lists workspaces."""
    answer = guarded.client.open(path, method=method, json={"name": "x"}, headers=guarded.key())
    assert (answer.status_code, answer.get_json()["code"]) == (403, "instance_key_only")


def test_no_instance_key_set(database: str) -> None:
    """Where RELAY_ADMIN_KEY is not set no key is the instance's, the empty one included."""
    with instance(database, RELAY_ADMIN_KEY="") as relay:
        answer = relay.client.get("/v1/workspaces", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert answer.status_code == 401


def test_instance_key_names_a_workspace(relay: Instance) -> None:
    """B-141: the instance key acts in the workspace that Relay-Workspace names, by name or by id, and needs it."""
    other = relay.workspace("other")
    for named in ("other", other, other.upper()):
        assert relay.client.get("/v1/endpoints", headers=relay.admin(named)).status_code == 200
    made = relay.endpoint(relay.admin(other))
    assert relay.client.get(f"/v1/endpoints/{made['id']}", headers=relay.admin("acme")).status_code == 404
    assert relay.client.get("/v1/endpoints", headers=relay.admin()).get_json()["code"] == "workspace_required"
    for named in ("nobody", UNKNOWN):
        answer = relay.client.get("/v1/endpoints", headers=relay.admin(named))
        assert (answer.status_code, answer.get_json()["code"]) == (404, "unknown_workspace")


def test_key_keeps_to_its_workspace(relay: Instance) -> None:
    """A workspace's key with Relay-Workspace works for its own, by name or by id in either case, and is told nothing
    of others, there or not."""
    key = relay.key()
    relay.workspace("other")
    [(own,)] = relay.query("select id::text from relay.workspaces where name = 'acme'")
    for named in ("acme", own, own.upper()):
        assert relay.client.get("/v1/endpoints", headers=key | {"Relay-Workspace": named}).status_code == 200
    answers = [relay.client.get("/v1/endpoints", headers=key | {"Relay-Workspace": n}) for n in ("other", "nobody")]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert answers[0].get_json() == answers[1].get_json()


def test_ids_of_another_workspace_are_unknown(relay: Instance) -> None:
    """B-140, C-67: another workspace's ids answer exactly as ids that nobody has, and nothing changes."""
    mine = relay.key()
    endpoint = relay.endpoint(mine)["id"]
    delivery = relay.event(mine, b'{"type":"a"}').get_json()["deliveries"][0]["id"]
    key_id = relay.client.get("/v1/keys", headers=mine).get_json()["data"][0]["id"]
    relay.workspace("other")
    theirs = relay.key("other")
    for method, noun, known in (
        ("GET", "endpoints", endpoint),
        ("GET", "deliveries", delivery),
        ("DELETE", "keys", key_id),
    ):
        answers = [
            relay.client.open(f"/v1/{noun}/{one}", method=method, headers=theirs) for one in (known, UNKNOWN, "x", "é")
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.text for answer in answers}) == 1
    assert relay.query("select count(*) from relay.api_keys where revoked_at is not null") == [(0,)]
    assert relay.client.get("/v1/endpoints", headers=theirs).get_json()["data"] == []
    assert relay.event(theirs, b'{"type":"a"}').get_json()["deliveries"] == []


def test_key_is_shown_once_and_hashed(relay: Instance) -> None:
    """B-141: the key's text is in the 201 alone; the row has its digest and its public part."""
    made = relay.client.post("/v1/keys", json={"name": "ci", "scopes": ["read"]}, headers=relay.key()).get_json()
    assert re.fullmatch(r"rk_[A-Za-z0-9]{12}_[A-Za-z0-9_-]{43}", made["key"])
    assert made["key"].startswith(made["prefix"] + "_")
    [(row,)] = relay.query("select api_keys::text from relay.api_keys where name = 'ci'")
    assert made["key"][16:] not in row
    listed = relay.client.get("/v1/keys", headers=relay.key())
    assert made["key"] not in listed.text
    [entry] = [one for one in listed.get_json()["data"] if one["id"] == made["id"]]
    assert entry == {name: value for name, value in made.items() if name != "key"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "x"}, "scopes"),
        ({"name": "", "scopes": ["read"]}, "name"),
        ({"name": "x", "scopes": ["read"], "expires": 1}, "expires"),
    ],
)
def test_bad_keys_are_refused(guarded: Instance, body: dict[str, object], field: str) -> None:
    """A key needs a name and scopes that exist."""
    answer = guarded.client.post("/v1/keys", json=body, headers=guarded.key())
    assert (answer.status_code, list(fields_of(answer))) == (400, [field])


def test_revocation_holds_within_a_second(relay: Instance) -> None:
    """B-141: a process that has just let a key in refuses it a second after another one revoked it; audited once."""
    key = relay.key()
    key_id = relay.client.get("/v1/keys", headers=key).get_json()["data"][0]["id"]
    with relay.api.engine.begin() as connection:
        workspace_id = relay.query("select id from relay.workspaces")[0][0]
        assert keys.revoke(connection, workspace_id=workspace_id, key_id=key_id, actor="instance")
    revoked_at = time.monotonic()
    while relay.client.get("/v1/endpoints", headers=key).status_code != 401:
        assert time.monotonic() < revoked_at + 1.0, "the key still works after a second"
    assert relay.client.delete(f"/v1/keys/{key_id}", headers=relay.admin("acme")).status_code == 204
    assert relay.query("select count(*) from relay.audit_log where action = 'key.revoked'") == [(1,)]


def test_revoke_through_the_api(relay: Instance) -> None:
    """DELETE ends a key, with an audit record that names who did it."""
    doomed = relay.client.post("/v1/keys", json={"name": "d", "scopes": ["read"]}, headers=relay.key()).get_json()
    assert relay.client.delete(f"/v1/keys/{doomed['id']}", headers=relay.key()).status_code == 204
    answer = relay.client.get("/v1/endpoints", headers={"Authorization": f"Bearer {doomed['key']}"})
    assert answer.status_code == 401
    [(actor, target)] = relay.query("select actor, target from relay.audit_log where action = 'key.revoked'")
    assert actor.startswith("key:")
    assert target == f"key:{doomed['id']}"


def test_last_use_is_written_behind(relay: Instance) -> None:
    """B-141: a use is noted soon after, and not again within the minute."""
    key = relay.key(scopes=("read",))

    def last_use() -> object:
        return relay.query("select last_used_at from relay.api_keys where 'read' = all(scopes)")[0][0]

    relay.client.get("/v1/endpoints", headers=key)
    deadline = time.monotonic() + 10
    while (first := last_use()) is None:
        assert time.monotonic() < deadline, "the use was never noted"
    key_id = relay.query("select id from relay.api_keys where 'read' = all(scopes)")[0][0]
    with relay.api.engine.begin() as connection:
        keys.note_use(connection, [key_id])
    assert last_use() == first


def test_last_use_never_fails_a_request(relay: Instance) -> None:
    """A key's row that somebody holds locked delays no request."""
    key = relay.key(scopes=("read",))
    with relay.api.engine.begin() as connection:
        connection.exec_driver_sql("select 1 from relay.api_keys for update")
        started = time.monotonic()
        assert relay.client.get("/v1/endpoints", headers=key).status_code == 200
        assert time.monotonic() - started < 2


def test_workspaces_are_made_and_listed(relay: Instance) -> None:
    """The instance key makes workspaces of unique names, with limits, audited, and lists them by pages."""
    relay.workspace("beta", max_endpoints=3, max_payload_bytes=1000)
    taken = relay.client.post("/v1/workspaces", json={"name": "beta"}, headers=relay.admin())
    assert (taken.status_code, taken.get_json()["code"]) == (409, "name_taken")
    page = relay.client.get("/v1/workspaces?limit=1", headers=relay.admin()).get_json()
    assert [(one["name"], one["max_endpoints"]) for one in page["data"]] == [("beta", 3)]
    rest = relay.client.get(f"/v1/workspaces?cursor={page['next_cursor']}", headers=relay.admin()).get_json()
    assert ([one["name"] for one in rest["data"]], rest["next_cursor"]) == (["acme"], None)
    rows = relay.query("select actor, after->>'name' from relay.audit_log where action = 'workspace.created'")
    assert rows == [("instance", "acme"), ("instance", "beta")]


def test_what_concerns_no_workspace_is_the_instances_to_read(relay: Instance) -> None:
    """Workspaces made and their limits are told to the instance's key without Relay-Workspace, by pages; to no tenant."""
    other = relay.workspace("other", max_endpoints=3)
    relay.client.patch(f"/v1/workspaces/{other}", json={"max_endpoints": 4}, headers=relay.admin())
    key = relay.key("other")

    page = relay.client.get("/v1/audit?limit=2", headers=relay.admin()).get_json()
    changed, made = page["data"]
    assert (changed["action"], changed["target"], changed["actor"]) == (
        "workspace.changed", f"workspace:{other}", "instance",
    )  # fmt: skip
    assert (changed["before"], changed["after"]) == ({"max_endpoints": 3}, {"max_endpoints": 4})
    assert (made["action"], made["after"]["name"]) == ("workspace.created", "other")
    rest = relay.client.get(f"/v1/audit?cursor={page['next_cursor']}", headers=relay.admin()).get_json()
    assert ([one["after"]["name"] for one in rest["data"]], rest["next_cursor"]) == (["acme"], None)

    for headers in (key, key | {"Relay-Workspace": other.upper()}, relay.admin("other")):
        seen = relay.client.get("/v1/audit", headers=headers).get_json()["data"]
        assert {one["action"] for one in seen} == {"key.created"}
    strange = relay.client.get(f"/v1/audit?cursor={page['next_cursor']}", headers=key)
    assert (strange.status_code, strange.get_json()["errors"][0]["code"]) == (400, "invalid_cursor")
    lacking = relay.client.get("/v1/audit", headers=relay.key("other", ("read", "write", "ingest")))
    assert lacking.status_code == 403
    assert relay.client.get("/v1/audit", headers=relay.admin("nobody")).status_code == 404


@pytest.mark.parametrize("name", ["", "a b", "-a", "é", "a" * 65, "a\0", UNKNOWN, 5])
def test_workspace_names(guarded: Instance, name: object) -> None:
    """A name works as a header's value and cannot be taken for an id."""
    answer = guarded.client.post("/v1/workspaces", json={"name": name}, headers=guarded.admin())
    assert (answer.status_code, list(fields_of(answer))) == (400, ["name"])


def test_key_texts_are_compared_whole(relay: Instance) -> None:
    """A key with the right public part and another secret part is no key."""
    workspace_id = relay.query("select id from relay.workspaces")[0][0]
    with relay.api.engine.begin() as connection:
        _, text = keys.create(
            connection, key_id=new_id(), workspace_id=workspace_id, name="x", scopes=[Scope.READ], actor="instance"
        )
    right = text.reveal()
    wrong = right[:-1] + ("A" if right[-1] != "A" else "B")
    with relay.api.hot.connect() as connection:
        found = keys.find(connection, right)
        assert found is not None
        assert found.scopes == {Scope.READ}
        assert keys.find(connection, wrong) is None
