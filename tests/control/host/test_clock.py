"""Deadlines and a wall clock that is set."""

from __future__ import annotations

import pytest

from aegis_elastic.control.host.clock import SteadyClock


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_moves_no_deadline_and_is_believed_afterwards(step_s: float) -> None:
    wall, monotonic = [1000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: monotonic[0])
    assert clock.now(waiting=True) == 1000.0
    wall[0] += step_s + 2.0
    monotonic[0] += 2.0
    assert clock.now(waiting=True) == 1002.0
    assert clock.now(waiting=False) == 1002.0 + step_s
    monotonic[0] += 1.0
    assert clock.now(waiting=True) == 1003.0 + step_s
