"""Jobs at the API: what /enqueue takes and refuses, and who may read what of it."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.instance import Instance, fields_of, instance
from tests.jobs import LIMIT, MARKER, enqueue, job_api, job_id, read, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    with job_api(database) as made:
        yield made


@pytest.fixture
def key(relay: Instance) -> dict[str, str]:
    return relay.key()


def test_what_is_refused_names_the_header(relay: Instance, key: dict[str, str]) -> None:
    """C-30, C-35, C-36, B-80, B-30, B-33: every header at fault is named, and nothing is stored."""
    for name in (
        "Host", "Content-Length", "Transfer-Encoding", "Connection", "Expect", "TE", "Upgrade", "Keep-Alive",
        "Proxy-Authorization", "Trailer",
    ):  # fmt: skip
        shown = "-".join(part.capitalize() for part in name.split("-"))
        named: dict[str, Any] = {f"Relay_Header_{name.replace('-', '_')}": "x"}
        refused = enqueue(relay, key, **named)
        assert fields_of(refused) == {f"Relay-Header-{shown}": "forbidden_header"}
    for value in ("a\r\nX-Evil: 1", "a\nb", "a\rb", "a\r\n b", "a\0b", "caf\xe9", "\x7f"):
        refused = enqueue(relay, key, environ={"HTTP_RELAY_HEADER_X_A": value})
        assert (refused.status_code, fields_of(refused)) == (400, {"Relay-Header-X-A": "invalid_header_value"})
    asked: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"url": ""}, {"Relay-Url": "not_absolute"}),
        ({"url": "ftp://example.com/"}, {"Relay-Url": "scheme"}),
        ({"url": "http://user@example.com/"}, {"Relay-Url": "userinfo"}),
        ({"url": "http://169.254.169.254/"}, {"Relay-Url": "address_refused"}),
        ({"Relay_Max_Attempts": "0"}, {"Relay-Max-Attempts": "out_of_range"}),
        ({"Relay_Max_Attempts": "51"}, {"Relay-Max-Attempts": "out_of_range"}),
        ({"Relay_Timeout_Ms": "99"}, {"Relay-Timeout-Ms": "out_of_range"}),
        ({"Relay_Timeout_Ms": "30001"}, {"Relay-Timeout-Ms": "out_of_range"}),
        ({"Relay_Sign": "standard-ed25519"}, {"Relay-Sign": "not_a_choice"}),
        ({"Relay_Delay": "-1"}, {"Relay-Delay": "invalid_seconds"}),
        ({"Relay_Expires_In": "0"}, {"Relay-Expires-In": "out_of_range"}),
        ({"Relay_Delay": "60", "Relay_Expires_In": "60"}, {"Relay-Delay": "expires_first"}),
        ({"Relay_Max_Attempt": "3"}, {"Relay-Max-Attempt": "unknown_header"}),
        ({"Relay_Header_": "3"}, {"Relay-Header-": "invalid_header_name"}),
        ({"Relay_Header_X_A": "********"}, {"Relay-Header-X-A": "masked_value"}),
        ({"Content_Type": "a\tb\x7f"}, {"Content-Type": "invalid_header_value"}),
        ({"Idempotency_Key": "a b"}, {"Idempotency-Key": "invalid_idempotency_key"}),
        ({"Relay_Max_Attempts": "x", "Relay_Sign": "y"}, {"Relay-Max-Attempts": "out_of_range", "Relay-Sign": "not_a_choice"}),
        ({f"Relay_Header_X_{n}": "x" for n in range(33)}, {"Relay-Header-*": "headers_limit"}),
        ({"Relay_Header_X_A": "x" * 4097}, {"Relay-Header-X-A": "invalid_header_value"}),
    ]  # fmt: skip
    for headers, faults in asked:
        assert fields_of(enqueue(relay, key, **headers)) == faults
    assert fields_of(relay.client.post("/enqueue", headers=key)) == {"Relay-Url": "required"}
    twice = [("Relay-Url", "https://a.example/"), ("relay-url", "https://b.example/")]
    assert fields_of(enqueue(relay, key, environ={"relay.headers": twice})) == {"Relay-Url": "duplicate"}
    # A name outside ASCII is no guess of ours, in whichever encoding it came.
    for raw in ("http://ex\xe4mple.test/", "http://ex\xe4mple.test/".encode().decode("latin-1")):
        refused = enqueue(relay, key, environ={"relay.headers": [("Relay-Url", raw)]})
        assert fields_of(refused) == {"Relay-Url": "invalid_header_value"}
        assert "xn--" in refused.text
    underscored = [("Relay-Url", "https://a.example/"), ("Relay_Delay", "5")]
    assert fields_of(enqueue(relay, key, environ={"relay.headers": underscored})) == {"Relay_delay": "unknown_header"}
    assert stored(relay) == (0, 0, 0, 0)


def test_bodies_are_whole_or_refused(relay: Instance, key: dict[str, str]) -> None:
    """C-33, C-34: over the limit is 413 with a length or in chunks, compressed 415, a chunked body of unsure end 411; an
    empty one and broken JSON are payloads as any other."""

    def chunked(body: bytes, content_type: str = "") -> int:
        """Post a body without a length, as a server hands over a chunked one."""
        headers = {**key, "Relay-Url": "https://example.com/", "Transfer-Encoding": "chunked"}
        environ = {"wsgi.input_terminated": True, "CONTENT_TYPE": content_type}
        return relay.client.post(
            "/enqueue", input_stream=io.BytesIO(body), headers=headers, environ_overrides=environ
        ).status_code

    assert enqueue(relay, key, body=b"x" * (LIMIT + 1)).status_code == 413
    assert chunked(b"x" * (LIMIT + 1)) == 413
    assert chunked(b"x" * 10) == 411
    assert chunked(b'{"a":', "application/json") == 411
    assert enqueue(relay, key, Content_Encoding="gzip").status_code == 415
    assert stored(relay)[0] == 0
    assert chunked(b'{"a":1}', "application/json") == 202
    assert enqueue(relay, key, body=b"x" * LIMIT).status_code == 202
    assert enqueue(relay, key, body=b"{", Content_Type="application/json").status_code == 202
    assert enqueue(relay, key).status_code == 202
    assert [(bytes(p), t) for p, t in relay.query("select payload, content_type from relay.events order by id")] == [
        (b'{"a":1}', "application/json"),
        (b"x" * LIMIT, ""),
        (b"{", "application/json"),
        (b"", ""),
    ]


def test_a_key_stands_for_the_whole_request(relay: Instance, key: dict[str, str]) -> None:
    """B-10 to B-13: one job and one answer, also for a hundred at once to a new origin; another URL, header, option or
    body is 409; an event's key is none of a job's."""
    same: dict[str, Any] = {"body": b'{"a":1,"b":2}', "Content_Type": "application/json", "Relay_Header_X_A": MARKER}

    def post(_: int) -> TestResponse:
        client = Instance(api=relay.api, client=relay.client.application.test_client(), database=relay.database)
        return enqueue(client, key, Idempotency_Key="k", **same)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(post, range(100)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.data for answer in answers}) == 1
    assert sum(answer.headers.get("Relay-Idempotent-Replay") == "true" for answer in answers) == 99
    again = enqueue(relay, key, Idempotency_Key="k", **(same | {"body": b'{ "b":2, "a":1 }'}))
    assert again.data == answers[0].data
    others: list[dict[str, Any]] = [
        {"url": "https://example.com/other"},
        {"body": b'{"a":1,"b":3}'},
        {"Content_Type": "text/plain"},
        {"Relay_Header_X_A": "other"},
        {"Relay_Header_X_B": MARKER},
        {"Relay_Max_Attempts": "4"},
        {"Relay_Timeout_Ms": "1000"},
        {"Relay_Delay": "1"},
        {"Relay_Expires_In": "100"},
    ]
    for changed in others:
        refused = enqueue(relay, key, Idempotency_Key="k", **(same | changed))
        assert (refused.status_code, (refused.json or {})["code"]) == (409, "idempotency_key_reused"), changed
    assert relay.event(key, b'{"type":"a"}', Idempotency_Key="k").status_code == 409
    assert stored(relay) == (1, 1, 1, 1)
    assert relay.query("select idempotency_key, source from relay.events") == [("k", 1)]
    relay.query("update relay.idempotency_keys set created_at = now() - interval '2 days'")
    assert enqueue(relay, key, Idempotency_Key="k", **same).data != again.data


def test_header_values_are_sealed_where_there_is_a_key(relay: Instance, key: dict[str, str], database: str) -> None:
    """B-94, B-110: sealed for their job; as given where the API has no master key; masked in every answer."""
    job = job_id(enqueue(relay, key, Relay_Header_Authorization=MARKER, Relay_Header_X_A=""))
    with instance(database, RELAY_MASTER_KEYS="", RELAY_ALLOW_PRIVATE_ENDPOINTS="true") as keyless:
        plain = job_id(enqueue(keyless, key, Relay_Header_Authorization=MARKER))
        unsealed = keyless.client.post("/v1/job-secret/rotate", headers=key)
        assert (unsealed.status_code, (unsealed.json or {})["code"]) == (503, "no_master_keys")
    rows = {str(row[0]): row[1:] for row in relay.query("select delivery_id, headers, headers_sealed from relay.jobs")}
    headers, is_sealed = rows[job]
    assert [name for name, _ in headers] == ["Authorization", "X-A"]
    assert (MARKER in str(headers), is_sealed) == (False, True)
    assert rows[plain] == ([["Authorization", MARKER]], False)
    for one in (job, plain):
        assert read(relay, key, one)["headers"][0] == ["Authorization", "********"]
        assert MARKER not in relay.client.get(f"/jobs/{one}", headers=key).text


def test_nothing_is_seen_from_another_workspace(relay: Instance, key: dict[str, str]) -> None:
    """B-140, B-141: 404 for others' jobs, for deliveries that are none, and for what is no id; each call has its scope."""
    relay.workspace("other")
    other = relay.key("other")
    job = job_id(enqueue(relay, key, Relay_Delay="60"))
    relay.endpoint(key)
    (delivery,) = (relay.event(key, b'{"type":"a"}').json or {})["deliveries"]
    for headers, path in ((other, job), (key, delivery["id"]), (key, "x")):
        for answer in (
            relay.client.get(f"/jobs/{path}", headers=headers),
            relay.client.delete(f"/jobs/{path}", headers=headers),
            relay.client.post(f"/jobs/{path}/replay", headers=headers),
        ):
            assert (answer.status_code, (answer.json or {})["code"]) == (404, "unknown_job")
    assert relay.client.get(f"/v1/deliveries/{job}", headers=key).status_code == 200
    ingest, read_only, write = (relay.key("acme", (scope,)) for scope in ("ingest", "read", "write"))
    for allowed, method, path in (
        ({"ingest"}, "POST", "/enqueue"),
        ({"ingest", "read"}, "GET", f"/jobs/{job}"),
        ({"write"}, "POST", f"/jobs/{job}/replay"),
        ({"write"}, "POST", "/v1/job-secret/rotate"),
        ({"ingest"}, "DELETE", f"/jobs/{job}"),
    ):
        for scope, headers in (("ingest", ingest), ("read", read_only), ("write", write)):
            answer = relay.client.open(path, method=method, headers=headers)
            assert (answer.status_code != 403) == (scope in allowed), (method, path, scope)
