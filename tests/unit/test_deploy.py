"""The deploy files against the code: commands, settings, ports, routes and stop times in them are real ones.

What only the tools themselves can judge (templates rendered, units loaded, images built) is not for here.
"""

from __future__ import annotations

import configparser
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from dotenv import dotenv_values

import relay
from relay import metrics
from relay.bootstrap.api import make_api
from relay.cli.main import main
from relay.config import Settings, describe, variable_of
from relay.config_sources import load_settings
from relay.process.health import HealthServer
from relay.web.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
CHART = DEPLOY / "helm" / "relay"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text("utf-8")
PROBE = DEPLOY / "docker" / "probe.py"
#: Seconds: the default grace, which the files count on where they do not say another.
GRACE_SECS = int(Settings.model_fields["shutdown_grace_secs"].default)
#: Paths that ask for no key and are for the installation's own network.
INTERNAL = ("/healthz", "/metrics", "/readyz")


def texts() -> dict[Path, str]:
    """Every file of the folder, once: links lead to others of it."""
    found = (path for path in DEPLOY.rglob("*") if path.is_file() and not path.is_symlink() and path.name != ".env")
    return {path: path.read_text("utf-8") for path in found}


def parsed(path: Path) -> Any:
    """A YAML file of one document."""
    return yaml.safe_load(path.read_text("utf-8"))


def services(*names: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file and those laid over it, each with what it extends."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for service, own in parsed(COMPOSE / name)["services"].items():
            base = {}
            if "extends" in own:
                base = parsed(COMPOSE / own["extends"]["file"])["services"][own["extends"]["service"]]
            known = found.get(service, {})
            merged = known | base | own
            merged["environment"] = known.get("environment", {}) | own.get("environment", {})
            merged["volumes"] = [*base.get("volumes", ()), *own.get("volumes", known.get("volumes", ()))]
            found[service] = merged
    return found


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name, each with the text of those that it is made from before its own."""
    found: dict[str, str] = {}
    for base, name, body in re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    ):
        found[name] = found.get(base, "") + body
    return found


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What make-env.sh writes; it writes over nothing, and shows it to nobody else."""
    file = tmp_path_factory.mktemp("compose") / ".env"
    command = ["sh", str(COMPOSE / "make-env.sh"), str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    text = file.read_text("utf-8")

    assert file.stat().st_mode & 0o777 == 0o600
    assert subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 1
    assert file.read_text("utf-8") == text
    assert [path.name for path in file.parent.iterdir()] == [".env"]
    return {name: value or "" for name, value in dotenv_values(file).items()}


def filled(environment: dict[str, str], values: dict[str, str]) -> dict[str, str]:
    """An environment with compose's ${NAME:?…} and ${NAME:-…} replaced."""

    def one(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return values.get(name, default) if default is not None else values[name]

    pattern = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?[^}]*)\}")
    return {name: pattern.sub(one, value) for name, value in environment.items()}


def test_every_file_parses() -> None:
    """YAML and JSON are such, and the chart's values fit the chart's schema."""
    for path, text in texts().items():
        if "templates" in path.parts:
            continue
        if path.suffix in {".yaml", ".yml"}:
            assert list(yaml.safe_load_all(text)), path
        elif path.suffix == ".json":
            json.loads(text)
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    values = parsed(CHART / "values.yaml")
    jsonschema.validate(values, schema)
    secret = [{"settings": {d.variable: "x"}} for d in describe() if d.secret]
    assert len(secret) > 5
    for wrong in ({"nonsense": 1}, {"image": {"tag": "latest"}}, *secret):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | wrong, schema)


def test_every_variable_is_a_setting() -> None:
    """Each RELAY_ name anywhere, in comments too, is one that a process would take."""
    known = {variable_of(name) for name in Settings.model_fields}
    used = {path.name: set(re.findall(r"\bRELAY_[A-Z0-9_]+\b", text)) - known for path, text in texts().items()}

    assert {name: unknown for name, unknown in used.items() if unknown} == {}


def test_no_file_holds_a_secret() -> None:
    """Secret variables are only named, filled from outside, or given as a word in capitals to replace."""
    names = "|".join([d.variable for d in describe() if d.secret] + [r"\w*PASSWORD\w*", "REDISCLI_AUTH"])
    given = re.compile(rf"^\s*(?:- )?(?:{names})\s*[:=]\s*(.+)$", re.MULTILINE)
    made = re.compile(r"\$\{\w+:\?[^}]*\}|\$\((?:hex|key) \d*\)|\$\(key\)|\b[A-Z_]{2,}\b")
    left = []
    for path, text in texts().items():
        plain = (
            (value, re.sub(r"\w+://|[a-z.]+\.internal|relay", "", made.sub("", value))) for value in given.findall(text)
        )
        left += [(path.name, value) for value, rest in plain if re.search(r"[A-Za-z0-9+/]{12,}", rest)]
        assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|whsec_[A-Za-z0-9]|rk_[A-Za-z0-9]{12}", text), path

    assert left == []


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.try.yaml")])
def test_compose_gives_each_role_what_it_starts_with(files: tuple[str, ...], secrets: dict[str, str]) -> None:
    """Settings load without a fault, are those that the role reads, and leave the address policy closed in production."""
    needs = {
        "migrate": {"database_url"},
        "api": {"database_url", "master_keys", "admin_key"},
        "publisher": {"database_url", "broker_url"},
        "worker": {"database_url", "broker_url", "master_keys"},
        "beat": {"database_url", "broker_url"},
        "flower": {"broker_url", "flower_auth"},
        "receiver": {"testkit_secret"},
    }
    hidden = {
        name for name in Settings.model_fields for d in describe() if d.secret and d.variable == variable_of(name)
    }
    seen = {}
    for role, service in services(*files).items():
        if "build" not in service:
            continue
        settings = load_settings(filled(service["environment"], secrets))
        seen[role] = {name for name in hidden if getattr(settings, name)}
        assert settings.require_https == (len(files) == 1 or role not in {"api", "worker"}), role
        assert not settings.allow_private_endpoints, role

    assert seen == {role: names for role, names in needs.items() if role in seen}
    assert len(seen) == 5 + len(files)


def test_supervisors_wait_longer_than_the_grace(secrets: dict[str, str]) -> None:
    """Compose, Helm and systemd kill a process only after RELAY_SHUTDOWN_GRACE_SECS."""
    for role, service in services("compose.yaml").items():
        if "build" in service:
            grace = load_settings(filled(service["environment"], secrets)).shutdown_grace_secs
            assert int(service["stop_grace_period"].removesuffix("s")) >= grace + 5, role
    for unit in UNITS:
        assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text("utf-8"), re.MULTILINE)[0]) >= GRACE_SECS + 5
        assert "RELAY_SHUTDOWN_GRACE_SECS=" not in unit.read_text("utf-8")
    assert parsed(CHART / "values.yaml")["shutdownGraceSecs"] == GRACE_SECS
    env = "{name: RELAY_SHUTDOWN_GRACE_SECS, value: {{ .root.Values.shutdownGraceSecs | quote }}}"
    assert env in (CHART / "templates" / "_helpers.tpl").read_text("utf-8")
    for name, text in workloads().items():
        sums = re.findall(r"terminationGracePeriodSeconds: \{\{ add \.Values\.shutdownGraceSecs (.*?)\}\}", text)
        assert len(sums) == 1, name
        assert int(sums[0].split()[-1]) >= 5, name


def workloads() -> dict[str, str]:
    """The chart's templates that run something."""
    found = {path.stem: path.read_text("utf-8") for path in (CHART / "templates").glob("*.yaml")}
    return {name: text for name, text in found.items() if "containers:" in text}


def test_images_run_commands_that_exist() -> None:
    """Each role's image ends in a command of `relay`, runs as nobody in particular, and has its role's port."""
    made = stages()
    ports = {"api": "bind", "publisher": "metrics_bind", "worker": "metrics_bind", "receiver": "testkit_bind"}
    ports |= {"flower": "flower_bind"}
    roles = set(made) - {"builder", "runtime", "packed"}

    assert roles == {"api", "publisher", "worker", "beat", "migrate", "flower", "receiver"}
    for role in roles:
        (command,) = json.loads(re.findall(r"^CMD (\[.*\])$", made[role], re.MULTILINE)[-1])
        assert command in main.commands, role
        assert 'ENTRYPOINT ["relay"]' in made[role]
        assert re.findall(r"^USER (\S+)$", made[role], re.MULTILINE)[-1] == "10001:10001"
        if role in ports:
            variable, port = variable_of(ports[role]), Settings.model_fields[ports[role]].default.rpartition(":")[2]
            environment = dict(re.findall(r"\b(RELAY_\w+)=(\S+)", made[role]))
            settings = load_settings({name: value for name, value in environment.items() if name == variable})
            assert str(getattr(settings, ports[role])) == f"0.0.0.0:{port}", role
            assert f"EXPOSE {port}" in made[role]
            assert f'"/opt/probe.py", "{port}"' in made[role]
        else:
            assert "HEALTHCHECK NONE" in made[role]
    built = {
        service["build"]["target"]
        for service in services("compose.yaml", "compose.try.yaml").values()
        if "build" in service
    }
    assert built == roles
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
    # What is not named as a package stays out of the wheel, and so out of the images.
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "relay").rglob("__init__.py")}
    assert packages | {"relay.alembic"} == set(setup["options"]["packages"].split())


def test_images_and_versions_are_pinned() -> None:
    """No image is without a tag or `latest`, and Relay's own carry this release."""
    images = [service["image"] for service in services("compose.yaml", "compose.try.yaml", "monitoring.yaml").values()]
    images += re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)

    for image in images:
        name, colon, tag = image.rpartition(":")
        assert colon, image
        assert re.match(r"v?\d+\.\d+", tag), image
        assert not name.startswith("relay-") or tag == relay.__version__, image
    assert all(base in {"${PYTHON}", *stages()} for base in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    assert parsed(CHART / "Chart.yaml")["appVersion"] == relay.__version__


def test_what_is_mounted_exists() -> None:
    """Each file that a container gets from here, alerts and dashboards among them, is here."""
    mounted = {
        mount.split(":")[0]
        for name in ("compose.yaml", "monitoring.yaml")
        for service in services(name).values()
        for mount in service.get("volumes", ())
        if mount.startswith(".")
    }

    assert {"../prometheus/rules.yml", "../grafana/dashboards", "./prometheus.yml", "./prometheus-host.yml"} <= mounted
    assert [path for path in mounted if not (COMPOSE / path).exists()] == []
    assert (CHART / "files" / "rules.yml").resolve() == DEPLOY / "prometheus" / "rules.yml"
    for path in [*COMPOSE.glob("prometheus*.yml"), DEPLOY / "prometheus" / "prometheus.yml"]:
        jobs = [job["job_name"] for job in parsed(path)["scrape_configs"]]
        assert jobs == ["relay-api", "relay-publisher", "relay-worker"], path


def test_servers_keep_what_relay_counts_on() -> None:
    """Postgres waits for the disk at each commit; Redis evicts nothing and writes what it has down."""
    found = services("compose.yaml")
    given = dict(flag.removeprefix("-c").split("=", 1) for flag in found["postgres"]["command"][1:])

    assert given["synchronous_commit"] == "on"
    assert {"fsync", "full_page_writes"}.isdisjoint(given)
    for line in ("maxmemory-policy noeviction", "appendonly yes", "requirepass %s"):
        assert line in found["redis"]["command"][-1]


def test_workers_are_scaled_by_figures_that_exist() -> None:
    """KEDA's queries and the adapter's rules ask for metrics that Relay exports, and the autoscaler for the rules' names."""
    rules = parsed(DEPLOY / "helm" / "prometheus-adapter.yaml")["rules"]["external"]
    template = (CHART / "templates" / "autoscaling.yaml").read_text("utf-8")
    queries = re.findall(r"^ *query: (.+)$", template, re.MULTILINE)
    asked = [rule["metricsQuery"] for rule in rules] + [rule["seriesQuery"] for rule in rules] + queries

    assert len(queries) == 2
    assert {name for text in asked for name in re.findall(r"relay_\w+", text)} <= set(metrics.names())
    assert {rule["name"]["as"] for rule in rules} == set(re.findall(r"metric: \{name: (\w+)\}", template))


def test_roles_run_with_nothing_to_spare(secrets: dict[str, str]) -> None:
    """Containers have a read-only root, no capabilities and no port beyond loopback; pods no service links and no root."""
    for name, service in services("compose.yaml", "compose.try.yaml", "monitoring.yaml").items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        if "build" in service:
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
    for unit in UNITS:
        assert {"DynamicUser=yes", "CapabilityBoundingSet="} <= set(unit.read_text("utf-8").splitlines())
    helpers = (CHART / "templates" / "_helpers.tpl").read_text("utf-8")
    for line in ("enableServiceLinks: false", "runAsNonRoot: true", "readOnlyRootFilesystem: true", "drop: [ALL]"):
        assert line in helpers
    shown = workloads()
    assert set(shown) == {"api", "worker", "publisher", "beat", "flower", "migrate"}
    for name, text in shown.items():
        assert text.count('include "relay.pod"') == text.count('include "relay.container"') == 1, name
        variables = set(re.findall(r'"([A-Z_]+)"', re.findall(r"\(list ([^)]*)\)\) \$role", text)[0]))
        assert variables <= set(parsed(CHART / "values.yaml")["secret"]["keys"]), name


@pytest.fixture(scope="module")
def paths() -> list[str]:
    """The paths of the API's routes. Nothing is connected to."""
    api = make_api(load_settings({"DATABASE_URL": "postgresql://nobody:none@127.0.0.1:1/none"}))
    return [rule.rule for rule in create_app(api).url_map.iter_rules()]


def test_probes_ask_for_routes_that_exist(paths: list[str]) -> None:
    """Every path that a supervisor asks for is served: readiness of the API by its database, liveness by the process."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text("utf-8")
    chart = "\n".join([helpers, *workloads().values()])
    asked = set(re.findall(r'httpGet: \{path: "?([^",}]+)"?, port: http\}', chart))
    asked |= set(re.findall(r'"/opt/probe.py", "8080", "([^"]+)"', DOCKERFILE))
    asked.add(services("compose.yaml")["api"]["healthcheck"]["test"][-1])

    assert asked == {"/healthz", "/readyz?for=ingest"}
    assert {path.partition("?")[0] for path in asked} | {"/metrics"} <= set(paths)
    readiness = re.findall(r"readinessProbe:\s+httpGet: \{path: \"?([^\",]+)", workloads()["api"])
    assert readiness == ["/readyz?for=ingest"]
    assert re.findall(r"livenessProbe:\s+httpGet: \{path: (\S+), ", chart) == ["/healthz", "/healthz"]
    assert set(re.findall(r"httpGet: \{path: (\S+), port: metrics\}", chart)) == {"/healthz"}


def test_proxies_let_the_api_through_and_nothing_else(paths: list[str]) -> None:
    """nginx and the ingress pass on every route that is for callers, and none that asks for no key."""
    (nginx,) = re.findall(r"location ~ (\S+) \{", (DEPLOY / "nginx" / "relay.conf").read_text("utf-8"))
    (prefixes,) = re.findall(r"range list ((?:\"/[^\"]*\" ?)+)", workloads()["api"])
    listed = json.loads(f"[{', '.join(prefixes.split())}]")

    for path in paths:
        # The root only leads to /docs; as a prefix it would let everything through.
        through = path not in {*INTERNAL, "/"}
        assert bool(re.search(nginx, path)) == through, path
        assert any(path == prefix or path.startswith(prefix + "/") for prefix in listed) == through, path


def test_units_start_roles_on_ports_that_are_scraped() -> None:
    """Each unit runs a command of `relay`; publisher and workers have the ports of the shipped prometheus.yml."""
    commands, ports, binds = set(), set(), set()
    target = (DEPLOY / "systemd" / "relay.target").read_text("utf-8")
    for unit in UNITS:
        text = unit.read_text("utf-8")
        (command,) = re.findall(r"^ExecStart=/opt/relay/current/bin/relay (\w+)", text, re.MULTILINE)
        commands.add(command)
        instances = re.findall(rf"{re.escape(unit.stem)}(\d+)\.service", target) if unit.stem.endswith("@") else [""]
        assert instances, unit.name
        for port in re.findall(r"^Environment=RELAY_METRICS_BIND=127\.0\.0\.1:(\S+)$", text, re.MULTILINE):
            ports |= {f"127.0.0.1:{port.replace('%i', instance)}" for instance in instances}
        for port in re.findall(r"^Environment=RELAY_BIND=127\.0\.0\.1:(\S+)$", text, re.MULTILINE):
            binds |= {f"127.0.0.1:{port.replace('%i', instance)}" for instance in instances}
        assert "KillMode=mixed" in text or command == "migrate"
    scraped = {
        target
        for job in parsed(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][1:]
        for target in job["static_configs"][0]["targets"]
    }

    assert commands == {"api", "publisher", "worker", "beat", "flower", "migrate"}
    assert commands <= set(main.commands)
    assert ports == scraped
    # Two, so that one takes events while the other is replaced; the proxy has both.
    proxied = re.findall(r"^    server (\S+) ", (DEPLOY / "nginx" / "relay.conf").read_text("utf-8"), re.MULTILINE)
    assert len(binds) == 2
    assert binds == set(proxied)


def probe(port: int, *arguments: str) -> tuple[int, str]:
    """What the images' health check says of a port, run as there; a proxy of the environment does not count."""
    done = subprocess.run(
        [sys.executable, str(PROBE), str(port), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:1"},
    )
    return done.returncode, done.stdout


@pytest.fixture
def answering() -> Iterator[int]:
    """The port of a server that wants a login."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401, "Access denied")

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  # the base class's name

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_health_check_tells_what_came(answering: int) -> None:
    """It passes where the status is the wanted one, and otherwise fails saying what came instead."""
    assert probe(answering, "/", "401")[0] == 0
    code, said = probe(answering, "/healthz")
    assert (code, said.startswith(f"{answering}/healthz: 401 ")) == (1, True)
    code, said = probe(1, "/healthz")
    assert (code, "refused" in said) == (1, True)


def test_health_check_reads_a_workers_own_health() -> None:
    """The port of publisher and worker passes while their parts live, and fails by name where one is gone."""
    gone: list[str] = []
    bind = load_settings({"RELAY_METRICS_BIND": "127.0.0.1:0"}).metrics_bind
    server = HealthServer(bind, dead=lambda: gone)
    server.start()
    port = server._server.server_address[1]
    assert isinstance(port, int)
    try:
        assert probe(port, "/healthz")[0] == 0
        gone.append("relay-engine")
        code, said = probe(port, "/healthz")
    finally:
        server.stop()

    assert (code, "relay-engine" in said) == (1, True)


def test_a_role_that_waits_for_its_database_still_ends() -> None:
    """SIGTERM ends a publisher or worker whose database is away: by a handler, as a container's first process needs one."""
    given = {
        "DATABASE_URL": "postgresql://nobody:none@127.0.0.1:1/none",
        "RELAY_BROKER_URL": "redis://127.0.0.1:1/0",
        "RELAY_METRICS_BIND": "127.0.0.1:0",
        "RELAY_LOG_FORMAT": "json",
        "PATH": os.environ["PATH"],
    }
    started = [
        subprocess.Popen([sys.executable, "-m", "relay.cli.main", role], stderr=subprocess.PIPE, text=True, env=given)
        for role in ("publisher", "worker")
    ]
    try:
        for process in started:
            assert process.stderr is not None
            assert any("does not answer yet" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=60) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_the_page_on_deploying_leads_to_what_is_there() -> None:
    """Files, chart values and sections that docs/deployment.md and deploy/README.md name exist."""
    page = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    values = parsed(CHART / "values.yaml")

    for text in (page, (DEPLOY / "README.md").read_text("utf-8")):
        for named in re.findall(r"deploy/[\w./@-]*\w", text):
            assert (ROOT / named).exists(), named
        for link, fragment in re.findall(r"\]\((?:\.\./docs/)?(\w+\.md)?(?:#([\w-]+))?\)", text):
            linked = (ROOT / "docs" / (link or "deployment.md")).read_text("utf-8")
            heads = re.findall(r"^#+ (.+)$", linked, re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not fragment or fragment in anchors, (link, fragment)
    for role, key in re.findall(r"`(api|worker|publisher|flower|migrate|metrics|image)\.([\w.]+)", page):
        found = values[role]
        for part in key.split("."):
            found = found[part]
    assert f"`migrate.activeDeadlineSecs` ({values['migrate']['activeDeadlineSecs']})" in page
