"""Nothing of a rank outlives its guard or launcher, and what can't be killed blocks nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import Exited, GuardClient, GuardDied, GuardError, SpawnError, Stopped
from tests.agents.processes import (
    PATIENCE_S,
    STUBBORN,
    ended,
    next_event,
    parent_of,
    python,
    rank,
    stubborn,
    wait_family,
    wait_files,
    wait_stopped,
)


def test_what_a_finished_rank_left_behind_lives_until_the_stop(guard: GuardClient, tmp_path: Path) -> None:
    left = tmp_path / "left"
    guard.spawn(0, [rank(0, "sh", "-c", f"setsid sh -c 'echo $$ > {left}; exec sleep 100' & sleep 0.2")])
    assert isinstance(next_event(guard), Exited)
    pid = int(wait_files(left)[0])
    assert parent_of(pid) == guard.pid, "the sub-reaper has adopted it"
    assert guard.wait_event(0.1) is None
    guard.stop(grace_s=PATIENCE_S)
    assert wait_stopped(guard) == ([], Stopped(0, (pid,), ()))


def test_a_process_that_survives_sigkill_is_reported_and_blocks_nothing(tmp_path: Path) -> None:
    """In place of uninterruptible sleep: a corpse that a foreign tracer holds. SIGKILL does nothing to it."""
    tracer_code = (
        "import ctypes, os, sys, signal\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0, os.strerror(ctypes.get_errno())\n"
        "print('seized', flush=True)\n"
        "sys.stdin.read()"
    )
    allow = (
        "import ctypes, signal; ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1)); print(flush=True)\n"
    )
    ready = tmp_path / "ready"
    guard = GuardClient.start("test-job", kill_wait_s=0.4)
    tracer = None
    try:
        pids = guard.spawn(
            0, [rank(0, *python(allow + "signal.pause()"), stdout=str(ready)), rank(1, "sleep", "9")]
        )
        wait_files(ready)
        while not ready.read_text():
            time.sleep(0.005)
        command = [sys.executable, "-S", "-c", tracer_code, str(pids[0])]
        tracer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == "seized\n"
        guard.stop(grace_s=0)
        exits, stopped = wait_stopped(guard)
        assert stopped.unkillable == (pids[0],)
        assert [e.local_rank for e in exits] == [1]
        assert guard.spawn(1, [rank(0, "sh", "-c", "exit 4")]), "the next generation can start"
        event = next_event(guard)
        assert isinstance(event, Exited)
        assert (event.generation, event.exit_code, event.first) == (1, 4, True)
        tracer.communicate(timeout=PATIENCE_S)  # lets go
        event = next_event(guard)
        assert isinstance(event, Exited)
        assert (event.generation, event.pid, event.signal, event.first) == (0, pids[0], signal.SIGKILL, False)
    finally:
        if tracer is not None:
            tracer.kill()
            tracer.communicate()
        guard.close()


LAUNCHER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from aegis_elastic.agents.guard.client import GuardClient, RankSpec
guard = GuardClient.start("orphan-test")
argv = (sys.executable, "-S", "-c", sys.argv[3])
guard.spawn(0, [RankSpec(i, (*argv, f"{sys.argv[2]}/{i}"), dict(os.environ), "", "") for i in (0, 1)])
helper = os.fork()  # keeps the guard's socket open: the launcher's death must show all the same
if helper:
    print(guard.pid, helper, flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_nothing_outlives_a_launcher_however_it_dies(tmp_path: Path, signum: signal.Signals) -> None:
    for i in range(2):
        (tmp_path / str(i)).mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(Path(__file__).parents[3]), str(tmp_path), STUBBORN]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    guard_pid, helper_pid = (int(word) for word in launcher.stdout.readline().split())
    try:
        family = [pid for i in range(2) for pid in wait_family(tmp_path / str(i))]
        launcher.send_signal(signum)
        assert launcher.wait(PATIENCE_S) == -signum
        assert ended(guard_pid)
        assert all(ended(pid) for pid in family)
    finally:
        os.kill(helper_pid, signal.SIGKILL)
        launcher.stdout.close()


def test_when_the_guard_is_killed_the_ranks_die_and_the_launcher_gets_an_event(guard: GuardClient) -> None:
    pids = guard.spawn(0, [rank(i, "sh", "-c", "trap '' TERM; while :; do sleep 1; done") for i in range(2)])
    os.kill(guard.pid, signal.SIGKILL)
    assert next_event(guard) == GuardDied(None, signal.SIGKILL)
    assert all(ended(pid) for pid in pids.values())
    guard.stop(1.0)
    assert guard.events() == []
    with pytest.raises(GuardError, match="it has ended"):
        guard.spawn(1, [rank(0, "true")])


def test_close_kills_everything_and_reaps_the_guard(tmp_path: Path) -> None:
    guard = GuardClient.start("test-job")
    guard.spawn(0, [stubborn(0, tmp_path / "0")])
    family = wait_family(tmp_path / "0")
    guard.close()
    guard.close()
    assert all(ended(pid) for pid in family)
    with pytest.raises(ChildProcessError):
        os.waitpid(guard.pid, os.WNOHANG)


def test_many_rounds_leak_no_descriptor_and_no_child(guard: GuardClient) -> None:
    def counts() -> tuple[int, int, str]:
        children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text()
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{guard.pid}/fd")), children

    before = counts()
    for generation in range(20):
        guard.spawn(generation, [rank(0, "sleep", "100"), rank(1, "sh", "-c", "sleep 50 & sleep 51")])
        guard.stop(grace_s=PATIENCE_S)
        exits, _ = wait_stopped(guard)
        assert len(exits) == 2
        with contextlib.suppress(SpawnError):
            guard.spawn(generation, [rank(0, "sleep", "100"), rank(1, "no-such-program")])
    assert counts() == before
