"""Pairs and comparisons: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.checks.peers import pair_rounds, slow_nodes


@given(st.integers(0, 40), st.integers(0, 50))
def test_rounds_are_disjoint_and_no_pair_meets_twice(nodes: int, rounds_max: int) -> None:
    rounds = pair_rounds(nodes, rounds_max)
    assert len(rounds) <= rounds_max
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        assert len(pairs) == nodes // 2
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))


@given(st.integers(2, 30))
def test_with_enough_rounds_everybody_meets_everybody(nodes: int) -> None:
    met = {pair for pairs in pair_rounds(nodes, nodes) for pair in pairs}
    assert met == {(a, b) for a in range(nodes) for b in range(a + 1, nodes)}


def test_a_node_that_is_slow_with_everybody_is_named_with_its_factor() -> None:
    assert slow_nodes({0: 10.0, 1: 10.0, 2: 4.0}, 2.0) == {2: 2.5}


def test_two_nodes_are_too_few_to_call_one_slow() -> None:
    assert slow_nodes({0: 10.0, 1: 0.1}, 2.0) == {}


@given(st.lists(st.floats(0.8, 1.2), min_size=3, max_size=64))
def test_nobody_is_named_in_ordinary_noise(bandwidths: list[float]) -> None:
    assert slow_nodes(dict(enumerate(bandwidths)), 2.0) == {}


def test_a_node_that_moves_nothing_is_infinitely_slow() -> None:
    assert slow_nodes({0: 5.0, 1: 5.0, 2: 0.0}, 2.0) == {2: float("inf")}
