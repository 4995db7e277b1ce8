"""What looks at a rank's stack add up to: standing, moving, waiting for others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.rank_view import RankView
from aegis_elastic.core.stacks import Frame, Stack

STEP = Frame("step", "train.py", 40)
LOOPS: Stack = (Frame("spin", "train.py", 12), STEP)
EVALUATES: Stack = (Frame("forward", "model.py", 7), Frame("evaluate", "train.py", 55))
WAITS: Stack = (Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 2000), STEP)


@pytest.fixture
def view(tmp_path: Path) -> RankView:
    return RankView(0, os.getpid(), tmp_path / "none")


def steady(view: RankView, *looks: Stack, moves: bool = False) -> list[int]:
    found = []
    for stack in looks:
        view.stands(stack, moves)
        found.append(view.facts(time.monotonic()).steady)
    return found


def test_who_is_at_one_place_at_every_look_stands_there(view: RankView) -> None:
    assert steady(view, LOOPS, LOOPS, LOOPS) == [1, 2, 3]
    assert steady(view, (Frame("spin", "train.py", 13), STEP)) == [4], "a loop has several lines"


def test_a_stack_that_cant_be_read_shows_nothing(view: RankView) -> None:
    assert steady(view, LOOPS, (), LOOPS) == [1, 0, 1]


def test_who_has_moved_once_is_at_work_until_its_next_step(view: RankView) -> None:
    assert steady(view, LOOPS, EVALUATES, EVALUATES, EVALUATES) == [1, 0, 0, 0]


def test_a_move_between_two_snapshots_of_one_look_is_one(view: RankView) -> None:
    assert steady(view, LOOPS, moves=True) == [0]
    assert steady(view, LOOPS, LOOPS) == [0, 0]


def test_who_comes_to_wait_for_others_waits_from_then_on(view: RankView) -> None:
    assert steady(view, LOOPS, EVALUATES, WAITS, WAITS, WAITS) == [1, 0, 0, 1, 2]
