"""The load test counts what came exactly, and says so when something did not."""

from __future__ import annotations

import fcntl
import http.client
import http.server
import json
import os
import signal
import socket
import termios
import threading
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest
import redis

from relay.core.errors import InvalidInput, Unavailable
from relay.core.model import Status
from relay.loadtest import aged, drain, generator, history, main, soak, sustained, usage
from relay.loadtest.accounting import Tally, tally
from relay.loadtest.report import Report, percentile
from relay.loadtest.scenario import Options
from relay.loadtest.seed import make_workspace, payload_of
from relay.loadtest.sink import Sink
from relay.store.vault import Vault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from relay.embedded.stack import Servers

KEYS = {
    *("scenario", "ok", "offered", "delivered", "lost", "duplicates", "rate_per_second", "p50_ms", "p99_ms", "max_ms"),
    *("sql_per_delivery", "redis_per_delivery", "cpu_us_per_delivery", "worker_rss_mb", "workers", "settings"),
    *("versions", "cores"),
}
BODY = b'{"type":"a"}'


@pytest.fixture(scope="module")
def running_sink() -> Iterator[Sink]:
    """A running sink with two origins."""
    with Sink(origins=2) as started:
        yield started


@pytest.fixture
def sink(running_sink: Sink) -> Sink:
    """A sink that nothing came to yet, and that answers at once."""
    running_sink.reset()
    running_sink.answer()
    return running_sink


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few rows of these tests are due after a second: they are made in a fraction of it."""
    monkeypatch.setattr(drain, "_SPARE_SECS", 1.0)


def request_of(delivery_id: UUID | None = None, path: str = "/e/1", body: bytes = BODY) -> bytes:
    """A request as libcurl writes it."""
    named = f"Relay-Delivery-Id: {delivery_id}\r\n" if delivery_id else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{named}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(sink: Sink, origin: int = 0) -> socket.socket:
    """A client's connection."""
    address = urlsplit(sink.urls[origin])
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def answers(connection: socket.socket, count: int) -> bytes:
    """Read until so many answers came, or the end."""
    got = b""
    while got.count(b"\r\n\r\n") < count:
        piece = connection.recv(65_536)
        if not piece:
            break
        got += piece
    return got


def ids_seen(sink: Sink) -> Counter[UUID]:
    """How often each delivery came."""
    return Counter(UUID(bytes=id_) for id_, _ in sink.snapshot().pairs())


def until(condition: Callable[[], bool]) -> bool:
    """Wait up to 10 s for a condition; whether it came to hold."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_an_ordinary_client_is_answered_and_counted(sink: Sink) -> None:
    """Requests of the standard library's client, on one kept connection, are each counted once, with their time."""
    ids = [uuid4() for _ in range(50)]
    address = urlsplit(sink.url)
    client = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    began = time.time()

    for id_ in ids:
        client.request("POST", "/endpoint/1", BODY, {"relay-delivery-ID": str(id_)})
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (204, b"")
    client.close()

    arrivals = sink.snapshot()
    assert [UUID(bytes=id_) for id_, _ in arrivals.pairs()] == ids
    assert all(began <= at <= time.time() for at in arrivals.times)
    assert list(arrivals.times) == sorted(arrivals.times)
    assert sink.count() == len(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 77, 130])
def test_a_request_in_pieces_counts_once(sink: Sink, size: int) -> None:
    """However the network cuts two requests up, each is answered once and counted once."""
    ids = [uuid4(), uuid4()]
    text = b"".join(request_of(id_, body=b"POST /e HTTP/1.1\r\n\r\n") for id_ in ids)
    with connect(sink) as connection:
        for start in range(0, len(text), size):
            connection.sendall(text[start : start + size])

        assert answers(connection, 2).count(b"204 No Content") == 2
    assert ids_seen(sink) == Counter(ids)


def test_a_body_that_looks_like_a_request_is_a_body(sink: Sink) -> None:
    """What comes after an unfinished request belongs to it, even if it could stand alone."""
    inner, outer = request_of(uuid4()), uuid4()
    with connect(sink) as connection:
        whole = request_of(outer, body=inner)
        connection.sendall(whole[: -len(inner)])
        assert until(lambda: _is_read(connection))
        connection.sendall(inner)

        assert answers(connection, 1).count(b"204") == 1
    assert ids_seen(sink) == Counter([outer])


def test_requests_in_one_piece_are_all_counted(sink: Sink) -> None:
    """Pipelined requests, the last of them cut, are answered one by one and in order."""
    ids = [uuid4() for _ in range(20)]
    text = b"".join(request_of(id_) for id_ in ids)
    with connect(sink, origin=1) as connection:
        connection.sendall(text[:-5])
        assert answers(connection, 19).count(b"204") == 19
        connection.sendall(text[-5:])
        assert answers(connection, 1).count(b"204") == 1

    assert [UUID(bytes=id_) for id_, _ in sink.snapshot().pairs()] == ids


def test_duplicates_are_counted_and_forgotten_on_reset(sink: Sink) -> None:
    """A delivery that comes three times over two connections and both origins counts three; a reset begins anew."""
    id_ = uuid4()
    for origin in (0, 1, 1):
        with connect(sink, origin) as connection:
            connection.sendall(request_of(id_))
            answers(connection, 1)
    assert ids_seen(sink) == Counter({id_: 3})

    sink.reset()

    assert sink.count() == 0
    assert ids_seen(sink) == Counter()


def test_many_ids_survive_being_folded(sink: Sink) -> None:
    """More ids than are folded at once all come back, in order."""
    ids = [uuid4() for _ in range(10_000)]
    with connect(sink) as connection:
        for start in range(0, len(ids), 100):
            connection.sendall(b"".join(request_of(id_) for id_ in ids[start : start + 100]))
            answers(connection, 100)

    assert [UUID(bytes=id_) for id_, _ in sink.snapshot().pairs()] == ids


def test_requests_without_an_id_are_counted_alone(sink: Sink) -> None:
    """A request that names no delivery is answered and counted, and is no arrival of one."""
    with connect(sink) as connection:
        connection.sendall(request_of())
        answers(connection, 1)

    assert sink.count() == 1
    assert ids_seen(sink) == Counter()


def test_paths_hang_drop_and_forget(sink: Sink) -> None:
    """/hang is never answered, /drop is cut off, /forget is answered: none of them is written down."""
    with connect(sink) as hanging, connect(sink) as dropped, connect(sink) as forgotten:
        hanging.sendall(request_of(uuid4(), "/hang/1") + request_of(uuid4()))
        dropped.sendall(request_of(uuid4(), "/drop/1"))
        forgotten.sendall(request_of(uuid4(), "/forget/1"))

        assert answers(dropped, 1) == b""
        assert b"204" in answers(forgotten, 1)
        assert until(lambda: _is_read(hanging))
        hanging.setblocking(False)
        with pytest.raises(BlockingIOError):
            hanging.recv(1)
    assert sink.count() == 0


def test_a_delay_holds_answers_back(sink: Sink) -> None:
    """With a delay set the request is counted at once and answered later, with the status that was set."""
    sink.answer(status=200, delay_ms=150)
    with connect(sink) as connection:
        began = time.monotonic()
        connection.sendall(request_of(uuid4()))

        assert answers(connection, 1).startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n")
        assert time.monotonic() - began >= 0.15
    assert sink.count() == 1


@pytest.mark.parametrize(
    "text",
    [
        b"POST /e HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /e HTTP/1.1\r\n\r\n",
        b"POST /e HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /e HTTP/1.1\r\nContent-Length: 0\r\nRelay-Delivery-Id: 12\r\n\r\n",
        b"POST /e HTTP/1.1\r\nRelay-Delivery-Id: zzzzzzzz-0000-0000-0000-000000000000\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_what_it_cannot_read_is_refused(sink: Sink, text: bytes) -> None:
    """A request without a readable length or id is refused and its connection closed; others are served on."""
    with connect(sink) as bad, connect(sink) as good:
        bad.sendall(text)
        assert answers(bad, 2).startswith(b"HTTP/1.1 411 ")
        good.sendall(request_of(uuid4()))
        assert b"204" in answers(good, 1)


def test_a_dead_sink_says_so() -> None:
    """Asking a sink whose process was killed raises, and stopping it does not."""
    sink = Sink()
    os.kill(sink.pid, signal.SIGKILL)

    with pytest.raises(Unavailable):
        sink.count()
    sink.stop()


def test_a_report_has_exactly_its_keys() -> None:
    """A report as JSON has every key, null where nothing is known, and the table leaves those out."""
    report = Report(scenario="drain", ok=True, cores=2, offered=3, settings={"figures": {"seconds": 1.5}})

    shown = json.loads(report.json())

    assert set(shown) == KEYS
    assert shown["p99_ms"] is None
    assert "p99_ms" not in report.table()
    assert "settings.figures.seconds" in report.table()
    assert report.exit_code == 0


def test_percentiles_are_nearest_ranks() -> None:
    """The 99th percentile of a hundred values is the 99th; of none there is none."""
    values = [float(number) for number in range(1, 101)]

    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_the_books_find_every_loss_and_every_duplicate() -> None:
    """Not recorded, not seen, seen twice without an attempt for it, never offered: each is told from the others."""
    fine, unseen, unrecorded, retried, doubled, early, stranger = (uuid4().bytes for _ in range(7))
    delivered = int(Status.DELIVERED)
    states = dict.fromkeys((fine, unseen, retried, doubled, early), delivered)
    states[unrecorded] = int(Status.IN_FLIGHT)
    arrivals = [fine, unrecorded, retried, retried, doubled, doubled, doubled, early, early, stranger]

    books = tally(states=states, arrivals=arrivals, sends={retried: 2, doubled: 1}, earlier=frozenset([early]), made=5)

    assert (books.offered, books.delivered, books.lost) == (5, 3, 2)
    assert (books.duplicates, books.unexplained, books.strangers) == (3, 2, 1)
    assert not books.ok


def test_a_retried_delivery_is_no_fault() -> None:
    """A duplicate that the attempt log accounts for leaves the books in order."""
    retried = uuid4().bytes

    books = tally(
        states={retried: int(Status.DELIVERED)},
        arrivals=[retried, retried],
        sends={retried: 2},
        earlier=frozenset(),
        made=1,
    )

    assert (books.duplicates, books.ok) == (1, True)


def test_a_row_that_is_gone_is_a_loss() -> None:
    """What was made and is in no row any more, nor came, is lost; a row more than was counted is not."""
    ids = [uuid4().bytes for _ in range(3)]
    states = dict.fromkeys(ids, int(Status.DELIVERED))

    def books(made: int) -> Tally:
        return tally(states=states, arrivals=ids, sends={}, earlier=frozenset(), made=made)

    assert (books(4).offered, books(4).delivered, books(4).lost, books(4).ok) == (4, 3, 1, False)
    assert (books(2).offered, books(2).lost, books(2).ok) == (3, 0, True)


def test_cpu_is_counted_by_role() -> None:
    """Work that a process did shows in its role's CPU seconds; a role without a living process is left out."""
    before = usage.cpu_secs({"self": [os.getpid()]})["self"]

    assert until(lambda: usage.cpu_secs({"self": [os.getpid()]})["self"] > before)
    assert usage.cpu_secs({"nobody": []}) == {}
    own, machine = usage.own_secs(), usage.machine_secs() or 0
    assert until(lambda: usage.own_secs() > own and (usage.machine_secs() or 0) > machine)
    assert (usage.peak_rss_mb([os.getpid()]) or 0) > 10


def test_the_generator_outlives_closed_connections() -> None:
    """A server that closes idle connections costs no request, and no wait at the end: every arrival has its answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: Seconds after which an idle connection is closed.
        timeout = 0.05

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        plan = generator.Plan(
            host="127.0.0.1",
            port=server.server_address[1],
            request=b"POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
            connections=3,
            seconds=1.0,
            rate=10.0,
        )
        outcome = generator.run(plan)
        server.shutdown()
        thread.join()

    # A request may meet a connection just as it is closed; it is counted as that.
    assert outcome.statuses[202] + outcome.broken == pytest.approx(10, abs=1)
    assert outcome.statuses[202] >= 1
    assert outcome.unsent == 0


@pytest.mark.parametrize("size", [50, 500])
def test_payloads_have_their_size(size: int) -> None:
    """A payload is JSON of exactly the bytes asked for."""
    payload = payload_of(size)

    assert len(payload) == size
    assert json.loads(payload)["type"] == "loadtest.made"


def test_an_unknown_scenario_is_refused() -> None:
    """A scenario that there is not raises an error that names those that there are."""
    with pytest.raises(InvalidInput, match="drain"):
        main.run("nonesuch")


@pytest.mark.usefixtures("soon")
def test_a_small_drain_loses_nothing(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    """200 deliveries come through the whole path; the report is in order, and server and Redis are as before."""
    assert servers.postgres_url is not None

    code = main.run(
        "drain",
        workers=1,
        count=200,
        as_json=True,
        database_url=servers.postgres_url,
        broker_url=servers.redis_url,
    )

    report = json.loads(capsys.readouterr().out)
    assert set(report) == KEYS
    assert (code, report["ok"], report["lost"], report["duplicates"]) == (0, True, 0, 0)
    assert (report["offered"], report["delivered"]) == (200, 200)
    assert report["rate_per_second"] > 0
    # The tests' own server has it off; what is reported is what was in force.
    assert report["settings"]["postgres.fsync"] == "off"
    assert report["cpu_us_per_delivery"].keys() >= {"publisher", "worker", "sink"}
    with psycopg.connect(servers.postgres_url) as connection:
        assert connection.execute("select 1 from pg_database where datname like 'relay_loadtest_%'").fetchall() == []
    assert servers.redis_url is not None
    with redis.Redis.from_url(servers.redis_url) as client:
        assert list(client.scan_iter(match="*relay-loadtest*")) == []


@pytest.mark.usefixtures("soon")
def test_a_lossy_receiver_is_found_out(servers: Servers) -> None:
    """Where one of four endpoints drops its requests, its quarter is reported lost and the exit code is 1."""
    options = Options(workers=1, count=40, database_url=servers.postgres_url, broker_url=servers.redis_url)

    report = drain.run(options, endpoints=4, dropping=1, patience_secs=2.0)

    assert (report.ok, report.exit_code) == (False, 1)
    assert (report.offered, report.delivered, report.lost) == (40, 30, 10)


@pytest.mark.usefixtures("soon")
def test_a_lost_row_and_a_second_request_are_found_out(servers: Servers) -> None:
    """A delivery whose row vanishes before it is sent is lost, one that somebody sends once more is a duplicate: exit code 1."""
    assert servers.postgres_url is not None
    url = servers.postgres_url

    def tamper(text: str) -> None:
        if text != "releasing them":
            return
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("select datname from pg_database where datname like 'relay_loadtest_%'").fetchone()
        assert row is not None
        with psycopg.connect(url, dbname=row[0], autocommit=True) as connection:
            pending = connection.execute(
                "select d.id, p.url from relay.deliveries d join relay.endpoints p on p.id = d.endpoint_id"
                " where d.status = 0 order by d.id limit 2"
            ).fetchall()
            connection.execute("delete from relay.deliveries where id = %s", [pending[0][0]])
        again = urlsplit(pending[1][1])
        with socket.create_connection((str(again.hostname), int(again.port or 0)), timeout=10) as client:
            client.sendall(request_of(pending[1][0], again.path))
            assert b"204" in answers(client, 1)

    report = drain.run(
        Options(workers=1, count=40, database_url=url, broker_url=servers.redis_url, say=tamper),
        endpoints=2,
        patience_secs=5.0,
    )

    assert (report.ok, report.exit_code) == (False, 1)
    assert (report.offered, report.delivered, report.lost, report.duplicates) == (40, 39, 1, 1)


@pytest.mark.usefixtures("soon")
def test_what_roles_run_first_is_run(servers: Servers) -> None:
    """A preamble that ends a role is noticed, with its status: so constants set in one are in force."""
    options = Options(
        count=1, preamble="raise SystemExit(7)", database_url=servers.postgres_url, broker_url=servers.redis_url
    )

    with pytest.raises(Unavailable, match="status 7"):
        drain.run(options)


def test_made_history_is_as_work_leaves_it(database: str) -> None:
    """Events name their deliveries, each has its two attempts, in the partition of its day, and nothing is open."""
    vault = Vault({"loadtest": bytes(32)})
    with psycopg.connect(database, autocommit=True) as connection:
        workspace = make_workspace(connection, vault, ["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"])
        made = history.make(database, connection, workspace, 1_995, here=True)

        def one(query: str) -> object:
            row = connection.execute(query).fetchone()
            return None if row is None else row[0]

        assert (made.deliveries, made.attempts) == (2_000, 4_000)
        assert (
            one(
                "select count(*) from relay.events e, unnest(e.delivery_ids) x(id) join relay.deliveries d using (id)"
                " where d.event_id = e.id and d.created_at = e.created_at"
            )
            == 2_000
        )
        assert (
            one(
                "select count(*) from relay.delivery_attempts a join relay.deliveries d on d.id = a.delivery_id"
                " and a.at between d.created_at and d.finished_at"
            )
            == 4_000
        )
        assert (
            one(
                "select count(distinct (id, lease_token)) from (select delivery_id as id, lease_token"
                " from relay.delivery_attempts) a"
            )
            == 4_000
        )
        assert one("select array_agg(distinct status order by status) from relay.deliveries") == [
            Status.DELIVERED,
            Status.DEAD,
        ]
        assert one("select count(distinct endpoint_id) from relay.deliveries where status = 3") == 2
        assert one("select count(distinct tableoid) from relay.delivery_attempts") == history.DAYS
        assert one("select count(*) from relay.delivery_attempts_default") == 0
        assert one("select reltuples::int from pg_class where oid = 'relay.deliveries'::regclass") == 2_000
        assert (
            one("select bool_and(substr(id::text, 15, 1) = '7' and created_at <= now()) from relay.deliveries") is True
        )


def test_history_without_room_is_refused(database: str) -> None:
    """More rows than the disk can take are refused before any is made, with what to do."""
    with psycopg.connect(database, autocommit=True) as connection:
        workspace = make_workspace(connection, Vault({"loadtest": bytes(32)}), ["http://127.0.0.1:9/a"])

        with pytest.raises(Unavailable, match="--rows"):
            history.make(database, connection, workspace, 10**15, here=True)


@pytest.mark.usefixtures("soon")
def test_an_aged_drain_says_what_age_costs(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small history lies in the tables while the drain runs; the drains and the walked lists are in the figures."""
    monkeypatch.setattr(aged, "DRAINS", 1)
    options = Options(workers=1, count=50, rows=6_000, database_url=servers.postgres_url, broker_url=servers.redis_url)

    report = aged.run(options)

    found = json.loads(report.json())
    assert set(found) == KEYS
    assert (found["scenario"], report.exit_code, found["offered"], found["delivered"]) == ("aged", 0, 50, 50)
    figures = found["settings"]["figures"]
    assert figures["made"]["deliveries"] == 6_000
    assert [len(figures[name]) for name in ("fresh", "aged")] == [1, 1]
    assert figures["rate_ratio"] > 0
    # 6,000 of all, 120 of each endpoint, 60 dead: whole pages of 50.
    assert {name: one["page"] for name, one in figures["pages"].items()} == {
        "deliveries": 120,
        "endpoint": 2,
        "endpoint_delivered": 2,
        "dead": 1,
    }
    assert all(one["ratio"] > 0 for one in figures["pages"].values())
    assert len(found["settings"]["python_loop_ms"]) == 2
    assert 0 <= found["settings"]["others_cpu_percent"] <= 100


def test_a_soak_tells_memory_over_time(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady load is all delivered, and the workers' memory at its start and its end is in the figures."""
    monkeypatch.setattr(sustained, "WARM_UP_SECS", 0.5)
    options = Options(
        workers=1, seconds=1.0, rate=100.0, database_url=servers.postgres_url, broker_url=servers.redis_url
    )

    report = soak.run(options)

    figures = json.loads(report.json())["settings"]["figures"]
    assert (report.scenario, report.exit_code) == ("soak", 0)
    # A tenth of the rate in events, for ten endpoints each; some before the measurement.
    assert (report.offered or 0) >= figures["accepted"] * 10 >= 10
    assert 10 < figures["rss_start_mb"] < 1_000
    assert 10 < figures["rss_end_mb"] < 1_000
    assert [figures["rss_mb"][0][1], figures["rss_mb"][-1][1]] == [figures["rss_start_mb"], figures["rss_end_mb"]]


def _is_read(connection: socket.socket) -> bool:
    """Whether the other side's kernel has taken all that was sent: nothing is left unacknowledged."""
    left = array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, left)
    return left[0] == 0
