"""A Redis that sentinels watch: Relay finds the master, and finds the next one when it dies."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import redis
import requests

from relay.outbox.stream import connect
from tests.stack import Stack, quiet_port, wait_until
from tests.surroundings.servers import folder, redis_server
from tests.traffic import Traffic, at_rest, check, settle

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSWORD = "redis-for-tests"
SENTINELS_PASSWORD = "sentinel-for-tests"


@contextlib.contextmanager
def watched_pair() -> Iterator[tuple[str, int]]:
    """A master, a replica, and three sentinels of which one is never there; yield the URL and the master's process id."""
    master, replica, *ports = (quiet_port() for _ in range(4))
    common = {
        "bind": "127.0.0.1",
        "requirepass": PASSWORD,
        "masterauth": PASSWORD,
        "save": '""',
        "repl-diskless-sync-delay": "0",
    }
    with folder() as home, contextlib.ExitStack() as running:

        def start(name: str, port: int, settings: dict[str, str], password: str, *flags: str) -> int:
            client = redis.Redis(host="127.0.0.1", port=port, password=password)
            given = {"port": str(port), "dir": str(home / name), **settings}
            return running.enter_context(redis_server(home / name, given, client, *flags))

        master_pid = start("master", master, common, PASSWORD)
        start("replica", replica, common | {"replicaof": f"127.0.0.1 {master}"}, PASSWORD)
        for port in ports:
            watching = {
                "bind": "127.0.0.1",
                "requirepass": SENTINELS_PASSWORD,
                "sentinel sentinel-pass": SENTINELS_PASSWORD,
                "sentinel monitor": f"relay-master 127.0.0.1 {master} 1",
                "sentinel auth-pass": f"relay-master {PASSWORD}",
                "sentinel down-after-milliseconds": "relay-master 1000",
                "sentinel failover-timeout": "relay-master 5000",
            }
            start(f"sentinel-{port}", port, watching, SENTINELS_PASSWORD, "--sentinel")
        with redis.Redis(host="127.0.0.1", port=ports[0], password=SENTINELS_PASSWORD) as sentinel:
            wait_until(
                lambda: (
                    (known := sentinel.sentinel_master("relay-master"))["num-slaves"]
                    and known["num-other-sentinels"] == len(ports) - 1
                ),
                30,
                "the sentinels know replica and each other",
            )
        away = quiet_port()
        hosts = ",".join(f"127.0.0.1:{port}" for port in (away, *ports))
        yield (
            f"sentinel://:{PASSWORD}@{hosts}/1?master=relay-master&sentinel_password={SENTINELS_PASSWORD}",
            master_pid,
        )


def test_work_goes_on_after_the_master_died(database: str) -> None:
    """Stream, Celery's queue and Flower find the master through any sentinel; when it dies they go over to the next."""
    with watched_pair() as (broker, master_pid):
        port = quiet_port()
        with Stack(database_url=database, broker_url=broker) as stack, Traffic(stack, senders=2) as traffic:
            stack.endpoint("/verify")
            roles = stack.start("api", "publisher", "worker", "beat")
            login = {"RELAY_FLOWER_AUTH": "flower:flower-for-tests", "RELAY_FLOWER_BIND": f"127.0.0.1:{port}"}
            flower = stack.launch("flower", **login)
            traffic.wait_accepted(50)
            stack.sweeps_run()

            def flower_answers() -> bool:
                with contextlib.suppress(requests.ConnectionError):
                    page = requests.get(f"http://127.0.0.1:{port}/", auth=("flower", "flower-for-tests"), timeout=10)
                    return page.status_code == 200
                return False

            wait_until(flower_answers, 60, "Flower answers")
            with connect(broker) as client:
                before = client.info("server")["process_id"]
                assert before == master_pid
                os.kill(master_pid, signal.SIGKILL)

                def is_next() -> bool:
                    with contextlib.suppress(redis.RedisError):
                        return bool(client.info("server")["process_id"] != before and client.set("probe", 1))
                    return False

                wait_until(is_next, 60, "the replica is the master")
            traffic.wait_accepted(50)
            announced = roles[1].metrics()["relay_deliveries_announced_total"]
            wait_until(
                lambda: roles[1].metrics()["relay_deliveries_announced_total"] > announced, 30, "hints are added again"
            )
            stack.sweeps_run(60)
            traffic.stop()
            settle(stack)
            check(stack, traffic)
            assert set(traffic.answers) == {202}
            wait_until(lambda: stack.get("/readyz") == 200, 30, "the installation is ready")
            at_rest(stack)
            for role in (*roles, flower):
                text = role.log.read_text("utf-8", "replace")
                assert PASSWORD not in text, role.name
                assert SENTINELS_PASSWORD not in text, role.name
