"""The hang check on real processes: running, stopped, stuck in the kernel, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aegis_elastic.checks.contract.child_process import Outcome
from aegis_elastic.checks.contract.request import CheckRequest, RankExit
from aegis_elastic.checks.host import hang
from tests.checks.support import compile_c

TRAIN = """
import time

def wait_for_peers():
    print("ready", flush=True) or time.sleep(60)  # on one line: whoever hears "ready" may look at once

wait_for_peers()
"""


def check(rank_pids: dict[int, int], exits: dict[int, RankExit] | None = None) -> Outcome:
    return hang.check(CheckRequest(("hang",), rank_pids=rank_pids, exits=exits or {}), lambda _: None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """`start()`: a training process that waits at line 6 of train.py; killed after the test."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    started: list[subprocess.Popen[str]] = []

    def training() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield training
    for process in started:
        process.kill()
        process.communicate()


def test_no_rank_to_look_at_is_said_and_passes() -> None:
    assert check({}).result == "hang: no live rank on this node to look at"


def test_live_ranks_are_described_by_their_line_and_nothing_happens_to_them(
    start: Callable[[], subprocess.Popen[str]],
) -> None:
    one, two = start(), start()
    outcome = check({4: one.pid, 5: two.pid})
    assert outcome.passed
    assert outcome.result.startswith("hang: 2 live, none frozen: rank 4 at ")
    assert str(outcome.details["rank5"]).endswith("train.py:5 (wait_for_peers)")
    assert one.poll() is None
    assert two.poll() is None


def test_a_stopped_rank_is_frozen_and_its_line_still_read(start: Callable[[], subprocess.Popen[str]]) -> None:
    process = start()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # it goes on for a moment if it runs on another core
    outcome = check({0: process.pid})
    assert (outcome.finding, outcome.scope) == ("hang.frozen", "node")
    assert "rank 0 is stopped (SIGSTOP or a debugger) at " in outcome.result
    assert outcome.result.endswith("train.py:5 (wait_for_peers)")


def test_ended_ranks_are_reported_with_what_is_known_and_are_no_hang(
    start: Callable[[], subprocess.Popen[str]],
) -> None:
    process = start()
    process.kill()
    process.wait()
    exits = {1: RankExit(exit_code=1, exception="ValueError: no"), 2: RankExit(signal="SIGKILL")}
    outcome = check({0: process.pid}, exits)
    assert outcome.passed
    assert outcome.details == {
        "rank0": "ended",
        "rank1": "ended: exit code 1 (ValueError: no)",
        "rank2": "ended: SIGKILL",
    }


def test_a_rank_that_stays_in_the_kernel_is_frozen(compiler: str, tmp_path: Path) -> None:
    # A parent waits for its vfork child in uninterruptible sleep, as a rank on a dead file system does.
    source = tmp_path / "stuck.c"
    source.write_text("#include <unistd.h>\nint main() { if (!vfork()) { pause(); _exit(0); } }\n")
    program = compile_c(compiler, source, tmp_path / "stuck", "-Wno-deprecated-declarations")
    with subprocess.Popen([program], start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text().strip():
            pass  # until it has forked, which takes no longer than a few looks
        child = int(children.read_text())
        try:
            outcome = check({0: process.pid})
        finally:
            subprocess.run(["kill", "-9", str(child)], check=True)
    assert outcome.finding == "hang.frozen"
    assert outcome.result == "hang: rank 0 is stuck in the kernel (D state)"


EVALUATES = """
import time

def batch():
    time.sleep(0.03)

def evaluate():
    print("ready", flush=True)
    while True:
        batch()
        time.sleep(0.1)

evaluate()
"""


def test_of_several_looks_at_a_rank_one_tells_that_it_moves(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    stands = start()
    (tmp_path / "train.py").write_text(EVALUATES)
    pids = {0: stands.pid, 1: start().pid}
    often = hang.check(CheckRequest(("hang",), rank_pids=pids, samples=40), lambda _: None)
    assert often.details["rank1_moves"] is True
    assert "rank0_moves" not in often.details
    assert "rank1_moves" not in check(pids).details, "one look can't know"


def test_a_process_that_is_not_python_is_no_hang() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            outcome = check({0: process.pid})
        finally:
            process.kill()
    assert outcome.passed
    assert "rank 0 at an unknown line: py-spy" in outcome.result


DEADLOCK = """
import os, sys
import torch.distributed as dist

def load_batch():
    print("loading", flush=True)
    sys.stdin.read()

pids = []
for rank in range(3):
    pids.append(os.fork())
    if pids[-1] == 0:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
        if rank == 1:
            load_batch()
        dist.barrier()
        os._exit(0)
print(*pids, flush=True)
for pid in pids:
    os.waitpid(pid, 0)
"""


def test_a_rank_that_does_not_join_a_collective_is_named_with_function_and_line(tmp_path: Path) -> None:
    script = tmp_path / "deadlock.py"
    script.write_text(DEADLOCK)
    # They end with the pipe that rank 1 reads from: its barrier is then the one that the others wait for.
    with subprocess.Popen(
        [sys.executable, script, tmp_path / "store"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        said = sorted([process.stdout.readline().split(), process.stdout.readline().split()], key=len)
        assert said[0] == ["loading"]
        pids = dict(enumerate(map(int, said[1])))
        outcome = check(pids)
        # The barrier is reached a moment after the group is formed; nothing tells from outside.
        while not outcome.result.endswith("in barrier"):
            outcome = check(pids)
        process.stdin.close()
        assert process.wait(20) == 0
    assert outcome.passed  # one look proves no hang
    assert (outcome.details["odd_ranks"], outcome.details["desync"]) == ("1", True)
    assert "odd one out: rank 1 is at " in outcome.result
    assert "deadlock.py:7 (load_batch), while 2 others wait at " in outcome.result
    assert outcome.result.endswith("deadlock.py:16 (<module>) in barrier")
    assert "load_batch@" in str(outcome.details["rank1_stack"])
