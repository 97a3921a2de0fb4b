"""The API's description: whole, well-formed, served and shown; and true, which a fuzzer tries to disprove."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from relay.web import docs_page
from relay.web.openapi import document
from relay.web.problems import MEDIA_TYPE
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis.engine.recorder import ScenarioRecorder

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
#: What the fuzzer's choices follow from: a failure comes again with it.
SEED: Final = 20_261_201
#: Random requests for each call, beside the examples and the several thousand that probe every bound.
EXAMPLES: Final = 8
#: Calls that judge more than a schema says, so that a request that meets it may be 400 all the same: cursors belong to
#: their list, ends come after beginnings, URLs lead somewhere, secrets have a form by their kind, texts are JSON.
JUDGED_FURTHER: Final = (
    "list_audit",
    "list_deliveries",
    "list_endpoint_deliveries",
    "list_endpoints",
    "list_events",
    "list_keys",
    "list_replays",
    "list_workspaces",
    "replay_endpoint",
    "create_endpoint",
    "change_endpoint",
    "rotate_secret",
    "rotate_job_secret",
    "put_event_type",
    "post_event",
    "post_batch",
    "enqueue",
)


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace; with so few threads that no call waits for a worker."""
    with instance(database, RELAY_API_THREADS="1") as made:
        made.workspace()
        yield made


@pytest.fixture(scope="module")
def still(still_database: str) -> Iterator[Instance]:
    """An API whose database stays empty."""
    with instance(still_database) as made:
        yield made


@pytest.fixture(scope="module")
def described(still: Instance) -> dict[str, Any]:
    """The description, as anybody gets it."""
    answer = still.client.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.get_json())


def test_every_route_is_described_and_nothing_else(still: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route without an entry, or an entry without a route, is an error that names it."""
    app = still.client.application
    fewer = {name: entry for name, entry in document.OPERATIONS.items() if name != "keys.revoke_key"}
    monkeypatch.setattr(document, "OPERATIONS", fewer)
    with pytest.raises(ValueError, match=r"keys\.revoke_key"), app.app_context():
        document.build(app, None)  # type: ignore[arg-type]  # nobody gets to the gate
    monkeypatch.setattr(document, "OPERATIONS", {**fewer, "keys.revoke_key": None, "keys.gone": None})
    with pytest.raises(ValueError, match=r"keys\.gone"), app.app_context():
        document.build(app, None)  # type: ignore[arg-type]  # nobody gets to the gate


def test_the_description_is_well_formed(described: dict[str, Any]) -> None:
    """It is OpenAPI 3.1, every reference leads somewhere, every schema is one, and every id is one call's."""
    assert described["openapi"] == "3.1.0"
    text = json.dumps(described)
    for ref in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        found: Any = described
        for step in ref.split("/", 2):
            found = found[step]
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    calls = [call for methods in described["paths"].values() for call in methods.values()]
    assert len(calls) > 45
    assert len({call["operationId"] for call in calls}) == len(calls)
    assert all(call["summary"] and call["description"] for call in calls)
    # All of Flask's ways to name a part of a path are gone from it.
    assert not [path for path in described["paths"] if set(path) & set("<>:")]


def test_objects_of_answers_are_closed(described: dict[str, Any]) -> None:
    """No answer may hold more than is described, and nothing that is always there is left open."""
    open_ones = [
        name
        for name, schema in described["components"]["schemas"].items()
        if "properties" in schema and schema.get("additionalProperties") is not False
    ]
    assert open_ones == []
    endpoint = described["components"]["schemas"]["Endpoint"]
    assert set(endpoint["required"]) == set(endpoint["properties"])
    assert "secret" not in endpoint["properties"]


def test_scopes_are_told_as_they_are_asked(described: dict[str, Any]) -> None:
    """B-141: what a call tells of its key is what its gate asks for."""
    paths = described["paths"]
    assert paths["/v1/keys"]["post"]["security"] == [{"key": ["admin"]}, {"instance_key": []}]
    assert paths["/jobs/{job_id}"]["get"]["security"] == [
        {"key": ["ingest"]},
        {"key": ["read"]},
        {"instance_key": []},
    ]
    assert paths["/v1/workspaces"]["get"]["security"] == [{"instance_key": []}]
    assert [path for path, methods in paths.items() if any(not call["security"] for call in methods.values())] == [
        "/.well-known/webhook-keys/{endpoint_id}",
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/",
        "/docs/",
        "/docs/style.css",
    ]


def test_every_field_of_an_endpoint_is_explained(still: Instance, described: dict[str, Any]) -> None:
    """Each has a sentence, in requests and in answers; a change tells of no default, since what it leaves out stays."""
    schemas = described["components"]["schemas"]
    obvious = {"id", "created_at", "updated_at"}
    for name in ("Endpoint", "NewEndpoint", "EndpointRequest", "EndpointPatch", "Retry", "Attempt"):
        fields = schemas[name]["properties"]
        assert [field for field, one in fields.items() if not one.get("description") and field not in obvious] == []
    for name in ("EndpointRequest", "EndpointPatch"):
        assert all(one["description"] for one in schemas[name]["properties"]["retry"]["properties"].values())
    for name in ("EndpointPatch", "WorkspaceChange"):
        assert [field for field, one in schemas[name]["properties"].items() if "default" in one] == []
    assert schemas["EndpointRequest"]["properties"]["rate_per_second"]["default"] == 10.0
    (sign,) = (one for one in described["paths"]["/enqueue"]["post"]["parameters"] if one.get("name") == "Relay-Sign")
    assert sign["schema"]["default"] == "none"
    assert schemas["Retry"]["properties"]["jitter"]["description"].split(":")[0] in still.client.get("/docs").text


@pytest.mark.parametrize("path", ["/", "/docs/"])
def test_who_begins_elsewhere_is_led_to_the_page(still: Instance, path: str) -> None:
    """A browser at the API's address finds the page, without a key."""
    answer = still.client.get(path, follow_redirects=True)
    assert (answer.status_code, answer.request.path) == (200, "/docs")


def test_the_manual_and_the_description_agree(described: dict[str, Any]) -> None:
    """docs/api.md names every call, and every code that a call can be refused with, and no others."""
    page = (DOCS / "api.md").read_text("utf-8")
    calls = page[: page.index("## Keys and workspaces")].replace("{endpoint id}", "{id}").replace("{name}", "{id}")
    for path, methods in described["paths"].items():
        for method in methods:
            shown = re.sub(r"\{\w+\}", "{id}", path)
            last = re.escape(shown[shown.rindex("/") :])
            assert re.search(rf"{method.upper()}[^|]*({re.escape(shown)}|{last})`", calls), f"{method} {path}"
    table = page[page.index("## Errors") :]
    told = set(re.findall(r"`([a-z_]+)`", "\n".join(re.findall(r"^\| \d+ \| ([^|]*) \|", table, re.MULTILINE))))
    codes = {
        code
        for answer in described["components"]["responses"].values()
        for code in answer["content"][MEDIA_TYPE]["schema"]["properties"]["code"]["enum"]
    }
    assert told - codes == {"method_not_allowed"}
    assert codes - told == set()


def test_the_description_can_be_kept(still: Instance) -> None:
    """It is public, cacheable, and 304 to whoever has it."""
    first = still.client.get("/openapi.json")
    assert first.headers["Cache-Control"] == "public, max-age=300"
    again = still.client.get("/openapi.json", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")


class _Tags(HTMLParser):
    """The elements of a page, and its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_shows_every_call_offline(still: Instance, described: dict[str, Any]) -> None:
    """/docs has each call and schema, runs no script, and loads one sheet, from this server alone."""
    answer = still.client.get("/docs")
    page = _Tags()
    page.feed(answer.text)
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    calls = {call["operationId"] for methods in described["paths"].values() for call in methods.values()}
    schemas = {f"schema-{name}" for name in described["components"]["schemas"]}

    assert calls | schemas <= ids
    links = [attributes["href"] or "" for tag, attributes in page.elements if tag in {"a", "link"}]
    assert {link for link in links if not link.startswith("#")} == {"docs/style.css", "openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    assert not [tag for tag, attributes in page.elements if tag in {"script", "img", "iframe", "form", "style"}]
    assert not [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)]
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'self';")
    assert "unsafe" not in policy
    assert still.client.get("/docs/style.css").mimetype == "text/css"


def test_the_page_escapes(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a description holds is text on the page."""
    evil = "<script>alert(1)</script>\"'&"

    def build(app: Any, gate: Any) -> dict[str, Any]:
        made = document.build(app, gate)
        made["info"]["version"] = evil
        call = made["paths"]["/v1/keys"]["post"]
        call["summary"] = call["description"] = evil
        call["parameters"].append({"name": evil, "in": evil, "description": evil, "schema": {"enum": [evil]}})
        made["components"]["schemas"]["Key"]["properties"][evil] = {"type": evil, "description": evil, "default": evil}
        return made

    monkeypatch.setattr(docs_page, "build", build)
    page = relay.client.get("/docs").text
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 8


@schemathesis.serializer("application/x-ndjson")
def _lines(_context: Any, value: Any) -> bytes:
    """Write a body of lines: as it is, where it is text."""
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "surrogatepass")


def _seeded(relay: Instance) -> dict[str, list[str]]:
    """Make what calls are about, in several states; return ids by the names that paths have for them."""
    key = relay.key()
    relay.endpoint(key, event_types=["order.*"])
    taken = [relay.event(key, b'{"type":"order.paid"}').get_json() for _ in range(6)]
    job = {"Relay-Url": "https://example.com/job", "Relay-Header-Authorization": "Bearer abc"}
    jobs = [relay.client.post("/enqueue", data=b"x", headers=key | job).get_json()["id"] for _ in range(4)]
    deliveries = [one["deliveries"][0]["id"] for one in taken]
    relay.query(
        "update relay.deliveries set status = 3, reason = 'gone', finished_at = now() where id = any(%s)",
        [*deliveries[:3], *jobs[:2]],
    )
    return {"delivery_id": deliveries, "job_id": jobs}


def _fuzz(relay: Instance, *phases: str) -> None:
    """Send what the fuzzer makes of the description; fail with what was answered otherwise than it says."""
    known = _seeded(relay)
    # An instance's key may call all, in the workspace that it names.
    config = SchemathesisConfig.from_dict(
        {
            "seed": SEED,
            "headers": relay.admin("acme"),
            "continue-on-failure": True,
            "generation": {"max-examples": EXAMPLES, "deterministic": True, "database": "none", "no-shrink": True},
            "phases": {name: {"enabled": name in phases} for name in ("examples", "coverage", "fuzzing", "stateful")},
            "checks": {
                # Both are asked without the fuzzer, of every route: test_web_access.py, test_web_tenants.py.
                "ignored_auth": {"enabled": False},
                "object_level_authorization": {"enabled": False},
                "negative_data_rejection": {"expected-statuses": ["4xx"]},
            },
            "operations": [
                {
                    "include-operation-id": list(JUDGED_FURTHER),
                    "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "4xx"]}},
                },
                # Nothing delivers here, and that is what it says.
                {
                    "include-operation-id": "readyz",
                    "checks": {"not_a_server_error": {"expected-statuses": ["2xx", "4xx", "503"]}},
                },
                # GET /v1/events/batch is that of an event whose id is none.
                {
                    "include-operation-id": "post_batch",
                    "checks": {
                        "positive_data_acceptance": {"expected-statuses": ["2xx", "4xx"]},
                        "unsupported_method": {"enabled": False},
                        "allow_header_conformance": {"enabled": False},
                    },
                },
                # Headers of other names are anybody's, and a job has a name for each that it sends.
                {
                    "include-operation-id": "enqueue",
                    "checks": {
                        "positive_data_acceptance": {"expected-statuses": ["2xx", "4xx"]},
                        "negative_data_rejection": {"enabled": False},
                    },
                },
            ],
        }
    )
    schema = schemathesis.openapi.from_wsgi("/openapi.json", relay.client.application, config=config)

    @schema.hook
    def map_path_parameters(_context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        """Ask about things that there are, half of the time: ids that are made up are nobody's."""
        for name, ids in known.items():
            value = (path_parameters or {}).get(name)
            if path_parameters and isinstance(value, str) and re.fullmatch(r"[0-9a-f-]{36}", value):
                place = int(value[-4:], 16)
                if place % 2:
                    path_parameters[name] = ids[place // 2 % len(ids)]
        return path_parameters

    print(f"seed {SEED}")
    asked: set[str] = set()
    faults: list[str] = []
    for event in from_schema(schema).execute():
        match event:
            case events.ScenarioFinished(recorder=recorder):
                asked |= {recorder.label for one in recorder.interactions.values() if one.response is not None}
                faults += _faults(recorder)
            case events.NonFatalError(label=label, value=error):
                faults.append(f"{label}: the fuzzer failed: {error!r}")
            case events.FatalError(exception=error):
                raise error
    assert not faults, f"seed {SEED}: {len(faults)} faults\n" + "\n\n".join(faults[:20])
    described = relay.client.get("/openapi.json").get_json()["paths"]
    calls = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    # The fuzzer leaves the description alone, which it has; it was asked for here.
    assert calls - asked <= {"GET /openapi.json"}


def _faults(recorder: ScenarioRecorder) -> Iterator[str]:
    for case, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                failure, interaction = check.failure_info.failure, recorder.interactions.get(case)
                answer = interaction.response if interaction is not None else None
                said = "" if answer is None else f"\n  {answer.status_code} {answer.text[:500]}"
                yield (
                    f"{recorder.label}: {check.name}: {failure.title}: {failure.message[:500]}\n"
                    f"  {check.failure_info.code_sample[:1000]}{said}"
                )


def test_requests_at_every_bound_are_answered_as_described(relay: Instance) -> None:
    """No 5xx, no status, header, type or content that is not described, for whatever is at a bound or just beyond."""
    _fuzz(relay, "coverage")


def test_random_requests_are_answered_as_described(relay: Instance) -> None:
    """The same for the examples, and for requests at random, good and bad."""
    _fuzz(relay, "examples", "fuzzing")
