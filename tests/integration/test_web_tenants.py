"""Every route of the API, walked from its own table: nothing of a workspace is another's, and no change goes unrecorded.

A route that is added is walked by itself. Where it takes an argument, a body or a state that is not known here, the walk
fails and says what to teach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from werkzeug.routing import Rule
    from werkzeug.test import TestResponse

#: Routes that take no key: what they show is everybody's, or not of a workspace.
PUBLIC: Final = {"health.healthz", "health.readyz", "metrics.metrics", "webhook_keys.get_webhook_keys"}
#: Arguments that are names within the caller's own workspace, not ids: another workspace's are simply other things.
NAMES: Final = {"name"}
#: What takes events in: the event's own row is the record of it (B-142).
UNAUDITED: Final = {"events.post_event", "event_batch.post_batch", "jobs.enqueue"}

#: Bodies that change something, for routes to which `{}` or none says nothing.
BODIES: Final[Mapping[str, object]] = {
    "endpoints.create_endpoint": {"url": "https://hooks.example.com/new"},
    "endpoints.change_endpoint": {"description": "theirs"},
    "event_types.put_event_type": {"description": "theirs"},
    "keys.create_key": {"name": "new", "scopes": ["read"]},
    "workspaces.create_workspace": {"name": "new"},
    "workspaces.change_workspace": {"max_endpoints": 7},
}
#: SQL that brings things into the state that a route changes.
STATES: Final[Mapping[str, str]] = {
    "delivery_changes.replay_delivery": "update relay.deliveries set status = 3, finished_at = now()",
    "jobs.replay_job": "update relay.deliveries set status = 3, finished_at = now()",
    "endpoint_life.enable_endpoint": "update relay.endpoints set enabled = false",
    "replays.replay_endpoint": "update relay.replays set state = 'done', finished_at = now()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A workspace that has one of everything."""

    name: str
    key: dict[str, str]
    #: By the name that routes have for it.
    arguments: dict[str, str]


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API without a workspace; with so few threads that no call waits for a worker."""
    with instance(database, RELAY_API_THREADS="2") as made:
        yield made


def _world(relay: Instance, name: str) -> World:
    workspace = relay.workspace(name)
    key = relay.key(name)

    def made(method: str, path: str, **how: Any) -> dict[str, Any]:
        answer = relay.client.open(path, method=method, headers={**key, **how.pop("headers", {})}, **how)
        assert answer.status_code < 300, answer.text
        return dict(answer.get_json() or {})

    endpoint = relay.endpoint(key)["id"]
    event = relay.event(key, b'{"type":"order.paid"}', Idempotency_Key="the-same").get_json()
    made("PUT", "/v1/event-types/order.paid", json={"description": name})
    spare = made("POST", "/v1/keys", json={"name": "spare", "scopes": ["read"]})
    return World(
        name=name,
        key=key,
        arguments={
            "workspace_id": workspace,
            "endpoint_id": endpoint,
            "event_id": event["id"],
            "delivery_id": event["deliveries"][0]["id"],
            "job_id": made("POST", "/enqueue", data=b"x", headers={"Relay-Url": "https://hooks.example.com/job"})["id"],
            "replay_id": made("POST", f"/v1/endpoints/{endpoint}/replay", json={})["id"],
            "key_id": spare["id"],
            "name": "order.paid",
        },
    )


def _routes(relay: Instance) -> list[tuple[str, Rule]]:
    """Methods and rules, those that end things last."""
    found = [
        (method, rule)
        for rule in relay.client.application.url_map.iter_rules()
        if rule.endpoint not in PUBLIC
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    ]
    return sorted(found, key=lambda one: (one[0] == "DELETE", one[1].rule, one[0]))


def _path(rule: Rule, arguments: Mapping[str, str]) -> str:
    unknown = rule.arguments - set(arguments)
    assert not unknown, f"{rule.rule} takes {unknown}: teach World what that is in one workspace"
    path = rule.rule
    for name in rule.arguments:
        path = path.replace(f"<{name}>", arguments[name])
    assert "<" not in path, f"{rule.rule} has a converter: teach the walk to fill it"
    return path


def _call(relay: Instance, key: Mapping[str, str], method: str, path: str, rule: Rule) -> TestResponse:
    body: dict[str, Any] = {} if method == "GET" else {"json": BODIES.get(rule.endpoint, {})}
    return relay.client.open(path, method=method, headers=dict(key), **body)


def _rows(relay: Instance) -> dict[str, set[str]]:
    """Every row of every table, as text; without what every use of a key notes."""
    tables = relay.query("select tablename from pg_tables where schemaname = 'relay' and tablename !~ '_[0-9]{8}$'")
    return {
        table: {row for (row,) in relay.query(f"select (to_jsonb(t) - 'last_used_at')::text from relay.{table} t")}
        for (table,) in tables
    }


def test_no_route_reaches_into_another_workspace(relay: Instance) -> None:
    """B-140, C-67: every route answers another workspace's ids as ids that nobody has, and changes nothing there."""
    mine = _world(relay, "mine")
    their_id = relay.workspace("theirs")
    theirs = relay.key("theirs")
    before = _rows(relay)
    walked = 0
    for method, rule in _routes(relay):
        answer = _call(relay, theirs, method, _path(rule, mine.arguments), rule) if rule.arguments else None
        if answer is not None:
            walked += 1
            named = f"{method} {rule.rule}: {answer.status_code} {answer.text}"
            if rule.arguments <= NAMES:
                assert answer.status_code in {200, 201, 204, 404}, named
                continue
            instance_only = answer.status_code == 403 and answer.get_json()["code"] == "instance_key_only"
            assert answer.status_code == 404 or instance_only, named
            unknown = dict.fromkeys(rule.arguments, "01890a5d-ac96-774b-bcce-b302099a8057")
            nobodys = _call(relay, theirs, method, _path(rule, mine.arguments | unknown), rule)
            assert (answer.status_code, answer.text) == (nobodys.status_code, nobodys.text), named
        elif method == "GET":
            walked += 1
            answer = _call(relay, theirs, method, rule.rule, rule)
            # 302: what leads to the description.
            assert answer.status_code in {200, 302, 403}, f"{rule.rule}: {answer.text}"
            found = [value for name, value in mine.arguments.items() if name not in NAMES and value in answer.text]
            assert found == [], f"{rule.rule} shows {found}"
    assert walked > 20
    after = _rows(relay)
    for table, rows in before.items():
        assert {row for row in rows - after[table] if their_id not in row} == set(), f"rows of relay.{table} changed"
        new = "\n".join(after[table] - rows)
        found = [value for name, value in mine.arguments.items() if name not in NAMES and value in new]
        assert found == [], f"new rows of relay.{table} name {found}"


def test_an_id_is_the_same_in_either_case(relay: Instance) -> None:
    """Upper-case ids, in paths, in filters, in Relay-Workspace and with a cursor of the other spelling, are no others."""
    world = _world(relay, "mine")
    shouted = {name: one if name in NAMES else one.upper() for name, one in world.arguments.items()}
    key = world.key | {"Relay-Workspace": shouted["workspace_id"]}
    walked = 0
    for method, rule in _routes(relay):
        if method != "GET" or not rule.arguments or rule.endpoint.startswith("workspaces."):
            continue
        plain, loud = (_call(relay, key, method, _path(rule, which), rule) for which in (world.arguments, shouted))
        assert (loud.status_code, loud.data) == (plain.status_code, plain.data) == (200, plain.data), rule.rule
        walked += 1
    assert walked >= 6

    relay.event(world.key, b'{"type":"order.paid"}')
    plain, loud = (
        relay.client.get(f"/v1/deliveries?limit=1&endpoint_id={which['endpoint_id']}", headers=key).get_json()
        for which in (world.arguments, shouted)
    )
    assert plain == loud
    assert plain["next_cursor"]
    query = f"cursor={plain['next_cursor']}&endpoint_id={shouted['endpoint_id']}"
    assert relay.client.get(f"/v1/deliveries?{query}", headers=key).status_code == 200
    named = relay.admin(shouted["workspace_id"])
    assert relay.client.get("/v1/endpoints", headers=named).status_code == 200
    changed = relay.client.patch(
        f"/v1/workspaces/{shouted['workspace_id']}", json={"max_endpoints": 9}, headers=relay.admin()
    )
    assert changed.get_json()["id"] == world.arguments["workspace_id"]


def test_every_change_is_recorded(relay: Instance) -> None:
    """B-142: each route that changes something writes a record, by whom, in the workspace concerned; none its secrets."""
    for number, (method, rule) in enumerate(_routes(relay)):
        if method == "GET" or rule.endpoint in UNAUDITED:
            continue
        world = _world(relay, f"w{number}")
        if rule.endpoint in STATES:
            relay.query(STATES[rule.endpoint])
        instances = rule.endpoint.startswith("workspaces.")
        key = relay.admin() if instances else world.key
        [(before,)] = relay.query("select count(*) from relay.audit_log")
        answer = _call(relay, key, method, _path(rule, world.arguments), rule)
        named = f"{method} {rule.rule}: {answer.status_code} {answer.text}"
        assert answer.status_code < 300, f"{named}: teach BODIES or STATES what it takes"
        records = relay.query(
            "select actor, workspace_id::text, concat_ws(' ', before, after) from relay.audit_log"
            " order by at, id offset %s",
            before,
        )
        assert len(records) == 1, f"{named}: {records}"
        [(actor, workspace, text)] = records
        assert actor == "instance" if instances else actor.startswith("key:"), named
        assert instances or workspace == world.arguments["workspace_id"], named
        for secret in ("secret", "key"):
            value = (answer.get_json(silent=True) or {}).get(secret)
            assert value is None or value not in text, named
