"""The figures of the recovery benchmark: parts that add up, and no figure for a recovery that never was."""

from __future__ import annotations

import pytest

from benchmarks.recovery import Stamp, parts_of

FIRST_LIFE = [Stamp(0, "fault", 10.0), Stamp(0, "stopped", 10.1), Stamp(0, "stopped", 10.3)]


def second_life(rank_delay_s: float) -> list[Stamp]:
    ends = {"start": 10.5, "main": 10.6, "imported": 12.0, "group": 12.5, "step": 12.6}
    return [Stamp(1, what, at + rank_delay_s) for what, at in ends.items()]


def test_each_part_ends_with_the_last_rank_and_all_add_up() -> None:
    parts = parts_of([*FIRST_LIFE, *second_life(0.0), *second_life(0.2)], ranks=2)
    assert parts == pytest.approx((0.1, 0.2, 0.4, 1.5, 0.5, 0.1, 2.8))
    assert sum(parts[:-1]) == pytest.approx(parts.total_s)


def test_processes_held_ready_before_the_fault_make_no_negative_part() -> None:
    ends = {"start": 5.0, "imported": 6.0, "group": 10.4, "step": 10.5}
    held = [Stamp(1, what, at) for what, at in ends.items()]
    parts = parts_of([*FIRST_LIFE, *held], ranks=1)
    assert (parts.restart_s, parts.import_s) == (0.0, 0.0)
    assert parts.total_s == pytest.approx(0.5)


def test_a_rank_that_never_came_back_is_an_error_not_a_figure() -> None:
    with pytest.raises(ValueError, match="1 of 2 ranks reached 'start'"):
        parts_of([*FIRST_LIFE, *second_life(0.0)], ranks=2)
