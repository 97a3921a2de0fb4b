"""The commands on a whole Relay: what they print for people and for programs, and what their exit codes say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from relay.cli.main import main
from tests.stack import Stack, quiet_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in where no Relay ever was, with an environment that says nothing of one."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RELAY_") or name == "DATABASE_URL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(*arguments: str, env: dict[str, str] | None = None, code: int | None = 0, feed: str | None = None) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, list(arguments), env=env, input=feed, catch_exceptions=False)
    assert code is None or result.exit_code == code, (result.exit_code, result.output)
    return result


def lines(result: Result) -> list[Any]:
    """What a command printed as JSON, a line each."""
    return [json.loads(line) for line in result.stdout.splitlines()]


@contextmanager
def started(*arguments: str, env: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command as a process of its own; it is ended in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.cli.main", *arguments],
        env=os.environ | env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_the_commands_on_a_whole_relay(database: str, broker: str, place: Path) -> None:
    """An endpoint is made, tested, sent to, looked at, changed and removed; a dead delivery is sent again, watched."""
    with Stack(database_url=database, broker_url=broker) as stack:
        stack.start("api", "publisher", "worker", "beat")
        env = {"RELAY_URL": stack.url, "RELAY_API_KEY": stack.headers["Authorization"].removeprefix("Bearer ")}
        _endpoint_and_events(stack, env)
        _deliveries_and_replay(stack, env)
        _jobs(stack, env, place)
        _listening(env, place)
        _the_doctor(stack, env, place)


def _endpoint_and_events(stack: Stack, env: dict[str, str]) -> None:
    url = f"{stack.receiver.url}/verify"
    made = lines(
        run(
            "endpoints", "create", url, "event_types=order.*", "rate_per_second=500", "burst=500", "--json",
            "--secret-file", "-", env=env, feed=stack.secret,
        )
    )[0]  # fmt: skip
    id_ = made["id"]
    assert (made["event_types"], made["rate_per_second"], made["secret"]) == (["order.*"], 500, stack.secret)
    assert re.match(r"^delivered: HTTP 200 after \d+ ms$", run("endpoints", "test", id_, env=env).stdout)

    said = run("send", "order.paid", "--data", '{"amount": 4999}', env=env).stdout
    event = re.match(r"^event (\S+) accepted, 1 delivery\n  (\S+)  delivered after 1 attempt: HTTP 200\n$", said)
    assert event is not None, said
    shown = lines(run("events", "get", event[1], "--json", env=env))[0]
    assert [one["id"] for one in shown["deliveries"]] == [event[2]]
    assert event[2] in run("events", "get", event[1], env=env).stdout
    assert event[1] in run("events", "list", "--type", "order.paid", "--since", "1h", env=env).stdout
    assert run("events", "payload", event[1], env=env).stdout == '{"amount": 4999}'

    asked = {"name": "shop", "scopes": ["ingest"]}
    key = stack.app.test_client().post("/v1/keys", json=asked, headers=stack.headers).get_json()["key"]
    blind = run("send", "order.paid", env=env | {"RELAY_API_KEY": key})
    assert "has not the scope `read`" in blind.stderr

    listed = run("endpoints", "list", env=env).stdout.splitlines()
    assert listed[0].split("\t")[:4] == ["id", "url", "kind", "state"]
    assert listed[1].split("\t")[:5] == [id_, url, "endpoint", "enabled", "order.*"]
    assert lines(run("endpoints", "update", id_, "timeout_ms=900", "--json", env=env))[0]["timeout_ms"] == 900
    assert re.search(r"^timeout_ms +900$", run("endpoints", "get", id_, env=env).stdout, re.MULTILINE)
    assert "is not FIELD=VALUE" in run("endpoints", "update", id_, "colour=red", env=env, code=2).stderr
    run("endpoints", "disable", id_, env=env)
    assert "disabled (manual)" in run("endpoints", "list", env=env).stdout
    run("endpoints", "delete", id_, env=env, feed="n\n", code=1)
    assert run("endpoints", "delete", id_, "--yes", env=env).stdout == f"{id_}: deleted\n"
    gone = run("endpoints", "get", id_, env=env, code=1)
    assert gone.stderr == "relay: 404 There is no such endpoint in this workspace: check the id.\n"
    assert "Traceback" not in run("send", "!", env=env, code=1).stderr


def _deliveries_and_replay(stack: Stack, env: dict[str, str]) -> None:
    stack.receiver.set_up("/toggle", up=False)
    endpoint = stack.endpoint("/toggle", types=["bill.*"], retry={"max_attempts": 1})
    sent = [run("send", "bill.made", "--json", "--wait", "20", env=env, code=1) for _ in range(3)]
    dead = [lines(one)[1]["id"] for one in sent]
    assert [lines(one)[1]["status"] for one in sent] == ["dead"] * 3

    listed = lines(run("deliveries", "list", "--endpoint", endpoint, "--status", "dead", "--json", env=env))
    assert [one["id"] for one in listed] == dead[::-1]
    table = run("deliveries", "list", "--reason", "attempts_exhausted", "--limit", "2", env=env).stdout.splitlines()
    assert [row.split("\t")[3:6] for row in table[1:]] == [["dead", "1", "attempts_exhausted"]] * 2
    shown = run("deliveries", "get", dead[0], env=env).stdout
    assert re.search(r"^status +dead$", shown, re.MULTILINE)
    assert "retryable_failure\tHTTP 503" in shown

    stack.receiver.set_up("/toggle", up=True)
    again = run("deliveries", "replay", dead[0], endpoint, env=env, code=1)
    assert (again.stdout, again.stderr.startswith(f"relay: {endpoint}: 404")) == (f"{dead[0]}: pending\n", True)
    assert "delivery_" not in run("deliveries", "cancel", dead[1], env=env, code=1).stdout
    done = lines(run("replay", endpoint, "--since", "1h", "--json", env=env))[0]
    assert (done["state"], done["matched"], done["replayed"]) == ("done", 2, 2)
    wait_until(lambda: stack.delivered() >= 5, 20, "the dead ones were delivered")
    said = run("replay", "--watch", done["id"], env=env).stdout
    assert said == f"replay {done['id']} done: 2 deliveries sent again\n"
    assert "give an endpoint's id" in run("replay", env=env, code=2).stderr
    run("replay", "--cancel", done["id"], env=env, code=1)
    # A filter with no match is done, too; so is one that is not waited for.
    assert run("replay", endpoint, "--no-wait", env=env).stdout.startswith("replay ")
    rows = [row.split("\t") for row in run("replay", "--list", env=env).stdout.splitlines()]
    assert rows[0][:4] == ["id", "created", "state", "again"]
    assert [row[0] for row in rows[1:]][-1] == done["id"]
    assert (rows[-1][2:4], rows[-1][5].startswith("dead, since "), rows[-1][6]) == (["done", "2"], True, endpoint)
    assert lines(run("replay", endpoint, "--list", "--json", env=env))[-1]["id"] == done["id"]
    run("replay", "--list", "--watch", done["id"], env=env, code=2)


def _jobs(stack: Stack, env: dict[str, str], place: Path) -> None:
    url = f"{stack.receiver.url}/ok/job"
    (place / "headers").write_text("Authorization: Bearer abc\n\nX-Kind: thumbnail\n")
    said = run("jobs", "send", url, "--data", '{"n": 17}', "--header", "@headers", "--wait", "30", env=env).stdout
    taken = re.match(r"^job (\S+) accepted\n  \1  delivered after 1 attempt: HTTP 200\n$", said)
    assert taken is not None, said
    shown = run("jobs", "get", taken[1], env=env).stdout
    assert re.search(rf"^url +{url}$", shown, re.MULTILINE)
    assert re.search(r"^content_type +application/json$", shown, re.MULTILINE)
    assert re.search(r"^1\t\S+ \S+\tsuccess\tHTTP 200\t", shown, re.MULTILINE)
    assert [name for name, _ in lines(run("jobs", "get", taken[1], "--json", env=env))[0]["headers"]] == [
        "Authorization",
        "X-Kind",
    ]
    # Not JSON, and one name twice.
    twice = ("--header", "X-A: 1", "--header", "x-a: 2", "--data", "no json")
    bare = lines(run("jobs", "send", url, *twice, "--json", "--wait", "30", env=env))[1]
    assert (bare["content_type"], [name for name, _ in bare["headers"]]) == (None, ["X-A", "X-A"])
    rows = [row.split("\t") for row in run("endpoints", "list", env=env).stdout.splitlines()]
    assert [row[2:5] for row in rows if row[0] == bare["endpoint_id"]] == [["origin", "enabled", "none"]]
    assert "replay it with --force." in run("jobs", "replay", taken[1], env=env, code=1).stderr
    again = run("jobs", "replay", taken[1], "x", env=env, code=1)
    assert [re.match(r"relay: \S+: \d+", line) is not None for line in again.stderr.splitlines()] == [True, True]
    assert run("jobs", "replay", taken[1], "--force", env=env).stdout == f"{taken[1]}: queued\n"

    # One that is for later is not waited for.
    later = ("jobs", "send", url, "--delay", "3600", "--idempotency-key", "later", "--json")
    made = lines(run(*later, env=env))
    assert [one["state"] for one in made] == ["queued"]
    assert (lines(run(*later, env=env))[0]["id"], lines(run(*later, env=env))[0]["replayed"]) == (made[0]["id"], True)
    run("jobs", "send", url, "--delay", "3600", "--wait", "0.1", env=env, code=4)
    assert run("jobs", "cancel", made[0]["id"], env=env).stdout == f"{made[0]['id']}: canceled\n"
    failed = run("jobs", "send", f"{stack.receiver.url}/status?code=404", "--wait", "30", env=env, code=1)
    assert "dead after 1 attempt: HTTP 404" in failed.stdout

    assert "no secret to sign jobs" in run("jobs", "send", url, "--sign", "relay", env=env, code=1).stderr
    assert re.match(r"^secret  whsec_\S+\n$", run("jobs", "rotate-secret", env=env).stdout)
    assert "delivered" in run("jobs", "send", url, "--sign", "relay", "--wait", "30", env=env).stdout
    assert "the old one signs until" in run("jobs", "rotate-secret", env=env).stdout
    for wrong in ("a secret", "@missing"):
        refused = run("jobs", "send", url, "--header", wrong, env=env, code=2).stderr
        assert ("--header" in refused, "a secret" in refused) == (True, False)


def _listening(env: dict[str, str], place: Path) -> None:
    with started("listen", "--event-types", "heard.*", "--count", "2", env=env, folder=place) as listener:
        assert listener.stderr is not None
        greeting = listener.stderr.readline()
        assert re.match(r"listening at http://127\.0\.0\.1:\d+/\S+ as endpoint \S+; Ctrl-C ends it\n", greeting)
        for number in range(2):
            run("send", "heard.this", "--data", json.dumps({"n": number, "bell": "\a"}, ensure_ascii=False), env=env)
        assert listener.wait(20) == 0
        said = listener.stdout.read() if listener.stdout is not None else ""
        assert len(re.findall(r"^heard\.this delivery \S+ attempt 1  verified$", said, re.MULTILINE)) == 2
    # By a signal: the endpoint goes all the same.
    for number in (signal.SIGINT, signal.SIGTERM):
        with started("listen", "--signing", "standard", "--json", env=env, folder=place) as listener:
            assert listener.stderr is not None
            assert "listening" in listener.stderr.readline()
            assert listener.stdout is not None
            run("send", "x", "--data", "plain", "--content-type", "text/plain", env=env)
            came = json.loads(listener.stdout.readline())
            assert (came["verified"], came["fault"], came["body"]) == (True, None, "plain")
            assert "webhook-id" in came["headers"]
            listener.send_signal(number)
            assert listener.wait(20) == 0
            assert "was removed" in listener.stderr.read()
    # Somebody else was faster.
    with started("listen", env=env, folder=place) as listener:
        assert listener.stderr is not None
        named = re.search(r" as endpoint (\S+);", listener.stderr.readline())
        assert named is not None
        run("endpoints", "delete", named[1], "--yes", env=env)
        listener.send_signal(signal.SIGINT)
        assert listener.wait(20) == 0
        assert f"endpoint {named[1]} was removed before by somebody else" in listener.stderr.read()
    assert "relay listen" not in run("endpoints", "list", "--json", env=env).stdout
    _listening_after_a_kill(env, place)


def _listening_after_a_kill(env: dict[str, str], place: Path) -> None:
    """What one that was killed left goes at the next one's start; one that runs keeps its endpoint."""

    def greeted(listener: subprocess.Popen[str]) -> str:
        assert listener.stderr is not None
        match = re.search(r" as endpoint (\S+);", listener.stderr.readline())
        assert match is not None
        return match[1]

    with started("listen", env=env, folder=place) as running, started("listen", env=env, folder=place) as killed:
        kept, left = greeted(running), greeted(killed)
        killed.kill()
        killed.wait(20)
        with started("listen", env=env, folder=place) as third:
            assert third.stderr is not None
            said = third.stderr.readline()
            assert said == f"endpoint {left}, left by a `relay listen` that was killed, was removed\n"
            own = greeted(third)
            there = [one["id"] for one in lines(run("endpoints", "list", "--json", env=env))]
            assert (kept in there, own in there, left in there) == (True, True, False)
            for listener in (third, running):
                listener.send_signal(signal.SIGINT)
                assert listener.wait(20) == 0
    assert [one for one in (place / "state").rglob("*") if one.is_file()] == []


def _the_doctor(stack: Stack, env: dict[str, str], place: Path) -> None:
    settings = stack.settings | env

    def verdicts(code: int, **changes: str) -> dict[str, tuple[str, str]]:
        found = lines(run("doctor", "--json", env=settings | changes, code=code))
        return {one["check"]: (one["verdict"], one["said"] + " | " + str(one["remedy"])) for one in found}

    # Private endpoints are allowed, the tests' Postgres cleans up nothing, and the machine may have no name server.
    apart = {"settings", "autovacuum", "dns"}

    def sound() -> bool:
        found = lines(run("doctor", "--json", env=settings, code=None))
        amiss = [one for one in found if one["verdict"] != "ok" and one["check"] not in apart]
        print(amiss)
        return not amiss

    wait_until(sound, 30, "all is well")
    well = {one["check"] for one in lines(run("doctor", "--json", env=settings, code=None))}
    assert well >= {
        "settings", "database", "pooler", "database's clock", "schema", "partitions", "master keys", "worker",
        "publisher", "beat", "lateness", "autovacuum", "redis", "redis's eviction", "redis's clock", "dns", "api",
    }  # fmt: skip
    with stack.redis() as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        try:
            assert verdicts(None)["redis's eviction"][0] == "warn"  # type: ignore[arg-type]  # dns may fail, see above
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    for role in stack.live("worker"):
        role.kill()
    stack.rows("update relay.heartbeats set beat_at = now() - interval '1 hour' where role = 'worker'")
    nowhere = f"127.0.0.1:{quiet_port()}"
    found = verdicts(1, RELAY_BROKER_URL=f"redis://{nowhere}", RELAY_URL=f"http://{nowhere}", RELAY_MASTER_KEYS="")
    assert found["worker"][0] == "fail"
    assert "start `relay worker`" in found["worker"][1]
    assert found["redis"][0] == found["api"][0] == "fail"
    assert found["master keys"][0] == "warn"
    found = verdicts(1, DATABASE_URL=f"postgresql://{nowhere}/relay")
    assert "does not answer" in found["database"][1]
    assert "worker" not in found
    assert "RELAY_LEASE_SECS" in verdicts(1, RELAY_LEASE_SECS="x")["settings"][1]
    text = run("doctor", env={"DATABASE_URL": "", "RELAY_BROKER_URL": ""}, code=1).stdout
    assert re.search(
        r"^fail  database: DATABASE_URL is not set\n      DATABASE_URL is not set: set it", text, re.MULTILINE
    )


def test_what_cannot_be_reached_is_exit_code_3(place: Path) -> None:
    """No API, or none that is Relay's: 3. No URL or key: 1. What is typed wrong: 2. Each is one line."""
    nowhere = {"RELAY_URL": f"http://127.0.0.1:{quiet_port()}", "RELAY_API_KEY": "rk_x"}
    for command in (["send", "a.b"], ["endpoints", "list"], ["deliveries", "list"]):
        done = run(*command, env=nowhere, code=3)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)
        assert done.stderr.startswith("relay: no API answers at http://127.0.0.1")
    assert "set RELAY_URL and RELAY_API_KEY" in run("send", "a.b", code=1).stderr
    run("deliveries", "list", "--since", "yesterday", env=nowhere, code=2)
    run("deliveries", "list", "--status", "lost", env=nowhere, code=2)


def test_the_key_of_relay_up_goes_nowhere_else(place: Path) -> None:
    """What `relay up` wrote is used where nothing else is set, and its key is not sent to another API."""
    own = f"http://127.0.0.1:{quiet_port()}"
    (place / ".relay").mkdir()
    (place / ".relay" / "dev.env").write_text(f"# made\nRELAY_URL={own}\nRELAY_API_KEY=rk_dev\n")
    assert f"no API answers at {own}" in run("send", "a.b", code=3).stderr
    assert f"no API answers at {own}" in run("send", "a.b", "--url", own + "/", code=3).stderr
    assert "set RELAY_API_KEY" in run("send", "a.b", "--url", "http://127.0.0.1:1", code=1).stderr
    (place / ".env").write_text("export RELAY_URL='http://127.0.0.1:1'\n")
    assert "set RELAY_API_KEY" in run("send", "a.b", code=1).stderr


def test_shells_are_told_what_to_complete(place: Path) -> None:
    """The script asks the command itself, which names commands, and says nothing where no API answers."""
    for shell in ("zsh", "fish"):
        assert "_RELAY_COMPLETE" in run("completion", shell).stdout
    asked = {"_RELAY_COMPLETE": "bash_complete", "COMP_WORDS": "relay endp", "COMP_CWORD": "1"}
    assert _completed(asked, place) == "plain,endpoints\n"
    asked |= {"COMP_WORDS": "relay endpoints get ", "COMP_CWORD": "3", "RELAY_URL": f"http://127.0.0.1:{quiet_port()}"}
    assert _completed(asked | {"RELAY_API_KEY": "rk_x"}, place).strip() == ""


def _completed(env: dict[str, str], place: Path) -> str:
    program = "from relay.cli.main import main; main(prog_name='relay')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | env,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout
