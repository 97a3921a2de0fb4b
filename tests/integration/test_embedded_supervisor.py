"""The supervisor with real child processes, run as a program of its own, as people run it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.embedded.lock import AlreadyHeld, FileLock
from relay.embedded.output import Output
from relay.embedded.supervisor import FIRST_PAUSE, LONGEST_PAUSE, ProcessSpec, _Child

ROOT = Path(__file__).parents[2]
DEADLINE = 20.0  # seconds for what should take one

PROGRAM = """
import json, sys
from relay.embedded.supervisor import ProcessSpec, Supervisor

specs = [ProcessSpec(**spec) for spec in json.loads(sys.argv[1])]
calls = 0

def watch():
    global calls
    calls += 1
    if calls == 1:
        raise RuntimeError("the watch fell asleep")
    return [f"watched {calls}"] if calls == 2 else []

sys.exit(Supervisor(specs, watch=watch if "watch" in sys.argv else None).run())
"""
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


class Running:
    """A supervisor in a process of its own, and the lines it has printed."""

    def __init__(self, specs: list[dict[str, Any]], *words: str, read: bool = True) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(specs), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        if read:
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    def read_on(self) -> None:
        """Begin to read."""
        self._reader.start()

    def said(self, text: str, times: int = 1) -> list[str]:
        """Wait until a line with `text` has come that often; the lines."""
        until(lambda: sum(text in line for line in list(self.lines)) >= times)
        return [line for line in self.lines if text in line]

    def stopped(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(DEADLINE)
        if self._reader.ident is not None:
            self._reader.join(DEADLINE)
        return code


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts supervisors, and ends what a failed test leaves."""
    made: list[Running] = []

    def begin(*specs: dict[str, Any], words: tuple[str, ...] = (), read: bool = True) -> Running:
        made.append(Running(list(specs), *words, read=read))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.stopped()
        assert one.process.stdout is not None
        one.process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that will hold, or fail."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def python(name: str, code: str, **options: Any) -> dict[str, Any]:
    """A process that runs Python code."""
    return {"name": name, "argv": [sys.executable, "-u", "-c", code], **options}


def with_pid(code: str) -> str:
    """The code, after it has said its process id."""
    return f"import os; print('pid', os.getpid(), flush=True)\n{code}"


def pids(running: Running, count: int) -> list[int]:
    """The ids that children have said."""
    return [int(line.split()[-1]) for line in running.said("pid ", count)]


def gone(pid: int) -> bool:
    """Whether no process has this id; one that waits for its reaper counts as gone."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_output_comes_behind_names(start: Start) -> None:
    """Both streams of every child are shown, line by line, behind names of one width."""
    code = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(600)"
    running = start(python("api", code), python("worker-1", code))

    for name in ("api     ", "worker-1"):
        running.said(f"{name} | out")
        running.said(f"{name} | err")
    assert running.stopped() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_in_reverse(start: Start, number: signal.Signals) -> None:
    """One signal stops the children last first, each after the one before has ended; the exit code is 0."""
    bye = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.1), print('bye'), sys.exit(0)))\n"
    running = start(*(python(name, bye + SLEEP) for name in ("one", "two", "three")))
    running.said("up", 3)

    assert running.stopped(number) == 0

    last = [line for line in running.lines if "bye" in line or "stopping" in line]
    names = [("relay", "stopping three"), ("three", "bye"), ("relay", "stopping two"), ("two", "bye")]
    names += [("relay", "stopping one"), ("one", "bye")]
    # A child's words pass through its pipe, the supervisor's do not: only the order within each is certain.
    assert [line for line in last if "bye" in line] == [f"{n:<5} | {w}" for n, w in names if w == "bye"]
    assert [line for line in last if "stopping" in line] == [f"{n} | {w}" for n, w in names if w != "bye"]


def test_the_dead_are_started_again(start: Start) -> None:
    """A child that is killed comes back as a new process, after a second, and it is said how it died."""
    running = start(python("worker", with_pid(SLEEP)))
    first = pids(running, 1)[0]
    before = time.monotonic()
    os.kill(first, signal.SIGKILL)

    second = pids(running, 2)[1]

    assert second != first
    assert time.monotonic() - before >= FIRST_PAUSE
    assert "worker died by SIGKILL; it starts again in 1 s" in running.said("died")[0]
    assert running.stopped() == 0
    assert gone(second)


def test_pauses_grow_to_a_limit() -> None:
    """Each restart of a child that dies at once waits twice as long, up to the limit."""
    child = _Child(ProcessSpec(name="x", argv=["true"]))
    child._started = time.monotonic()

    pauses = [child.next_pause() for _ in range(8)]

    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    child._started -= LONGEST_PAUSE
    assert child.next_pause() == FIRST_PAUSE


def test_a_program_that_is_not_there(start: Start) -> None:
    """A program that cannot be started is named and tried again; the others run."""
    running = start({"name": "absent", "argv": ["/no/such/program"]}, python("worker", SLEEP))

    running.said("absent | cannot start /no/such/program: No such file or directory")
    running.said("absent ended with code 121; it starts again in 2 s")
    running.said("worker | up")
    assert running.stopped() == 0


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 1)])
def test_those_that_may_end(start: Start, code: str, expected: int) -> None:
    """When every child has ended for good, the supervisor ends and tells whether they ended well."""
    running = start(python("once", code, restart=False))

    assert running.ended() == expected


def test_a_second_signal_kills_at_once(start: Start) -> None:
    """Who does not want to wait for a deaf child sends a second signal."""
    running = start(python("deaf", with_pid(DEAF)))
    running.said("| deaf")
    pid = pids(running, 1)[0]
    running.process.send_signal(signal.SIGINT)
    running.said("stopping deaf")

    assert running.stopped(signal.SIGINT) == 128 + signal.SIGINT
    assert gone(pid)


def test_a_deaf_child_is_killed_in_time(start: Start) -> None:
    """A child that does not stop within its time is killed, and that is said."""
    running = start(python("deaf", with_pid(DEAF), stop_timeout=0.3))
    running.said("| deaf")
    pid = pids(running, 1)[0]

    assert running.stopped() == 0
    assert gone(pid)
    assert running.said("deaf did not stop in 0.3 s: killed")


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_children_die_with_a_killed_supervisor(start: Start) -> None:
    """Kill -9 of the supervisor leaves no child behind."""
    running = start(python("one", with_pid(SLEEP)), python("two", with_pid(DEAF), death_signal=signal.SIGKILL))
    running.said("| deaf")
    running.said("| up")
    children = pids(running, 2)

    running.process.kill()

    until(lambda: all(gone(pid) for pid in children))


def test_what_a_dead_child_leaves_is_killed(start: Start) -> None:
    """A grandchild that survives its parent is killed before the restart: it may hold the parent's port."""
    code = f"""
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print("pid", grandchild.pid)
time.sleep(600)
"""
    running = start(python("parent", "import os; print('own', os.getpid())" + code))
    running.said("| up")
    grandchild = pids(running, 1)[0]
    os.kill(int(running.said("own")[0].split()[-1]), signal.SIGKILL)

    until(lambda: gone(grandchild))
    assert running.stopped() == 0


def test_a_child_that_closes_its_output_lives(start: Start, tmp_path: Path) -> None:
    """Closed output is no death: the child goes on and is stopped as every other."""
    mark = tmp_path / "stopped"
    code = f"""
import os, signal, sys, time
signal.signal(15, lambda *_: (open({str(mark)!r}, "w").close(), os._exit(0)))
os.close(1); os.close(2)
open({str(tmp_path / "closed")!r}, "w").close()
time.sleep(600)
"""
    running = start(python("quiet", code))
    until((tmp_path / "closed").exists)

    assert running.stopped() == 0
    assert mark.exists()
    assert not [line for line in running.lines if "starts again" in line]


def test_lines_that_are_long_or_unfinished(start: Start) -> None:
    """A line of 300,000 characters comes whole, in pieces; the start of a line comes without its end."""
    code = """
import sys, time
print("x" * 300_000)
sys.stdout.write("password: "); sys.stdout.flush()
time.sleep(600)
"""
    running = start(python("talker", code))

    running.said("talker | password: ")
    pieces = [line for line in running.lines if "| x" in line]
    assert sum(line.count("x") for line in pieces) == 300_000
    assert max(map(len, pieces)) < 40_000
    assert running.stopped() == 0


def test_bytes_that_are_no_text_and_empty_lines(start: Start) -> None:
    """Bytes that are no UTF-8 are shown as such, empty lines stay, carriage returns go."""
    code = r"import sys, time; sys.stdout.buffer.write(b'a\xffb\r\n\nend\n'); sys.stdout.flush(); time.sleep(600)"
    running = start(python("odd", code))

    running.said("| end")
    assert [line for line in running.lines if line.startswith("odd")] == ["odd   | a\ufffdb", "odd   | ", "odd   | end"]
    assert running.stopped() == 0


def test_a_reader_that_stands_still_holds_nobody_up(start: Start, tmp_path: Path) -> None:
    """With nobody reading, a child can write 20 MB and the supervisor can stop; what was dropped is told."""
    mark = tmp_path / "written"
    code = f"""
import time
for _ in range(200_000):
    print("y" * 100)
open({str(mark)!r}, "w").close()
time.sleep(600)
"""
    # Not -u here: 200,000 single writes are slow, and not the point.
    running = start({"name": "loud", "argv": [sys.executable, "-c", code]}, read=False)
    until(mark.exists)

    running.process.send_signal(signal.SIGTERM)
    until(lambda: running.process.poll() is not None)
    assert running.process.returncode == 0
    running.read_on()
    running.ended()
    assert 0 < sum("yyy" in line for line in running.lines) < 200_000


def test_dropped_lines_are_counted() -> None:
    """When a slow reader takes up again, it learns how many lines are missing."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        output = Output(out, ["loud"], colour=False)
        for _ in range(400):
            output.say("loud", "z" * 20_000)
        got: list[str] = []
        with os.fdopen(read) as pipe:
            reader = threading.Thread(target=lambda: got.extend(pipe))
            reader.start()
            until(lambda: any("lines were dropped" in line for line in list(got)))
            output.say("loud", "again")
            output.close()
            out.close()
            reader.join(DEADLINE)

    dropped = next(int(line.split()[1]) for line in got if "were dropped" in line)
    assert dropped + sum("zzz" in line for line in got) == 400
    assert got[-1] == "loud | again\n"


def test_a_reader_that_goes_away_ends_nothing(start: Start) -> None:
    """When the reader closes its end, as `head` does, the children go on."""
    code = with_pid("import time\nwhile True: print('line'); time.sleep(0.01)")
    running = start(python("talker", code), read=False)
    assert running.process.stdout is not None
    pid = int(running.process.stdout.readline().split()[-1])
    running.process.stdout.close()

    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(0.5)
    assert not gone(pid)
    assert running.stopped() == 0


def test_names_are_coloured_on_a_terminal() -> None:
    """With colour each name has its own; without it there are no escape codes."""
    coloured, plain = io.StringIO(), io.StringIO()
    for out, colour in ((coloured, True), (plain, False)):
        output = Output(out, ["a", "b"], colour=colour)
        output.say("a", "1")
        output.say("b", "2")
        output.close()

    assert plain.getvalue() == "a | 1\nb | 2\n"
    first, second = coloured.getvalue().splitlines()
    assert first.startswith("\x1b[36m")
    assert second.startswith("\x1b[33m")


def test_the_watch_is_called_and_may_fail(start: Start) -> None:
    """What the watch returns is said; that it fails is said, and ends nothing."""
    running = start(python("worker", SLEEP), words=("watch",))

    running.said("relay  | the watch fell asleep")
    running.said("relay  | watched 2")
    assert running.stopped() == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads the signals in /proc")
def test_children_have_python_s_signals_undone(start: Start) -> None:
    """A child does not inherit the ignored SIGPIPE of the Python that starts it."""
    argv = ["/bin/sh", "-c", "grep SigIgn /proc/self/status; sleep 99"]
    running = start({"name": "sh", "argv": argv})

    ignored = int(running.said("SigIgn")[0].split()[-1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    assert running.stopped() == 0


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second holder is refused with the first one's process id; the file goes with the lock."""
    with FileLock(tmp_path / "up.lock", "it") as held:
        with pytest.raises(AlreadyHeld, match=rf"process {os.getpid()} .*stop it first"):
            FileLock(tmp_path / "up.lock", "it").acquire()
        assert held.holder() == os.getpid()

    assert list(tmp_path.iterdir()) == []
    with FileLock(tmp_path / "up.lock", "it"):
        pass


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """Kill -9 of the holder frees the lock, though its file stays."""
    code = "import sys, time; from pathlib import Path; from relay.embedded.lock import FileLock\n"
    code += "FileLock(Path(sys.argv[1]), 'it').acquire(); print('held', flush=True); time.sleep(600)"
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    lock = FileLock(path, "it")
    assert not lock.try_acquire()
    assert lock.holder() == holder.pid

    holder.kill()
    holder.wait()
    holder.stdout.close()

    assert path.exists()
    assert lock.try_acquire()
    lock.release()
