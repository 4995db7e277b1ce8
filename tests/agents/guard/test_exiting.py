"""A rank that has failed is reported before its interpreter has shut down; others are not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import Exited, GuardClient, RankSpec, Stopped
from aegis_elastic.worker.environment import prepare_env
from tests.agents.processes import ended, next_event, wait_files, wait_stopped

# The end of this interpreter hangs, as NCCL's does, where no Python runs any more.
HANGS = """
import atexit, ctypes, sys
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
class Hangs:
    def __del__(self, libc=libc, mutex=mutex):
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
sys.hangs = Hangs()
left_open = open(sys.argv[1] + "/open.log", "w")
left_open.write("unflushed text")
class Cycle: pass
cycle = Cycle()
cycle.me, cycle.file = cycle, open(sys.argv[1] + "/cycle.log", "w")
cycle.file.write("in a cycle")
atexit.register(lambda: open(sys.argv[1] + "/atexit", "w").write("ran"))
"""


def rank(folder: Path, code: str, *, local_rank: int = 0) -> RankSpec:
    own = folder / str(local_rank)
    own.mkdir(exist_ok=True)
    script = own / "train.py"
    script.write_text(code)
    env = prepare_env({**os.environ, "TORCHELASTIC_ERROR_FILE": str(own / "error.json")})
    argv = (sys.executable, str(script), str(own))
    return RankSpec(local_rank, argv, env, str(own / "out"), str(own / "err"))


def test_an_interpreter_that_hangs_at_its_end_is_reported_and_stopped_like_one_that_ended(
    guard: GuardClient, tmp_path: Path
) -> None:
    pids = guard.spawn(0, [rank(tmp_path, HANGS + 'raise ValueError("the fault")')])
    event = next_event(guard)
    assert isinstance(event, Exited)
    assert (event.exit_code, event.signal, event.first, event.pid) == (1, None, True, pids[0])
    os.kill(pids[0], 0)  # it lives, and has done all that the script does
    folder = tmp_path / "0"
    assert (folder / "atexit").read_text() == "ran"
    assert (folder / "open.log").read_text() == "unflushed text"
    assert (folder / "cycle.log").read_text() == "in a cycle"
    assert (folder / "err").read_text().splitlines()[-1] == "ValueError: the fault"
    began_s = time.monotonic()
    guard.stop(20.0)
    exits, stopped = wait_stopped(guard)
    assert exits == [], "its exit is reported once"
    assert stopped.unkillable == ()
    assert time.monotonic() - began_s < 10.0, "it ends at SIGTERM, whatever the grace"
    assert ended(pids[0])
    guard.spawn(1, [rank(tmp_path, "import sys; sys.exit(3)")])
    last = next_event(guard)
    assert isinstance(last, Exited)
    assert (last.generation, last.exit_code, last.first) == (1, 3, True)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        # what prints an exception and goes on has not failed
        ("import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())", 0),
        ("import threading\nthreading.Thread(target=lambda: 1 / 0).start()", 0),
        ("import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    sys.last_value = e", 0),
        # a forked child's end is not the rank's
        ("import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()", 0),
        # an exit code of its own is reported
        ("import sys\nsys.exit(5)", 5),
        ("import atexit, os\natexit.register(lambda: os._exit(6))\nraise ValueError('x')", 6),
    ],
)
def test_a_rank_that_has_not_failed_or_fails_in_another_way_is_not_reported_early(
    guard: GuardClient, tmp_path: Path, code: str, exit_code: int
) -> None:
    guard.spawn(0, [rank(tmp_path, code)])
    event = next_event(guard)
    assert isinstance(event, Exited)
    assert event.exit_code == exit_code


def test_a_wrapper_that_tries_another_program_after_the_failed_one_has_not_failed(
    guard: GuardClient, tmp_path: Path
) -> None:
    spec = rank(tmp_path, 'raise ValueError("first try")')
    go = tmp_path / "go"
    again = f"{' '.join(spec.argv)}; touch {tmp_path}/tried; while [ ! -e {go} ]; do sleep 0.05; done"
    guard.spawn(0, [spec._replace(argv=("sh", "-c", again))])
    wait_files(tmp_path / "tried")
    assert guard.wait_event(0.5) is None
    go.touch()
    event = next_event(guard)
    assert isinstance(event, Exited)
    assert event.exit_code == 0


def test_touching_an_error_file_reports_nothing(guard: GuardClient, tmp_path: Path) -> None:
    guard.spawn(0, [rank(tmp_path, "import signal; signal.pause()")])
    error_file = tmp_path / "0" / "error.json"
    error_file.write_text("{}")
    os.utime(error_file)
    error_file.chmod(0o600)
    assert guard.wait_event(0.5) is None
    guard.stop(0.0)
    exits, stopped = wait_stopped(guard)
    assert len(exits) == 1
    assert isinstance(stopped, Stopped)
