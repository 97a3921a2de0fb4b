"""Endpoints through the API: what they may be, what is kept secret, and how many there may be."""

from __future__ import annotations

import base64
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tests.certificates import self_signed
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


OWN_SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace, which may have four endpoints."""
    with instance(database) as made:
        made.workspace(max_endpoints=4)
        yield made


def test_created_as_asked(relay: Instance) -> None:
    """Every field reads back as given, the URL normalised, header values masked; the secret is in the 201 alone."""
    key = relay.key()
    given: dict[str, Any] = {
        "url": "HTTPS://Hooks.Example.com:443/in%2f?a=b",
        "description": "Döner \N{BENTO BOX}",
        "event_types": ["order.*", "a", "a"],
        "headers": {"X-Token": "tok-123", "X-Empty": ""},
        "signing": "standard",
        "rate_per_second": 0.25,
        "burst": 7,
        "max_in_flight": 3,
        "timeout_ms": 29_000,
        "retry": {"strategy": "fixed", "base_ms": 1000, "max_attempts": 2, "factor": None},
        "metadata": {"team": ["x", 1, 2.5, None, {"y": True}]},
        "enabled": False,
    }
    made = relay.endpoint(key, **given)
    assert made["secret"].startswith("whsec_")
    read = relay.client.get(f"/v1/endpoints/{made['id']}", headers=key).get_json()
    assert read == {name: value for name, value in made.items() if name != "secret"}
    assert read["url"] == "https://hooks.example.com/in%2F?a=b"
    assert read["event_types"] == ["order.*", "a"]
    assert read["headers"] == {"X-Token": "********", "X-Empty": "********"}
    for name in (
        "description",
        "signing",
        "rate_per_second",
        "burst",
        "max_in_flight",
        "timeout_ms",
        "metadata",
        "enabled",
    ):
        assert read[name] == given[name]
    assert (read["retry"]["strategy"], read["retry"]["base_ms"], read["retry"]["max_attempts"]) == ("fixed", 1000, 2)
    assert read["disabled_at"] is not None


def test_defaults(relay: Instance) -> None:
    """B-30, B-50: what is not given, or given as null, is as documented; nothing was sent yet."""
    key = relay.key()
    nothing: dict[str, Any] = dict.fromkeys(
        [
            "transport",
            "description",
            "event_types",
            "headers",
            "secret",
            "signing",
            "client_certificate",
            "burst",
            "rate_per_second",
            "max_in_flight",
            "timeout_ms",
            "retry",
            "metadata",
            "enabled",
        ]
    )
    for made in (relay.endpoint(key), relay.endpoint(key, **nothing)):
        assert made["secret"].startswith("whsec_")
        for name in ("id", "url", "secret", "created_at", "updated_at"):
            del made[name]
        assert made == {
            "kind": "endpoint",
            "transport": "http",
            "description": "",
            "event_types": [],
            "signing": "relay",
            "headers": {},
            "client_certificate": None,
            "rate_per_second": 10.0,
            "burst": 20,
            "max_in_flight": None,
            "timeout_ms": None,
            "retry": {
                "strategy": "exponential",
                "max_attempts": 12,
                "base_ms": 5000,
                "max_ms": 21_600_000,
                "factor": 3.0,
                "jitter": 0.2,
                "statuses": [],
            },
            "metadata": {},
            "enabled": True,
            "disabled_at": None,
            "disabled_reason": None,
            "previous_secret_expires_at": None,
            "breaker": {"state": "closed", "failures": 0, "trips": 0, "open_until": None},
            "held_until": None,
            "last_success_at": None,
            "last_failure_at": None,
            "last_day": {"success": 0, "retryable_failure": 0, "permanent_failure": 0, "deferred": 0},
        }


def test_what_deliveries_leave_is_shown(relay: Instance) -> None:
    """An endpoint shows its breaker, a hold that lasts, and the counts of the last day alone; so does the list."""
    key = relay.key()
    made = relay.endpoint(key)
    relay.query(
        "update relay.endpoints set breaker_state = 1, breaker_failures = 5, breaker_trips = 2, "
        "breaker_open_until = '2030-01-01', held_until = now() + interval '1 minute'"
    )
    relay.query(
        "insert into relay.endpoint_minutes values (%(id)s, now() - interval '25 h', 50, 0, 0, 0, '2026-01-01', null), "
        "(%(id)s, now() - interval '2 h', 3, 1, 2, 4, null, '2026-01-02'), "
        "(%(id)s, now(), 1, 1, 0, 0, '2026-01-03', null)".replace("%(id)s", f"'{made['id']}'")
    )
    read = relay.client.get(f"/v1/endpoints/{made['id']}", headers=key).get_json()
    assert read["breaker"] == {"state": "open", "failures": 5, "trips": 2, "open_until": "2030-01-01T00:00:00.000000Z"}
    assert read["held_until"] is not None
    assert (read["last_success_at"][:10], read["last_failure_at"][:10]) == ("2026-01-03", "2026-01-02")
    assert read["last_day"] == {"success": 4, "retryable_failure": 2, "permanent_failure": 2, "deferred": 4}
    assert relay.client.get("/v1/endpoints", headers=key).get_json()["data"] == [read]
    relay.query("update relay.endpoints set held_until = now() - interval '1 s'")
    assert relay.client.get(f"/v1/endpoints/{made['id']}", headers=key).get_json()["held_until"] is None


def test_chat_endpoints(relay: Instance) -> None:
    """B-101: a chat endpoint has an address, and the platform's token for a secret: unsigned, and only ever replaced."""
    key = relay.key()
    token = "T0000/B0000/" + "x" * 24
    made = relay.endpoint(key, transport="slack", url="slack://alerts", secret=token)
    assert (made["url"], made["signing"], made["secret"]) == ("slack://alerts", "none", token)
    path = f"/v1/endpoints/{made['id']}"
    assert token not in relay.client.get(path, headers=key).text
    for changes, faults in (
        ({"url": "https://hooks.slack.com/x"}, {"url": "invalid_address"}),
        ({"signing": "relay"}, {"signing": "not_signed"}),
        ({"transport": "http"}, {"transport": "fixed"}),
    ):
        assert fields_of(relay.client.patch(path, json=changes, headers=key)) == faults
    assert relay.client.patch(path, json={"url": "slack://ops", "signing": None}, headers=key).status_code == 200
    assert fields_of(relay.client.post(f"{path}/rotate-secret", headers=key)) == {"secret": "required"}
    rotated = relay.client.post(f"{path}/rotate-secret", json={"secret": token[:-1] + "y"}, headers=key)
    assert rotated.get_json()["previous_secret_expires_at"] is None
    assert relay.query("select url, signing, previous_secret from relay.endpoints") == [("slack://ops", "none", None)]


def test_platforms_address_is_judged(database: str) -> None:
    """B-82: for a chat transport the URL that is sent to is judged, which is the platform's."""
    with instance(database, RELAY_SLACK_URL="http://10.0.0.1:9") as relay:
        relay.workspace()
        body = {"transport": "slack", "url": "slack://alerts", "secret": "T0000/B0000/" + "x" * 24}
        answer = relay.client.post("/v1/endpoints", json=body, headers=relay.key())
        assert fields_of(answer) == {"url": "scheme"}
        assert "RELAY_SLACK_URL" in answer.text


def test_secrets_are_sealed(relay: Instance) -> None:
    """B-94: the secret and each header's value are stored sealed for their endpoint, and open with the master key."""
    made = relay.endpoint(relay.key(), secret=OWN_SECRET, headers={"X-Token": "tok-123"})
    assert made["secret"] == OWN_SECRET
    [(sealed, headers, row)] = relay.query("select secret, headers, endpoints::text from relay.endpoints")
    assert "tok-123" not in row
    assert OWN_SECRET not in row
    owner = UUID(made["id"])
    assert relay.api.vault.open(sealed, owner=owner).reveal() == OWN_SECRET
    assert relay.api.vault.open(base64.b64decode(headers["X-Token"]), owner=owner).reveal() == "tok-123"


def test_secrets_show_nowhere(relay: Instance, caplog: pytest.LogCaptureFixture) -> None:
    """C-29, B-95: no answer but the 201, no audit record, no log and no error holds a secret or a header's value."""
    caplog.set_level(logging.DEBUG)
    key = relay.key()
    relay.endpoint(key, secret=OWN_SECRET, headers={"X-Token": "tok-123"})
    bad = {"url": 1, "secret": OWN_SECRET[:-5] + "tok-123", "headers": {"X-A": "tok-123\n"}, "enabled": "tok-123"}
    refused = relay.client.post("/v1/endpoints", json=bad, headers=key)
    assert refused.status_code == 400
    seen = [refused.text, relay.client.get("/v1/endpoints", headers=key).text, caplog.text]
    seen += [str(row) for row in relay.query("select audit_log::text from relay.audit_log")]
    for text in seen:
        assert "tok-123" not in text
        assert OWN_SECRET not in text
        assert key["Authorization"].removeprefix("Bearer ") not in text


def test_audited(relay: Instance) -> None:
    """B-142: a record of who made what, in the transaction of the creation."""
    made = relay.endpoint(relay.admin("acme"), headers={"X-Token": "t"})
    rows = relay.query(
        "select actor, action, target, after, request_id is not null from relay.audit_log"
        " where action like 'endpoint%%'"
    )
    [(actor, action, target, after, has_request_id)] = rows
    assert (actor, action, target) == ("instance", "endpoint.created", f"endpoint:{made['id']}")
    assert (after["url"], after["header_names"], has_request_id) == (made["url"], ["X-Token"], True)


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"url": "http://hooks.example.com/"}, {"url": "scheme"}),
        ({"url": "https://hooks.example.com:8443/"}, {"url": "port"}),
        ({"url": "https://10.0.0.1/"}, {"url": "address_refused"}),
        ({"url": "https://[::ffff:127.0.0.1]/"}, {"url": "address_refused"}),
        ({"url": "https://localhost/"}, {"url": "reserved_name"}),
        ({"url": "https://u:p@hooks.example.com/"}, {"url": "userinfo"}),
        ({"url": None}, {"url": "wrong_type"}),
        ({"url": "https://a.example/\0"}, {"url": "invalid_text"}),
        ({"description": "x" * 1001}, {"description": "wrong_length"}),
        ({"description": "\ud800"}, {"description": "invalid_text"}),
        ({"event_types": ["a", "b..c"]}, {"event_types[1]": "invalid_pattern"}),
        ({"event_types": "a"}, {"event_types": "wrong_type"}),
        ({"headers": {"X-A": "1\r\nX-Evil: 1"}}, {"headers.X-A": "invalid_header_value"}),
        ({"headers": {"X-A": "a\nb"}}, {"headers.X-A": "invalid_header_value"}),
        ({"headers": {"rElAy-SiGnAtUrE": "x"}}, {"headers.rElAy-SiGnAtUrE": "forbidden_header"}),
        ({"headers": {"webhook-signature": "x"}}, {"headers.webhook-signature": "forbidden_header"}),
        ({"headers": {"Transfer-Encoding": "chunked"}}, {"headers.Transfer-Encoding": "forbidden_header"}),
        ({"headers": {"Host": "x"}}, {"headers.Host": "forbidden_header"}),
        ({"headers": {"a b": "x"}}, {"headers": "invalid_header_name"}),
        ({"headers": {"X-A": 1}}, {"headers.X-A": "wrong_type"}),
        ({"secret": "whsec_short"}, {"secret": "invalid_secret"}),
        ({"headers": {"X-A": "1", "x-a": "2"}}, {"headers.x-a": "duplicate"}),
        ({"headers": {"X-A": "********"}}, {"headers.X-A": "masked_value"}),
        ({"signing": "nope"}, {"signing": "not_a_choice"}),
        ({"signing": "standard-ed25519", "secret": OWN_SECRET}, {"secret": "invalid_secret"}),
        ({"transport": "carrier-pigeon"}, {"transport": "not_a_choice"}),
        ({"transport": "slack", "url": "slack://alerts"}, {"secret": "required"}),
        (
            {"transport": "telegram", "signing": "relay", "secret": "1:x"},
            {"signing": "not_signed", "url": "invalid_address"},
        ),
        ({"max_in_flight": 0}, {"max_in_flight": "out_of_range"}),
        ({"max_in_flight": 10_001}, {"max_in_flight": "out_of_range"}),
        ({"max_in_flight": "5"}, {"max_in_flight": "wrong_type"}),
        ({"max_in_flight": True}, {"max_in_flight": "wrong_type"}),
        ({"timeout_ms": 99}, {"timeout_ms": "out_of_range"}),
        ({"timeout_ms": 30_001}, {"timeout_ms": "out_of_range"}),
        ({"retry": {"max_attempts": 51}}, {"retry.max_attempts": "invalid"}),
        ({"retry": {"nope": 1}}, {"retry.nope": "invalid"}),
        ({"metadata": {"a": "x" * 4090}}, {"metadata": "too_long"}),
        ({"metadata": {"a": "\0"}}, {"metadata.a": "invalid_text"}),
        ({"metadata": []}, {"metadata": "wrong_type"}),
        ({"enabled": 1}, {"enabled": "wrong_type"}),
        ({"rate_per_second": 0}, {"rate_per_second": "out_of_range"}),
        ({"rate_per_second": -1}, {"rate_per_second": "out_of_range"}),
        ({"rate_per_second": 0.0009}, {"rate_per_second": "out_of_range"}),
        ({"rate_per_second": 1e9}, {"rate_per_second": "out_of_range"}),
        ({"rate_per_second": 10**299}, {"rate_per_second": "out_of_range"}),
        ({"rate_per_second": "10"}, {"rate_per_second": "wrong_type"}),
        ({"rate_per_second": True}, {"rate_per_second": "wrong_type"}),
        ({"burst": 0}, {"burst": "out_of_range"}),
        ({"burst": 1.5}, {"burst": "wrong_type"}),
        ({"burst": 1_000_001}, {"burst": "out_of_range"}),
        (
            {"client_certificate": {}},
            {"client_certificate.certificate": "required", "client_certificate.private_key": "required"},
        ),
        (
            {"client_certificate": {"certificate": "x", "private_key": "********"}},
            {"client_certificate.private_key": "masked_value"},
        ),
        ({"breaker": {}, "id": "x"}, {"breaker": "unknown_field", "id": "unknown_field"}),
    ],
)
def test_refusals(relay: Instance, fields: dict[str, Any], faults: dict[str, str]) -> None:
    """B-80, B-85, C-19, C-30, C-35, C-36, C-64: each bad field is named by its path, with a code; nothing is stored."""
    answer = relay.client.post(
        "/v1/endpoints", json={"url": "https://hooks.example.com/", **fields}, headers=relay.key()
    )
    assert answer.status_code == 400
    assert fields_of(answer) == faults
    assert relay.query("select count(*) from relay.endpoints") == [(0,)]


def test_every_fault_is_named_at_once(relay: Instance) -> None:
    """All the fields at fault are in one answer, a missing one too."""
    answer = relay.client.post("/v1/endpoints", json={"x": 1, "signing": "y", "event_types": [1]}, headers=relay.key())
    assert set(fields_of(answer)) == {"url", "x", "signing", "event_types[0]"}


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"", "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_request"),
        (b'{"url":"https://a.example/","url":"https://b.example/"}', "application/json", 400, "invalid_request"),
        (b'{"metadata":{"a":1e400}}', "application/json", 400, "invalid_request"),
        (b'{"metadata":{"a":' + b"1" * 5000 + b"}}", "application/json", 400, "invalid_request"),
        (b'{"url":NaN}', "application/json", 400, "invalid_json"),
        (b"[" * 5000 + b"]" * 5000, "application/json", 400, "invalid_json"),
        (b'{"url":"https://a.example/"}', "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b" " * 131_073, "application/json", 413, "payload_too_large"),
    ],
)
def test_bodies_that_are_no_object(relay: Instance, body: bytes, content_type: str, status: int, code: str) -> None:
    """C-32, C-34: what is not one clean JSON object is refused with a problem."""
    answer = relay.client.post("/v1/endpoints", data=body, content_type=content_type, headers=relay.key())
    assert (answer.status_code, answer.get_json()["code"]) == (status, code)


def test_timeout_must_fit_the_lease(database: str) -> None:
    """B-23: a time-out for which the lease leaves no room, with 10 s of slack, is refused."""
    with instance(database, RELAY_LEASE_SECS="31", RELAY_TOTAL_TIMEOUT_MS="20000") as relay:
        relay.workspace()
        key = relay.key()
        assert relay.endpoint(key, timeout_ms=20_999)["timeout_ms"] == 20_999
        answer = relay.client.post(
            "/v1/endpoints", json={"url": "https://a.example.com/", "timeout_ms": 21_000}, headers=key
        )
        assert fields_of(answer) == {"timeout_ms": "out_of_range"}
        assert "RELAY_LEASE_SECS" in answer.text


def test_private_addresses_under_the_switch(database: str) -> None:
    """B-83: the development switch lets loopback over http through, the clouds' metadata addresses not."""
    with instance(database, RELAY_ALLOW_PRIVATE_ENDPOINTS="true") as relay:
        relay.workspace()
        key = relay.key()
        assert relay.endpoint(key, url="http://127.0.0.1:9/")["url"] == "http://127.0.0.1:9/"
        answer = relay.client.post("/v1/endpoints", json={"url": "http://169.254.169.254/"}, headers=key)
        assert fields_of(answer) == {"url": "address_refused"}


def test_without_master_keys(database: str) -> None:
    """B-94: a process without RELAY_MASTER_KEYS seals nothing, 503 naming the setting; all the rest it does."""
    with instance(database) as other:
        other.workspace()
        endpoint_id = other.endpoint(other.key())["id"]
    with instance(database, RELAY_MASTER_KEYS="") as relay:
        key = relay.key()
        path = f"/v1/endpoints/{endpoint_id}"
        certificate, private_key = self_signed()
        pair = {"certificate": certificate, "private_key": private_key}
        for answer in (
            relay.client.post("/v1/endpoints", json={"url": "https://a.example.com/"}, headers=key),
            relay.client.post(f"{path}/rotate-secret", headers=key),
            relay.client.patch(path, json={"headers": {"X-A": "1"}}, headers=key),
            relay.client.patch(path, json={"client_certificate": pair}, headers=key),
        ):
            assert (answer.status_code, answer.get_json()["code"]) == (503, "no_master_keys")
            assert "RELAY_MASTER_KEYS" in answer.get_json()["detail"]
        changed = relay.client.patch(path, json={"burst": 3, "headers": {}}, headers=key)
        assert (changed.status_code, changed.get_json()["burst"]) == (200, 3)
        assert relay.event(key, b'{"type":"a"}').status_code == 202
        assert relay.client.delete(path, headers=key).status_code == 204


def test_limit_holds_against_simultaneous_creates(relay: Instance) -> None:
    """B-143: of twelve creates at once in a workspace for four, four succeed and the rest are 409."""
    key = relay.key()

    def create(number: int) -> int:
        client = relay.client.application.test_client()
        return client.post(
            "/v1/endpoints", json={"url": f"https://hooks.example.com/{number}"}, headers=key
        ).status_code

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(create, range(12)))
    assert sorted(statuses) == [201] * 4 + [409] * 8
    assert relay.query("select count(*) from relay.endpoints") == [(4,)]


def test_default_limit(database: str) -> None:
    """B-143: a workspace without a limit of its own has the installation's."""
    with instance(database, RELAY_WORKSPACE_MAX_ENDPOINTS="1") as relay:
        relay.workspace()
        key = relay.key()
        relay.endpoint(key)
        answer = relay.client.post("/v1/endpoints", json={"url": "https://a.example.com/"}, headers=key)
        assert (answer.status_code, answer.get_json()["code"]) == (409, "endpoint_limit")


def test_list_is_paged(database: str) -> None:
    """B-130: each row comes once, newest first, also where rows share a time and others are inserted meanwhile."""
    with instance(database) as relay:
        relay.workspace()
        key = relay.key()
        made = [relay.endpoint(key)["id"] for _ in range(7)]
        relay.query("update relay.endpoints set created_at = '2026-01-01' where id = any(%s::uuid[])", made[:5])
        seen: list[str] = []
        url = "/v1/endpoints?limit=2"
        while True:
            page = relay.client.get(url, headers=key).get_json()
            seen += [row["id"] for row in page["data"]]
            relay.endpoint(key)
            if page["next_cursor"] is None:
                break
            url = f"/v1/endpoints?limit=2&cursor={page['next_cursor']}"
        assert seen == [made[6], made[5], *sorted(made[:5], reverse=True)]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=251", "limit"),
        ("limit=x", "limit"),
        ("limit=%D9%A3", "limit"),
        ("cursor=abc", "cursor"),
        ("cursor=", "cursor"),
        ("status=dead", "status"),
        ("limit=1&limit=2", "limit"),
    ],
)
def test_list_parameters_are_judged(relay: Instance, query: str, field: str) -> None:
    """B-131: unknown, repeated and nonsensical parameters are refused by name."""
    answer = relay.client.get(f"/v1/endpoints?{query}", headers=relay.key())
    assert answer.status_code == 400
    assert list(fields_of(answer)) == [field]


def test_cursor_of_another_list_is_refused(relay: Instance) -> None:
    """B-131: a cursor of the endpoints' list does not work for another workspace or for keys."""
    key = relay.key()
    for _ in range(2):
        relay.endpoint(key)
    cursor = relay.client.get("/v1/endpoints?limit=1", headers=key).get_json()["next_cursor"]
    relay.workspace("other")
    for url, headers in (("/v1/endpoints", relay.key("other")), ("/v1/keys", key)):
        answer = relay.client.get(f"{url}?cursor={cursor}", headers=headers)
        assert fields_of(answer) == {"cursor": "invalid_cursor"}


def test_metadata_survives_storage(relay: Instance) -> None:
    """Large whole numbers and odd letters in metadata read back as given."""
    metadata = {"n": 2**70, "": "\u2028", "é": "\U0001f600"}
    made = relay.endpoint(relay.key(), metadata=metadata)
    assert json.loads(json.dumps(made["metadata"])) == metadata
