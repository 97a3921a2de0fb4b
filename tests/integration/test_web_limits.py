"""Limits of a workspace: its ingest rate over all processes, and how they are changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from relay.store import ingest_rate
from tests.hostile import wait_until
from tests.instance import Instance, fields_of, instance


def _patch(relay: Instance, workspace: str, **limits: object) -> int:
    answer = relay.client.patch(f"/v1/workspaces/{workspace}", json=limits, headers=relay.admin())
    return answer.status_code


def test_limits_are_changed_and_audited(database: str) -> None:
    """B-143: PATCH sets some limits, null gives one back to the installation, and the record says what moved."""
    with instance(database) as relay:
        workspace = relay.workspace(max_endpoints=1)
        key = relay.key()
        relay.endpoint(key)
        assert _patch(relay, workspace, max_endpoints=2, ingest_rate=0.5) == 200
        relay.endpoint(key)
        answer = relay.client.patch(
            f"/v1/workspaces/{workspace}", json={"max_endpoints": None, "ingest_rate": 0.5}, headers=relay.admin()
        ).get_json()
        assert (answer["max_endpoints"], answer["ingest_rate"], answer["max_payload_bytes"]) == (None, 0.5, None)
        records = relay.query(
            "select before, after from relay.audit_log where action = 'workspace.changed' order by at"
        )
        assert records == [
            ({"max_endpoints": 1, "ingest_rate": None}, {"max_endpoints": 2, "ingest_rate": 0.5}),
            ({"max_endpoints": 2}, {"max_endpoints": None}),
        ]
        assert _patch(relay, "01890a5d-ac96-774b-bcce-b302099a8057", max_endpoints=1) == 404
        assert _patch(relay, "nonsense", max_endpoints=1) == 404
        assert relay.client.patch(f"/v1/workspaces/{workspace}", json={}, headers=key).status_code == 403
        wrong = relay.client.patch(
            f"/v1/workspaces/{workspace}",
            json={"name": "x", "ingest_rate": 0, "max_payload_bytes": 1.5},
            headers=relay.admin(),
        )
        assert set(fields_of(wrong)) == {"name", "ingest_rate", "max_payload_bytes"}


def test_rate_is_shared_and_says_when(database: str) -> None:
    """B-143: two processes together let in what the bucket holds; the rest is 429 with Retry-After; a batch of n takes n."""
    with instance(database, RELAY_WORKSPACE_INGEST_RATE="0.01") as one, instance(database) as two:
        one.workspace("default")
        rated = one.workspace("rated", ingest_rate=4)
        key = one.key("rated")
        statuses = [(one, two)[number % 2].event(key, b'{"type":"x"}').status_code for number in range(12)]
        assert statuses[:4] == [202] * 4
        assert 429 in statuses
        refused = two.client.post("/v1/events/batch", json=[{"type": "x", "payload": 1}] * 400, headers=key)
        assert (refused.status_code, refused.get_json()["code"]) == (429, "ingest_rate")
        assert int(refused.headers["Retry-After"]) >= 1

        def batch() -> int:
            return two.client.post(
                "/v1/events/batch", json=[{"type": "x", "payload": 1}] * 400, headers=key
            ).status_code

        wait_until(lambda: batch() == 202, patience=5)
        late = one.event(key, b'{"type":"x"}')
        assert late.status_code == 429
        assert 80 <= int(late.headers["Retry-After"]) <= 100, "the batch's debt is waited for"
        assert _patch(one, rated, ingest_rate=None) == 200
        fresh = two.key("rated")
        assert two.event(fresh, b'{"type":"x"}').status_code == 202, (
            "no rate of its own, and none of the installation's"
        )
        by_default = one.key("default")
        assert [one.event(by_default, b'{"type":"x"}').status_code for _ in range(2)] == [202, 429]


@pytest.mark.parametrize("rate", [5.0, 0.25])
def test_tokens_taken_at_once(database: str, rate: float) -> None:
    """However many ask at once, no more get in than a full bucket and what flows in; a missing row is a full bucket."""
    with instance(database, RELAY_DB_POOL="8") as relay:
        relay.workspace()
        [(workspace,)] = relay.query("select id from relay.workspaces")

        def take(_: int) -> float | None:
            with relay.api.hot.connect() as connection:
                return ingest_rate.take(connection, workspace_id=workspace, rate=rate, count=1)

        with ThreadPoolExecutor(8) as pool:
            waits = list(pool.map(take, range(60)))
        let_in = waits.count(None)
        full = max(1.0, rate)
        [(seconds,)] = relay.query("select extract(epoch from now() - min(at))::float8 from relay.audit_log")
        assert full <= let_in <= full + rate * seconds
        assert all(0 <= wait <= 1 / rate for wait in waits if wait is not None)
        relay.query("delete from relay.ingest_buckets")
        assert take(0) is None
