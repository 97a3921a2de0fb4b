"""`relay keys rotate` (B-94): every sealed value comes under the first key while others write, or it is said why not."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from psycopg.types.json import Jsonb

from relay.bootstrap.api import make_api
from relay.bootstrap.worker import make_worker
from relay.cli.keys import rotate as run
from relay.config_sources import load_settings
from relay.core.errors import ConfigurationError, SealedSecretUnreadable
from relay.core.secret import Secret
from relay.store import heartbeats
from relay.store.heartbeats import Process
from relay.store.sealed_values import PLACES, Tally, reseal_batch
from relay.store.tables import metadata
from relay.store.vault import Vault, key_id_of
from tests.instance import Instance, instance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.rows import Rows

OLD, NEW, LOST = b"o" * 32, b"n" * 32, b"l" * 32


def keys(**held: bytes) -> str:
    """RELAY_MASTER_KEYS."""
    return ",".join(f"{name}:{base64.b64encode(key).decode()}" for name, key in held.items())


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    exit_code: int
    output: str


def rotate(database: str, **held: bytes) -> Result:
    """Run what the command runs, in this process."""
    output = io.StringIO()
    settings = load_settings({"DATABASE_URL": database, "RELAY_MASTER_KEYS": keys(**held)})
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            return Result(run(settings), output.getvalue())
        except ConfigurationError as error:
            return Result(1, str(error))


@pytest.fixture
def relay(database: str) -> Iterator[Instance]:
    """An API that seals with the old key."""
    with instance(database, RELAY_MASTER_KEYS=keys(old=OLD)) as made:
        made.workspace()
        yield made


def beat(engine: sa.Engine, role: str, details: Mapping[str, object]) -> Process:
    """Have a process beat once."""
    process = Process(process_id=uuid4(), role=role, host="here", pid=7, release="x")
    with engine.begin() as connection:
        heartbeats.beat(connection, process, details)
    return process


def named(**held: bytes) -> list[list[str]]:
    """What a process with these keys says of them."""
    settings = load_settings({"RELAY_MASTER_KEYS": keys(**held)})
    return [[key.id, key.fingerprint] for key in settings.master_keys]


def test_everything_comes_under_the_first_key(relay: Instance, rows: Rows) -> None:
    """Secrets old and new, header values, certificates' keys, workspaces' and jobs': all is sealed anew, and opens."""
    key = relay.key()
    old, new = Vault({"old": OLD}), Vault({"new": NEW})
    made = [relay.endpoint(key, headers={"X-A": "tok-1", "X-B": ""}) for _ in range(3)]
    owner = UUID(made[0]["id"])
    path = f"/v1/endpoints/{owner}"
    second = relay.client.post(f"{path}/rotate-secret", headers=key).get_json()["secret"]
    # An old secret that signs no more is not worth a key.
    over = UUID(made[1]["id"])
    rows.sql(
        "update relay.endpoints set previous_secret = %s, previous_secret_expires_at = now() - interval '1 s' "
        "where id = %s",
        [Vault({"lost": LOST}).seal(Secret("x"), owner=over), over],
    )
    rows.sql(
        "update relay.endpoints set certificate_key = %s where id = %s", [old.seal(Secret("pem"), owner=owner), owner]
    )
    workspace: UUID = rows.value("select id from relay.workspaces where name = 'acme'")
    rows.sql(
        "update relay.workspaces set job_secret = %s, job_previous_secret = %s, "
        "job_previous_secret_expires_at = now() + interval '1 h' where id = %s",
        [old.seal(Secret("j1"), owner=workspace), old.seal(Secret("j2"), owner=workspace), workspace],
    )
    job, plain = rows.deliveries(owner, 2)
    headers = [[name, base64.b64encode(old.seal(Secret(name), owner=job)).decode()] for name in ("X-A", "X-A", "X-B")]
    for id_, value, is_sealed in ((job, headers, True), (plain, [["X-A", "given"]], False)):
        rows.sql(
            "insert into relay.jobs (delivery_id, url, headers, headers_sealed, signing, max_attempts) "
            "values (%s, 'https://a.example.com/', %s, %s, 'none', 5)",
            [id_, Jsonb(value), is_sealed],
        )

    result = rotate(relay.database, new=NEW, old=OLD)
    assert result.exit_code == 0, result.output
    # 3 secrets, 1 of before, 6 header values, 1 certificate's key, 2 of the workspace, 3 of the job.
    assert "16 values were sealed anew with new; 16 are sealed with it now." in result.output
    assert "old: nothing is sealed with it." in result.output

    [row] = rows.sql("select * from relay.endpoints where id = %s", [owner])
    assert new.open(row["secret"], owner=owner).reveal() == second
    assert new.open(row["previous_secret"], owner=owner).reveal() == made[0]["secret"]
    assert new.open(row["certificate_key"], owner=owner).reveal() == "pem"
    values = {name: new.open(base64.b64decode(text), owner=owner).reveal() for name, text in row["headers"].items()}
    assert values == {"X-A": "tok-1", "X-B": ""}
    assert rows.value("select previous_secret from relay.endpoints where id = %s", [over]) is None
    [row] = rows.sql("select * from relay.workspaces where id = %s", [workspace])
    for name, text in (("job_secret", "j1"), ("job_previous_secret", "j2")):
        assert new.open(row[name], owner=workspace).reveal() == text
    stored = rows.value("select headers from relay.jobs where delivery_id = %s", [job])
    assert [new.open(base64.b64decode(text), owner=job).reveal() for _, text in stored] == ["X-A", "X-A", "X-B"]
    assert rows.value("select headers from relay.jobs where delivery_id = %s", [plain]) == [["X-A", "given"]]

    before = rows.sql("select * from relay.endpoints order by id")
    again = rotate(relay.database, new=NEW)
    assert "0 values were sealed anew with new; 16 are" in again.output
    assert (again.exit_code, rows.sql("select * from relay.endpoints order by id")) == (0, before)


def test_every_sealed_column_is_known() -> None:
    """No table has a column of bytes that holds a secret, or headers, that the rotation does not know."""
    known = {(place.table, name) for place in PLACES for name in (*place.columns, place.headers)}
    plain = {"public_key", "previous_public_key", "payload", "digest", "fingerprint", "response"}
    for table in metadata.tables.values():
        for column in table.columns:
            if (isinstance(column.type, sa.LargeBinary) and column.name not in plain) or column.name == "headers":
                assert (table.name, column.name) in known


def test_what_does_not_open_is_named_and_stops_nothing(relay: Instance, rows: Rows) -> None:
    """C-28: a lost key, a key of another value and a damaged value are named by endpoint; the others are done."""
    key = relay.key()
    good, lost, wrong, broken = (relay.endpoint(key, headers={"X-A": "a"})["id"] for _ in range(4))
    for endpoint_id, vault in ((lost, Vault({"lost": LOST})), (wrong, Vault({"new": LOST}))):
        sealed = vault.seal(Secret("tok-123"), owner=UUID(endpoint_id))
        rows.sql("update relay.endpoints set secret = %s where id = %s", [sealed, endpoint_id])
    rows.sql("update relay.endpoints set headers = %s where id = %s", [Jsonb({"X-A": "%", "X-B": ""}), broken])
    result = rotate(relay.database, new=NEW, old=OLD)
    assert result.exit_code == 1
    assert f"endpoint {lost}: secret: master key 'lost' is not in this process's RELAY_MASTER_KEYS" in result.output
    assert f"endpoint {wrong}: secret: a secret sealed with master key 'new' does not open" in result.output
    assert f"endpoint {broken}: headers.X-A:" in result.output
    assert "lost: 1 values are sealed with it, and it is not in RELAY_MASTER_KEYS: add it." in result.output
    assert "old: nothing is sealed with it." in result.output
    assert "tok-123" not in result.output
    opens = Vault({"new": NEW})
    for endpoint_id in (good, broken):
        opens.open(
            rows.value("select secret from relay.endpoints where id = %s", [endpoint_id]), owner=UUID(endpoint_id)
        )
    with pytest.raises(SealedSecretUnreadable):
        opens.open(rows.value("select secret from relay.endpoints where id = %s", [lost]), owner=UUID(lost))
    # The API goes on listing them.
    assert relay.client.get("/v1/endpoints", headers=key).status_code == 200


def test_refused_while_a_process_lacks_the_key(relay: Instance, rows: Rows) -> None:
    """B-94: workers and sealing API processes that run must have the first key, by its value too; the dead need not."""
    relay.endpoint(relay.key())
    engine = relay.api.engine
    both, swapped = named(old=OLD, new=NEW), named(old=OLD, new=LOST)
    for role, details, says in (
        ("worker", {"master_keys": named(old=OLD)}, "worker here:7"),
        ("worker", {"master_keys": []}, "worker here:7"),
        ("worker", {}, "does not say"),
        ("worker", {"master_keys": swapped}, "another value"),
        ("api", {"master_keys": named(old=OLD)}, "api here:7"),
    ):
        process = beat(engine, role, details)
        result = rotate(relay.database, new=NEW, old=OLD)
        assert (result.exit_code, "without the master key 'new'" in result.output) == (1, True)
        assert says in result.output
        assert key_id_of(rows.value("select secret from relay.endpoints")) == "old"
        rows.sql(
            "update relay.heartbeats set beat_at = now() - interval '31 s' where process_id = %s", [process.process_id]
        )
    for role, details in (("worker", {"master_keys": both}), ("api", {"master_keys": []}), ("publisher", {})):
        beat(engine, role, details)
    # This one seals with the old key still, so that is needed still.
    beat(engine, "api", {"master_keys": both})
    result = rotate(relay.database, new=NEW, old=OLD)
    assert result.exit_code == 1
    assert "old: keep it, api here:7 seals with it: put new first there" in result.output
    assert key_id_of(rows.value("select secret from relay.endpoints")) == "new"


def test_a_newer_value_is_left_alone(relay: Instance, rows: Rows) -> None:
    """Compare and set: a secret that is rotated between the read and the write stays the newer one, and is seen again."""
    endpoint_id = UUID(relay.endpoint(relay.key())["id"])
    vault = Vault({"new": NEW, "old": OLD})
    newer = vault.seal(Secret("newer"), owner=endpoint_id)

    class Late(Vault):
        """Somebody else rotates while a value is sealed anew."""

        def reseal(self, sealed: bytes, *, owner: UUID) -> bytes | None:
            rows.sql("update relay.endpoints set secret = %s", [newer])
            return super().reseal(sealed, owner=owner)

    tally = Tally()
    with relay.api.engine.begin() as connection:
        reseal_batch(connection, PLACES[0], Late({"new": NEW, "old": OLD}), tally, after=None, limit=10)
    assert (tally.missed, tally.resealed) == (1, 0)
    assert rows.value("select secret from relay.endpoints") == newer


def test_batches_while_secrets_are_rotated(relay: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking in batches of two while the API rotates all the time: in the end every endpoint has its last secret."""
    monkeypatch.setattr("relay.cli.keys.BATCH", 2)
    key = relay.key()
    last = {made["id"]: made["secret"] for made in (relay.endpoint(key) for _ in range(5))}
    stop = threading.Event()

    def rotate_secrets() -> None:
        client = relay.client.application.test_client()
        while not stop.is_set():
            for endpoint_id in last:
                answer = client.post(f"/v1/endpoints/{endpoint_id}/rotate-secret", headers=key)
                last[endpoint_id] = answer.get_json()["secret"]

    thread = threading.Thread(target=rotate_secrets)
    thread.start()
    try:
        rotate(relay.database, new=NEW, old=OLD)
    finally:
        stop.set()
        thread.join()
    assert rotate(relay.database, new=NEW, old=OLD).exit_code == 0
    vault = Vault({"new": NEW})
    for endpoint_id, secret in relay.query("select id, secret from relay.endpoints"):
        assert vault.open(secret, owner=endpoint_id).reveal() == last[str(endpoint_id)]


def test_the_command(relay: Instance, tmp_path: Path) -> None:
    """`relay keys rotate` reads its settings from the environment; without master keys a sentence says what is missing."""
    relay.endpoint(relay.key())
    for held, code, says in (({}, 1, "relay: RELAY_MASTER_KEYS is not set"), ({"new": NEW, "old": OLD}, 0, "1 values")):
        done = subprocess.run(
            [sys.executable, "-m", "relay.cli.main", "keys", "rotate"],
            env={**os.environ, "DATABASE_URL": relay.database, "RELAY_MASTER_KEYS": keys(**held)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done


def test_processes_say_which_keys_they_have(database: str, broker: str) -> None:
    """Workers and API processes publish ids and fingerprints with their heartbeats, and no key."""
    settings = load_settings(
        {"DATABASE_URL": database, "RELAY_BROKER_URL": broker, "RELAY_MASTER_KEYS": keys(new=NEW, old=OLD)}
    )
    api, worker = make_api(settings), make_worker(settings)
    hearts: list[Any] = [api.heart, worker.heart]
    try:
        with api.engine.begin() as connection:
            for heart in hearts:
                heartbeats.beat(connection, heart._process, heart._pulse(connection))
            said = heartbeats.live(connection, within_secs=30)
        assert [process.role for process in said] == ["api", "worker"]
        for process in said:
            assert process.details["master_keys"] == named(new=NEW, old=OLD)
            assert base64.b64encode(NEW).decode() not in str(process)
    finally:
        for engine in (api.engine, api.hot, worker.engine, worker.hot):
            engine.dispose()
        for stream in (worker.intake._stream, worker.intake._settler):
            stream._redis.close()
