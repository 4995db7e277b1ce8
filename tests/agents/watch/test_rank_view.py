"""What several readings of a rank's stack show: it stays, moves, or waits for others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.watch.rank_view import RankView
from aegis_elastic.core.detection.stacks import Frame, Stack

STEP = Frame("step", "train.py", 40)
LOOPS: Stack = (Frame("spin", "train.py", 12), STEP)
EVALUATES: Stack = (Frame("forward", "model.py", 7), Frame("evaluate", "train.py", 55))
WAITS: Stack = (Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 2000), STEP)


@pytest.fixture
def view(tmp_path: Path) -> RankView:
    return RankView(0, os.getpid(), tmp_path / "none")


def steady(view: RankView, *readings: Stack, moves: bool = False) -> list[int]:
    found = []
    for stack in readings:
        view.on_stack(stack, moves)
        found.append(view.facts(time.monotonic()).steady)
    return found


def test_a_rank_that_is_at_one_place_in_every_reading_is_steady(view: RankView) -> None:
    assert steady(view, LOOPS, LOOPS, LOOPS) == [1, 2, 3]
    assert steady(view, (Frame("spin", "train.py", 13), STEP)) == [4], "a loop has several lines"


def test_a_stack_that_cant_be_read_shows_nothing(view: RankView) -> None:
    assert steady(view, LOOPS, (), LOOPS) == [1, 0, 1]


def test_a_rank_that_has_moved_once_is_at_work_until_its_next_step(view: RankView) -> None:
    assert steady(view, LOOPS, EVALUATES, EVALUATES, EVALUATES) == [1, 0, 0, 0]


def test_a_move_between_two_snapshots_of_one_reading_is_one(view: RankView) -> None:
    assert steady(view, LOOPS, moves=True) == [0]
    assert steady(view, LOOPS, LOOPS) == [0, 0]


def test_a_rank_that_comes_to_wait_for_others_waits_from_then_on(view: RankView) -> None:
    assert steady(view, LOOPS, EVALUATES, WAITS, WAITS, WAITS) == [1, 0, 0, 1, 2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("nap", "held"), [("pause()", True), ("usleep(30000)", False)])
def test_a_process_in_the_kernel_every_time_is_held_there_unless_it_wakes_in_between(
    tmp_path: Path, nap: str, held: bool
) -> None:
    # A parent waits for its vfork child in uninterruptible sleep, as for a file server.
    source, program = tmp_path / "d.c", tmp_path / "d"
    source.write_text(
        f"#include <unistd.h>\nint main() {{ for (;;) if (!vfork()) {{ {nap}; _exit(0); }} }}\n"
    )
    subprocess.run(["cc", "-w", "-o", program, source], check=True)
    with subprocess.Popen([program], start_new_session=True) as process:
        try:
            view = RankView(0, process.pid, tmp_path / "none")
            seen = []
            for _ in range(20):
                time.sleep(0.05)
                view.update(time.monotonic())
                seen.append(view.facts(time.monotonic()).state)
            assert seen.count("D") > 10
            assert (view.stopped(time.monotonic()) > 0.5) is held
        finally:
            os.killpg(process.pid, signal.SIGKILL)
