"""Who is slow: seeded worlds with the noise of real networks. Nobody is named for weather or a partner."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis.outliers import (
    FEW_PARTNERS_MEASUREMENTS,
    PARTNERS_MAX,
    Exchange,
    schedule,
    slow_nodes,
)

SEED = int(os.environ.get("AEGIS_SEED", "1"))
FACTOR = 1.1
SIZES = [3, 4, 5, 8, 9, 16, 64]


def measured(
    nodes: int, dice: random.Random, slow: Mapping[int, float] | None = None, jitter: float = 0.06
) -> list[Exchange]:
    """One check's measurements, each the median of five exchanges, as the check takes them.

    Noise: lognormal jitter, one exchange in fifty a spike of two to ten times, a common factor for each turn
    and one turn in ten three times slower for everybody. `slow`: node to how many times longer it takes.
    """
    slow = slow or {}
    weather: dict[int, float] = {}
    found = []
    for turn, pairs in schedule(nodes):
        if turn not in weather:
            weather[turn] = dice.lognormvariate(0, 0.2) * (3 if dice.random() < 0.1 else 1)
        for a, b in pairs:
            took = weather[turn] * max(slow.get(a, 1.0), slow.get(b, 1.0)) * 1e-3
            times = [took * dice.lognormvariate(0, jitter) * spike(dice) for _ in range(5)]
            found.append(Exchange(turn, (a, b), statistics.median(times)))
    return found


def spike(dice: random.Random) -> float:
    return dice.uniform(2, 10) if dice.random() < 0.02 else 1.0


@pytest.mark.parametrize("nodes", SIZES)
def test_nobody_is_named_in_200_healthy_checks(nodes: int) -> None:
    dice = random.Random(f"{SEED} healthy {nodes}")
    named = [found for _ in range(200) if (found := slow_nodes(measured(nodes, dice), FACTOR))]
    assert not named


@pytest.mark.parametrize("jitter", [0.02, 0.2, 0.5])
def test_nobody_is_named_whatever_the_jitter(jitter: float) -> None:
    dice = random.Random(f"{SEED} jitter {jitter}")
    for nodes in (3, 4, 8, 16):
        for _ in range(50):
            assert slow_nodes(measured(nodes, dice, jitter=jitter), FACTOR) == {}


@pytest.mark.parametrize("nodes", SIZES)
def test_a_node_that_is_20_percent_slower_is_named_with_its_factor_and_nobody_else(nodes: int) -> None:
    dice = random.Random(f"{SEED} slow {nodes}")
    found = 0
    for _ in range(50):
        node = dice.randrange(nodes)
        named = slow_nodes(measured(nodes, dice, {node: 1.25}), FACTOR)
        assert set(named) <= {node}
        found += node in named
        assert math.isclose(named.get(node, 1.25), 1.25, rel_tol=0.1)
    # Where noise hides it, it is not named this time; a slow node stays slow, and the next check will.
    assert found >= 48


def test_two_slow_nodes_of_eight_are_both_named_and_no_partner_of_theirs() -> None:
    dice = random.Random(f"{SEED} two")
    for _ in range(50):
        first, second = dice.sample(range(8), 2)
        named = slow_nodes(measured(8, dice, {first: 1.5, second: 3.0}), FACTOR)
        assert set(named) == {first, second}


def test_machines_of_two_kinds_are_uneven_and_not_slow() -> None:
    dice = random.Random(f"{SEED} kinds")
    for _ in range(20):
        assert slow_nodes(measured(16, dice, dict.fromkeys(range(6), 1.3)), FACTOR) == {}


def test_two_nodes_are_too_few_to_call_one_slow() -> None:
    assert slow_nodes([Exchange(0, (0, 1), 9.0)], FACTOR) == {}
    assert schedule(2) == []


def test_a_factor_that_would_name_healthy_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="above 1"):
        slow_nodes([], 1.0)


@given(st.integers(3, 40))
def test_every_node_is_measured_often_enough_with_different_partners(nodes: int) -> None:
    rounds = schedule(nodes)
    for node in range(nodes):
        met = [pair for _, pairs in rounds for pair in pairs if node in pair]
        assert len(met) >= (PARTNERS_MAX - 1 if nodes > PARTNERS_MAX else FEW_PARTNERS_MEASUREMENTS)
        assert len(set(met)) == min(len(met), nodes - 1)
    for _, pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
