"""What an endpoint's owner does to it through the API: changes, switches, secrets, tests, ends."""

from __future__ import annotations

import base64
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from relay.core.model import Signing
from relay.core.secret import Secret, new_secret
from relay.core.signing import public_key_of
from tests.certificates import self_signed
from tests.instance import Instance, fields_of, instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from werkzeug.test import TestResponse

    from relay.bootstrap.worker import Worker
    from relay.outbox.publisher import Publisher
    from relay.testkit.receiver import Receiver


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API with one workspace."""
    with instance(database) as made:
        made.workspace()
        yield made


class Owner:
    """One endpoint and calls to it."""

    def __init__(self, relay: Instance, **fields: Any) -> None:
        self.relay = relay
        self.key = relay.key()
        self.made = relay.endpoint(self.key, **fields)
        self.id = UUID(self.made["id"])
        self.path = f"/v1/endpoints/{self.id}"

    def read(self) -> dict[str, Any]:
        return dict(self.relay.client.get(self.path, headers=self.key).get_json())

    def patch(self, **changes: Any) -> TestResponse:
        return self.relay.client.patch(self.path, json=changes, headers=self.key)

    def post(self, call: str, **body: Any) -> TestResponse:
        client = self.relay.client.application.test_client()
        return client.post(f"{self.path}/{call}", headers=self.key, **({"json": body} if body else {}))

    def value(self, columns: str) -> tuple[Any, ...]:
        """The endpoint's columns."""
        [row] = self.relay.query(f"select {columns} from relay.endpoints where id = %s", self.id)
        return row

    def wake(self) -> tuple[Any, ...] | None:
        """Take what was asked of the sweep: whether retries too, and what rows end as."""
        rows = self.relay.query(
            "delete from relay.wakes where endpoint_id = %s returning retries_too, ends_as", self.id
        )
        return rows[0] if rows else None

    def audit(self) -> list[tuple[Any, ...]]:
        """The records since the creation: action, before, after."""
        return self.relay.query(
            "select action, before, after from relay.audit_log where target = %s and action <> 'endpoint.created' "
            "order by at, id",
            f"endpoint:{self.id}",
        )

    def trip(self) -> None:
        """Open the breaker, hold the endpoint and count failures."""
        self.relay.query(
            "update relay.endpoints set breaker_state = 1, breaker_failures = 7, breaker_trips = 3, "
            "breaker_generation = 9, breaker_open_until = now() + interval '1 h', held_until = now() + interval '1 h', "
            "failing_since = now(), failing_attempts = 4"
        )


def test_patch_changes_what_is_given(relay: Instance) -> None:
    """Each given field changes, null takes the default, the rest stays; the record has the changes and no secret."""
    first = {
        "description": "x",
        "event_types": ["a"],
        "headers": {"X-Old": "tok-111"},
        "rate_per_second": 5,
        "burst": 5,
        "max_in_flight": 5,
        "timeout_ms": 500,
        "retry": {"max_attempts": 3},
        "metadata": {"a": 1},
    }
    owner = Owner(relay, **first)
    assert relay.query("select tokens from relay.endpoint_buckets") == [(5.0,)]
    before = owner.read()
    version = owner.value("version")[0]
    changes = {
        "description": "y",
        "event_types": ["b", "b", "*"],
        "headers": {"X-New": "tok-222"},
        "signing": "standard",
        "rate_per_second": 0.01,
        "burst": 9,
        "max_in_flight": None,
        "timeout_ms": 1000,
        "retry": {"strategy": "fixed", "base_ms": 10},
        "metadata": {"b": None},
    }
    answer = owner.patch(**changes)
    assert answer.status_code == 200, answer.text
    after = answer.get_json()
    assert after == owner.read()
    assert after["event_types"] == ["b", "*"]
    assert after["headers"] == {"X-New": "********"}
    assert (after["retry"]["strategy"], after["retry"]["max_attempts"], after["timeout_ms"]) == ("fixed", 12, 1000)
    assert (after["rate_per_second"], after["max_in_flight"], after["signing"]) == (0.01, None, "standard")
    assert after["metadata"] == {"b": None}
    assert (after["url"], after["enabled"]) == (before["url"], True)
    assert after["updated_at"] > before["updated_at"]
    assert owner.value("version")[0] > version
    assert (
        relay.api.vault.open(base64.b64decode(owner.value("headers")[0]["X-New"]), owner=owner.id).reveal() == "tok-222"
    )

    [(action, was, became)] = owner.audit()
    assert action == "endpoint.changed"
    assert (was["description"], became["description"]) == ("x", "y")
    assert (was["header_names"], became["header_names"]) == (["X-Old"], ["X-New"])
    assert set(was) == set(became) == (set(changes) - {"headers"}) | {"header_names"}
    assert "tok-" not in str((was, became))

    assert owner.patch(**dict.fromkeys(set(changes) | {"client_certificate"})).status_code == 200
    cleared = owner.read()
    for name, default in (("description", ""), ("event_types", []), ("headers", {}), ("rate_per_second", 10.0)):
        assert cleared[name] == default
    assert (cleared["burst"], cleared["timeout_ms"], cleared["metadata"]) == (20, None, {})
    assert (cleared["retry"], cleared["signing"]) == (before["retry"] | {"max_attempts": 12}, "relay")


def test_patch_of_nothing_is_no_change(relay: Instance) -> None:
    """What is given and does not differ moves no version, no time and leaves no record."""
    owner = Owner(relay, burst=5)
    before, version = owner.read(), owner.value("version")
    for changes in ({}, {"burst": 5, "enabled": True, "url": before["url"], "headers": {}, "client_certificate": None}):
        assert owner.patch(**changes).get_json() == before
    assert (owner.value("version"), owner.audit(), owner.wake()) == (version, [], None)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"url": None}, {"url": "wrong_type"}),
        ({"url": "https://127.0.0.1/"}, {"url": "address_refused"}),
        ({"url": "https://svc:pw@hooks.example.com/"}, {"url": "userinfo"}),
        ({"secret": "whsec_x"}, {"secret": "not_here"}),
        (
            {"timeout_ms": 50_000, "burst": 0, "nope": 1},
            {"timeout_ms": "out_of_range", "burst": "out_of_range", "nope": "unknown_field"},
        ),
        ({"timeout_ms": 25_000}, {"timeout_ms": "out_of_range"}),
        ({"headers": {"X-A": "********"}}, {"headers.X-A": "masked_value"}),
        ({"signing": "standard-ed25519"}, {"signing": "other_secret"}),
        ({"transport": "slack", "url": "slack://x"}, {"transport": "fixed", "url": "scheme"}),
        ({"created_at": "x"}, {"created_at": "unknown_field"}),
    ],
)
def test_patch_refusals(database: str, changes: dict[str, Any], faults: dict[str, str]) -> None:
    """B-23, B-82: a change is judged as a creation is, a time-out by the lease too; a refused one changes nothing."""
    with instance(database, RELAY_LEASE_SECS="31", RELAY_TOTAL_TIMEOUT_MS="20000") as relay:
        relay.workspace()
        owner = Owner(relay)
        before = owner.read()
        answer = owner.patch(**changes)
        assert answer.status_code == 400
        assert fields_of(answer) == faults
        assert owner.read() == before


def test_what_closes_the_breaker(relay: Instance) -> None:
    """B-64: a new URL, enabling and a reset close the breaker, end a hold and ask for waiting rows; all else leaves it."""
    owner = Owner(relay, url="https://a.example.com/")
    columns = (
        "breaker_state, breaker_failures, breaker_trips, breaker_open_until, probe_deadline, held_until, "
        "breaker_generation"
    )
    closed = (0, 0, 0, None, None, None, 10)

    owner.trip()
    assert owner.patch(description="x", burst=3).status_code == 200
    assert (owner.value("breaker_state"), owner.wake()) == ((1,), None)
    # The same URL, spelled otherwise.
    assert owner.patch(url="https://A.example.com:443").status_code == 200
    assert (owner.value("breaker_state"), owner.wake()) == ((1,), None)
    assert owner.patch(rate_per_second=3).status_code == 200
    assert (owner.value("breaker_state"), owner.wake()) == ((1,), (False, None))
    assert owner.patch(url="https://b.example.com/").status_code == 200
    assert (owner.value(columns), owner.wake()) == (closed, (False, None))

    owner.trip()
    answer = owner.post("reset-breaker")
    assert (answer.status_code, answer.get_json()["breaker"]["state"]) == (200, "closed")
    assert (owner.value(columns), owner.wake()) == (closed, (False, None))

    relay.query("delete from relay.breaker_changes")
    owner.trip()
    assert owner.post("disable").status_code == 200
    assert owner.value("breaker_state, failing_attempts") == (1, 4)
    assert owner.post("enable").status_code == 200
    assert (owner.value(columns), owner.wake()) == (closed, (False, None))
    assert owner.value("failing_since, failing_attempts") == (None, 0)
    assert relay.query("select generation, state from relay.breaker_changes") == [(10, 0)]
    # Closed already: the counts go, and the history has nothing to tell.
    relay.query("update relay.endpoints set breaker_failures = 3")
    assert owner.post("reset-breaker").get_json()["breaker"]["failures"] == 0
    assert relay.query("select count(*) from relay.breaker_changes") == [(1,)]


def test_disable_and_enable(relay: Instance) -> None:
    """B-121: a disabled endpoint gets no events; both calls answer with it, any number of times, recorded once."""
    owner = Owner(relay)
    for _ in range(2):
        answer = owner.post("disable")
        assert answer.status_code == 200
        assert (answer.get_json()["enabled"], answer.get_json()["disabled_reason"]) == (False, "manual")
    disabled_at = owner.read()["disabled_at"]
    assert disabled_at is not None
    assert owner.post("retry-now").get_json()["code"] == "endpoint_disabled"
    assert owner.patch(rate_per_second=2).status_code == 200
    assert owner.wake() is None
    for _ in range(2):
        answer = owner.post("enable").get_json()
        assert (answer["enabled"], answer["disabled_at"], answer["disabled_reason"]) == (True, None, None)
    assert owner.wake() == (False, None)
    assert owner.patch(enabled=False).get_json()["disabled_reason"] == "manual"
    actions = [action for action, _, _ in owner.audit()]
    assert actions == ["endpoint.disabled", "endpoint.changed", "endpoint.enabled", "endpoint.disabled"]


def test_rows_are_asked_for(relay: Instance) -> None:
    """Retry-now asks for retries too, cancel-pending for an end: 202, and both are recorded."""
    owner = Owner(relay)
    assert owner.post("retry-now").status_code == 202
    assert owner.wake() == (True, None)
    assert owner.post("cancel-pending").status_code == 202
    assert owner.wake() == (True, 4)
    assert [action for action, _, _ in owner.audit()] == ["endpoint.retry_now", "endpoint.cancel_pending"]


def test_delete(relay: Instance) -> None:
    """C-40, B-121: a deleted endpoint is gone, with its secrets; its rows are to die, and stay readable."""
    certificate, private_key = self_signed()
    pair = {"certificate": certificate, "private_key": private_key}
    owner = Owner(relay, headers={"X-A": "tok-123"}, client_certificate=pair)
    owner.post("rotate-secret")
    delivery_id = relay.event(owner.key, b'{"type":"a"}').get_json()["deliveries"][0]["id"]
    answer = relay.client.delete(owner.path, headers=owner.key)
    assert (answer.status_code, answer.data) == (204, b"")
    assert owner.wake() == (True, 3)
    assert owner.value(
        "secret, previous_secret, previous_secret_expires_at, headers, certificate, certificate_key, enabled"
    ) == (None, None, None, {}, None, None, False)
    for call in ("enable", "disable", "reset-breaker", "retry-now", "cancel-pending", "rotate-secret", "test"):
        assert (owner.post(call).status_code, owner.wake()) == (404, None), call
    assert owner.patch(burst=1).get_json()["code"] == "unknown_endpoint"
    for method in (relay.client.delete, relay.client.get):
        assert method(owner.path, headers=owner.key).status_code == 404
    assert relay.client.get("/v1/endpoints", headers=owner.key).get_json()["data"] == []
    read = relay.client.get(f"/v1/deliveries/{delivery_id}", headers=owner.key)
    assert read.get_json()["endpoint_id"] == str(owner.id)
    assert relay.event(owner.key, b'{"type":"a"}').get_json()["deliveries"] == []
    action, before, after = owner.audit()[-1]
    assert (action, before["url"], after) == ("endpoint.deleted", owner.made["url"], None)
    assert "tok-123" not in str(before)


def test_another_workspace_reaches_nothing(relay: Instance) -> None:
    """B-140: every call answers 404 to another workspace's key, and changes nothing; a key without `write` gets 403."""
    owner = Owner(relay)
    relay.workspace("other")
    before = owner.value("endpoints::text")
    for key, status in ((relay.key("other"), 404), (relay.key(scopes=("read", "ingest", "admin")), 403)):
        calls = ["enable", "disable", "reset-breaker", "retry-now", "cancel-pending", "rotate-secret", "test"]
        answers = [relay.client.post(f"{owner.path}/{call}", headers=key) for call in calls]
        answers += [
            relay.client.patch(owner.path, json={"burst": 1}, headers=key),
            relay.client.delete(owner.path, headers=key),
        ]
        assert {answer.status_code for answer in answers} == {status}
    assert (owner.value("endpoints::text"), owner.audit(), owner.wake()) == (before, [], None)


def test_bodies_of_calls_without_fields(relay: Instance) -> None:
    """A call that takes no fields takes no body or an empty object, and refuses any field."""
    owner = Owner(relay)
    assert relay.client.post(f"{owner.path}/enable", json={}, headers=owner.key).status_code == 200
    assert fields_of(owner.post("enable", force=True)) == {"force": "unknown_field"}
    assert relay.client.post("/v1/endpoints/nonsense/enable", headers=owner.key).status_code == 404


def test_rotation(relay: Instance) -> None:
    """C-27, B-93: the old secret is kept for the overlap, and never more than that one; secrets show in answers alone."""
    owner = Owner(relay)
    version = owner.value("version")[0]
    first = owner.post("rotate-secret")
    assert first.status_code == 200
    assert list(first.get_json()) == ["id", "secret", "previous_secret_expires_at"]
    assert owner.value("version")[0] > version

    def opened(columns: str) -> list[str]:
        return [relay.api.vault.open(sealed, owner=owner.id).reveal() for sealed in owner.value(columns)]

    assert opened("secret, previous_secret") == [first.get_json()["secret"], owner.made["secret"]]
    assert owner.read()["previous_secret_expires_at"] == first.get_json()["previous_secret_expires_at"]
    [(left,)] = relay.query(
        "select extract(epoch from previous_secret_expires_at - now())::float8 from relay.endpoints"
    )
    assert 86_390 < left <= 86_400
    own = "whsec_" + base64.b64encode(b"x" * 24).decode()
    second = owner.post("rotate-secret", secret=own)
    assert second.get_json()["secret"] == own
    assert opened("secret, previous_secret") == [own, first.get_json()["secret"]]
    for bad in ("whsec_" + base64.b64encode(b"x" * 23).decode(), "x" * 32, own[6:]):
        assert fields_of(owner.post("rotate-secret", secret=bad)) == {"secret": "invalid_secret"}
    assert opened("secret, previous_secret") == [own, first.get_json()["secret"]]
    actions = [action for action, _, _ in owner.audit()]
    assert actions == ["endpoint.secret_rotated"] * 2
    assert not {own, first.get_json()["secret"]} & set(str(owner.audit()).split("'"))


def test_secrets_show_nowhere(relay: Instance, caplog: pytest.LogCaptureFixture) -> None:
    """C-29, B-95: but for the answers that hand a secret out, none is in an answer, a log or an audit record."""
    caplog.set_level(logging.DEBUG)
    first, second = ("whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"1", b"2"))
    owner = Owner(relay, secret=first, headers={"X-A": "tok-123"}, timeout_ms=100)
    assert owner.post("rotate-secret", secret=second).get_json()["secret"] == second
    answers = [
        owner.patch(headers={"X-B": "tok-456"}),
        owner.patch(headers={"X-B": "tok-789\n"}),
        owner.patch(secret=second),
        owner.post("rotate-secret", secret=second + "="),
        owner.post("rotate-secret", secret=second, nope=second),
        owner.post("disable"),
        owner.post("test"),
        relay.client.get("/v1/endpoints", headers=owner.key),
        relay.client.delete(owner.path, headers=owner.key),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 400, 400, 200, 202, 200, 204]
    seen = [answer.text for answer in answers] + [caplog.text, str(owner.audit())]
    for secret in (first, second, "tok-123", "tok-456", "tok-789"):
        assert not any(secret in text for text in seen), secret


def test_rotations_at_once_leave_two_secrets_that_were_given_out(relay: Instance) -> None:
    """B-93: of eight rotations at once the endpoint keeps two of the secrets that were answered, the last ones."""
    owner = Owner(relay)
    with ThreadPoolExecutor(8) as pool:
        answers = [answer.get_json() for answer in pool.map(lambda _: owner.post("rotate-secret"), range(8))]
    kept = [relay.api.vault.open(sealed, owner=owner.id).reveal() for sealed in owner.value("secret, previous_secret")]
    assert len(set(kept)) == 2
    assert set(kept) < {answer["secret"] for answer in answers}
    assert kept[0] == max(answers, key=lambda answer: answer["previous_secret_expires_at"])["secret"]


def test_without_overlap(database: str) -> None:
    """RELAY_SECRET_OVERLAP_SECS=0: the old secret ends at once."""
    with instance(database, RELAY_SECRET_OVERLAP_SECS="0") as relay:
        relay.workspace()
        owner = Owner(relay)
        assert owner.post("rotate-secret").get_json()["previous_secret_expires_at"] is None
        assert owner.value("previous_secret, previous_secret_expires_at") == (None, None)


def test_ed25519(relay: Instance) -> None:
    """B-91, B-92: such an endpoint has a `whsk_` secret, made or the caller's own; its public halves are stored."""
    owner = Owner(relay, signing="standard-ed25519")
    assert owner.made["secret"].startswith("whsk_")
    old_public = public_key_of(Secret(owner.made["secret"]))
    assert owner.value("public_key, previous_public_key") == (old_public, None)
    own = new_secret(b"s" * 32, Signing.STANDARD_ED25519)
    assert owner.post("rotate-secret", secret=own.reveal()).get_json()["secret"] == own.reveal()
    assert owner.value("public_key, previous_public_key") == (public_key_of(own), old_public)
    whsec = "whsec_" + base64.b64encode(b"s" * 32).decode()
    assert fields_of(owner.post("rotate-secret", secret=whsec)) == {"secret": "invalid_secret"}
    assert fields_of(owner.patch(signing="standard")) == {"signing": "other_secret"}
    assert fields_of(owner.patch(signing=None)) == {"signing": "other_secret"}
    for signing in ("none", "standard-ed25519"):
        assert owner.patch(signing=signing).get_json()["signing"] == signing
    assert relay.endpoint(owner.key, signing="standard-ed25519", secret=own.reveal())["secret"] == own.reveal()


def test_client_certificate(relay: Instance, caplog: pytest.LogCaptureFixture) -> None:
    """B-86: stored whole with the key sealed, read back with the key masked, replaced and taken away."""
    caplog.set_level(logging.DEBUG)
    certificate, private_key = self_signed()
    owner = Owner(relay, client_certificate={"certificate": "x\n" + certificate, "private_key": private_key})
    shown = {"certificate": certificate, "private_key": "********"}
    assert owner.made["client_certificate"] == owner.read()["client_certificate"] == shown
    stored, sealed = owner.value("certificate, certificate_key")
    assert (stored, relay.api.vault.open(sealed, owner=owner.id).reveal()) == (certificate, private_key)
    other, other_key = self_signed()
    mixed = owner.patch(client_certificate={"certificate": other, "private_key": private_key})
    assert fields_of(mixed) == {"client_certificate.private_key": "key_mismatch"}
    assert owner.patch(client_certificate={"certificate": other, "private_key": other_key}).status_code == 200
    assert owner.value("certificate") == (other,)
    assert owner.patch(client_certificate=None).get_json()["client_certificate"] is None
    assert owner.value("certificate, certificate_key") == (None, None)
    seen = caplog.text + str(owner.audit()) + mixed.text
    for key in (private_key, other_key):
        assert key.splitlines()[1] not in seen


def test_an_origin(relay: Instance) -> None:
    """B-111: an endpoint that jobs imply is listed; its rates can be changed, its breaker reset, and nothing else."""
    owner = Owner(relay)
    relay.query("update relay.endpoints set kind = 1, origin = 'https://hooks.example.com'")
    assert relay.client.get("/v1/endpoints", headers=owner.key).get_json()["data"][0]["kind"] == "origin"
    assert owner.patch(rate_per_second=3, burst=4, max_in_flight=5).get_json()["burst"] == 4
    assert fields_of(owner.patch(url="https://a.example.com/", burst=1)) == {"url": "not_of_an_origin"}
    assert owner.post("reset-breaker").status_code == 200
    assert owner.post("cancel-pending").status_code == 202
    for call in ("enable", "disable", "rotate-secret", "test"):
        assert owner.post(call).get_json()["code"] == "implicit_endpoint"
    assert relay.client.delete(owner.path, headers=owner.key).status_code == 409
    assert owner.read()["burst"] == 4


def test_a_test_is_committed_for_one_endpoint(database: str) -> None:
    """A test is one `relay.test` event with one delivery for this endpoint, disabled or not; 202 where none is sent."""
    # With three threads nobody waits.
    with instance(database, RELAY_API_THREADS="3") as relay:
        relay.workspace()
        owner = Owner(relay, event_types=["never"], enabled=False)
        relay.endpoint(owner.key, event_types=["relay.*"])
        answer = owner.post("test")
        assert answer.status_code == 202
        made = answer.get_json()
        assert (made["status"], made["attempt"]) == ("pending", None)
        rows = relay.query(
            "select d.id::text, d.endpoint_id, d.status, d.due_at <= now(), e.source, e.type, e.content_type, "
            "e.delivery_ids = array[d.id], e.request_id is not null, e.api_key_id is not null, e.payload "
            "from relay.deliveries d join relay.events e on e.id = d.event_id"
        )
        [(*row, payload)] = rows
        assert row == [made["delivery_id"], owner.id, 0, True, 3, "relay.test", "application/json", True, True, True]
        assert payload.startswith(b'{"type": "relay.test", ')
        assert owner.audit() == [("endpoint.tested", None, {"delivery_id": made["delivery_id"]})]


def test_few_tests_wait(relay: Instance) -> None:
    """Of three tests at once, with nobody to send them, two wait their time and one is answered at once."""
    owner = Owner(relay, timeout_ms=100)

    def ask(_: int) -> float:
        began = time.monotonic()
        assert owner.post("test").status_code == 202
        return time.monotonic() - began

    with ThreadPoolExecutor(3) as pool:
        took = sorted(pool.map(ask, range(3)))
    assert took[0] < 1.5 < 2.1 <= took[1]


@pytest.mark.parametrize("status", [200, 500])
def test_a_test_waits_for_its_attempt(
    database: str, receiver: Receiver, publisher: Publisher, start_worker: Callable[..., Worker], status: int
) -> None:
    """A test answers with what the receiver said, good or bad, and the receiver sees what it is."""
    assert publisher is not None
    start_worker()
    with instance(database, RELAY_ALLOW_PRIVATE_ENDPOINTS="true") as relay:
        relay.workspace()
        owner = Owner(relay, url=f"{receiver.url}/status?code={status}")
        answer = owner.post("test")
        assert answer.status_code == 200, answer.text
        attempt = answer.get_json()["attempt"]
        assert (attempt["number"], attempt["status"]) == (1, status)
        assert attempt["class"] == ("success" if status == 200 else "retryable_failure")
        assert answer.get_json()["status"] == ("delivered" if status == 200 else "dead")
