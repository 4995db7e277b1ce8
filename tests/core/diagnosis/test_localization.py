"""Localisation in simulated worlds: exact where it can be, in few rounds, and nobody blamed on a guess."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis.localization import (
    Fault,
    Group,
    Localization,
    Tried,
    pair_rounds,
    plan,
    rounds_max,
)

SEED = int(os.environ.get("AEGIS_SEED", "1"))
Passes = Callable[[Group], bool]


def with_faults(*faults: Fault) -> Passes:
    """The world of the model: a group passes exactly if it holds no broken node and no broken link."""
    return lambda group: not any(set(fault) <= set(group) for fault in faults)


def localise(nodes: int, passes: Passes, faults_max: int = 2) -> tuple[Localization, list[Tried]]:
    """Run the plan against a world; every round must be one that machines can run."""
    history: list[Tried] = []
    while not isinstance(wanted := plan(nodes, history, faults_max), Localization):
        busy = [node for group in wanted for node in group]
        assert busy and len(busy) == len(set(busy)), "groups of a round are disjoint"
        assert set(busy) <= set(range(nodes))
        assert all(len(group) >= 2 and list(group) == sorted(group) for group in wanted)
        history.append(Tried(wanted, tuple(map(passes, wanted))))
    assert wanted.rounds == len(history)
    return wanted, history


def named(verdict: Localization) -> set[Fault]:
    return {(node,) for node in verdict.nodes} | set(verdict.links)


def all_faults(nodes: int) -> list[Fault]:
    return [(node,) for node in range(nodes)] + list(combinations(range(nodes), 2))


def expect_exact(nodes: int, faults: Iterable[Fault], faults_max: int = 2) -> int:
    faults = set(faults)
    verdict, _ = localise(nodes, with_faults(*faults), faults_max)
    assert named(verdict) == faults, (nodes, faults, verdict)
    assert verdict.conclusive and not verdict.ambiguous
    links = sum(len(fault) == 2 for fault in faults)
    assert verdict.rounds <= rounds_max(nodes, faults_max, links), (nodes, faults, verdict)
    return verdict.rounds


# The dumb twin: with the results of *all* pairs known, try every set of faults there is.


@cache
def twin(nodes: int, faults_max: int) -> dict[frozenset[Fault], list[frozenset[Fault]]]:
    """Failing pairs -> every set of at most `faults_max` faults that makes exactly these fail."""
    by_failing: dict[frozenset[Fault], list[frozenset[Fault]]] = {}
    for count in range(faults_max + 1):
        for faults in combinations(all_faults(nodes), count):
            by_failing.setdefault(failing_pairs(nodes, faults), []).append(frozenset(faults))
    return by_failing


def failing_pairs(nodes: int, faults: Iterable[Fault]) -> frozenset[Fault]:
    passes = with_faults(*faults)
    return frozenset(pair for pair in combinations(range(nodes), 2) if not passes(pair))


def check_against_twin(nodes: int, faults: tuple[Fault, ...], faults_max: int) -> None:
    fit_report = twin(nodes, faults_max)[failing_pairs(nodes, faults)]
    minimal = {each for each in fit_report if not any(other < each for other in fit_report)}
    certain = frozenset.intersection(*fit_report)
    verdict, _ = localise(nodes, with_faults(*faults), faults_max)
    assert verdict.conclusive, (faults, verdict)
    assert named(verdict) == certain, (faults, verdict)
    left = {each - certain for each in minimal if each != certain}
    assert set(map(frozenset, verdict.ambiguous)) == left, (faults, verdict)
    assert verdict.rounds <= rounds_max(nodes, faults_max)


@pytest.mark.parametrize("nodes", range(2, 9))
@pytest.mark.parametrize("faults_max", [1, 2])
def test_every_set_of_faults_in_a_small_world_comes_out_as_the_twin_says(nodes: int, faults_max: int) -> None:
    for count in range(faults_max + 1):
        for faults in combinations(all_faults(nodes), count):
            check_against_twin(nodes, faults, faults_max)


@pytest.mark.full
@pytest.mark.parametrize("nodes", [9, 10, 11, 12, 13])
def test_every_set_of_two_faults_in_a_middling_world_comes_out_as_the_twin_says(nodes: int) -> None:
    for faults in combinations(all_faults(nodes), 2):
        check_against_twin(nodes, faults, 2)


@given(st.data())
def test_three_faults_of_any_kind_come_out_as_the_twin_says(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, 7))
    faults = data.draw(st.lists(st.sampled_from(all_faults(nodes)), max_size=3, unique=True))
    check_against_twin(nodes, tuple(faults), 3)


# Large worlds: there is nothing ambiguous in them, so the faults themselves must come out.


def sizes(small: Iterable[int]) -> list[object]:
    """All of 4 to 64 in `make full`, some always. Among three nodes a broken one looks like two links."""
    some = set(small)
    return [pytest.param(n, marks=() if n in some else pytest.mark.full) for n in range(4, 65)]


@pytest.mark.parametrize("nodes", sizes([4, 5, 9, 10, 11, 16, 33, 64]))
def test_every_single_broken_node_is_found(nodes: int) -> None:
    for node in range(nodes):
        assert expect_exact(nodes, [(node,)]) <= (6 if nodes >= 10 else rounds_max(nodes))


@pytest.mark.parametrize("nodes", sizes([4, 5, 9, 10, 11, 16, 33, 64]))
def test_two_broken_nodes_are_found(nodes: int) -> None:
    for pair in sampled(combinations(range(nodes), 2), 60):
        assert expect_exact(nodes, [(node,) for node in pair]) <= (6 if nodes >= 10 else rounds_max(nodes))


@pytest.mark.parametrize("nodes", sizes([4, 5, 9, 10, 11, 16, 33, 64]))
def test_every_single_broken_link_is_found_and_no_node_blamed(nodes: int) -> None:
    for link in sampled(combinations(range(nodes), 2), 60):
        expect_exact(nodes, [link])


def sampled(everything: Iterator[Fault], count: int) -> list[Fault]:
    """All of it in `make full`, else some, the same ones in every run."""
    cases = list(everything)
    if "AEGIS_SEED" in os.environ:
        return cases
    return random.Random(SEED).sample(cases, min(count, len(cases)))


@given(st.data())
def test_any_faults_in_a_large_world_are_found_within_the_bound(data: st.DataObject) -> None:
    faults_max = data.draw(st.integers(1, 4))
    nodes = data.draw(st.integers(4 * faults_max + 2, 64))
    anywhere = st.lists(st.integers(0, nodes - 1), min_size=1, max_size=2, unique=True)
    drawn = data.draw(st.lists(anywhere, max_size=faults_max))
    faults = {tuple(sorted(each)) for each in drawn}
    # A broken link at a broken node can't be seen, and need not.
    broken = {fault for fault in faults if len(fault) == 1}
    seen = broken | {fault for fault in faults if not any(set(node) <= set(fault) for node in broken)}
    verdict, _ = localise(nodes, with_faults(*faults), faults_max)
    assert named(verdict) == seen, verdict
    links = len(seen - broken)
    assert verdict.rounds <= rounds_max(nodes, faults_max, links)


def test_the_bound_does_not_grow_with_the_nodes_when_nodes_are_broken() -> None:
    assert rounds_max(64, 2, links=0) == rounds_max(100_000, 2, links=0) == 6
    assert rounds_max(64, 2, links=1) == 21
    assert expect_exact(2000, [(77,), (1500,)]) <= 6


# Nobody is blamed on a guess.


def test_a_healthy_world_is_one_round() -> None:
    for nodes in (2, 3, 10, 64):
        verdict, history = localise(nodes, with_faults())
        assert verdict.healthy and len(history) == 1


def test_of_two_nodes_that_fail_together_nobody_is_blamed() -> None:
    verdict, _ = localise(2, with_faults((1,)))
    assert not verdict.nodes and not verdict.links
    assert verdict.ambiguous == (((0,),), ((0, 1),), ((1,),))


def test_three_nodes_tell_a_broken_one_from_two_broken_links_only_if_one_fault_is_all_there_can_be() -> None:
    verdict, _ = localise(3, with_faults((0,)), faults_max=2)
    assert not verdict.nodes
    assert verdict.ambiguous == (((0,),), ((0, 1), (0, 2)))
    assert localise(3, with_faults((0,)), faults_max=1)[0].nodes == (0,)


def test_a_healthy_node_that_meets_a_broken_one_twice_is_not_blamed() -> None:
    # Of four nodes 0 and 1 are broken: 2 and 3 fail with each of them, and pass with each other.
    verdict, history = localise(4, with_faults((0,), (1,)))
    meetings = [pair for tested in history for pair in tested.groups if len(pair) == 2 and 2 in pair]
    assert {(0, 2), (1, 2)} <= set(meetings)
    assert verdict.nodes == (0, 1) and not verdict.links


@given(st.integers(2, 40), st.integers(1, 3), st.data())
def test_whatever_the_results_are_nobody_who_passed_is_blamed(
    nodes: int, k: int, data: st.DataObject
) -> None:
    """Failures that come and go, more faults than allowed for: the verdict ends and stays careful."""
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    verdict, history = localise(nodes, lambda group: dice.random() > share, k)
    passing = {node for tested in history for group in both(tested, True) for node in group}
    together = {pair for tested in history for group in both(tested, True) for pair in combinations(group, 2)}
    assert not passing & set(verdict.nodes)
    assert not together & set(verdict.links)
    failed = {group for tested in history for group in both(tested, False)}
    assert set(verdict.links) <= failed
    assert len(named(verdict)) <= k


def both(tested: Tried, passed: bool) -> list[Group]:
    return [group for group, good in zip(tested.groups, tested.passed, strict=True) if good is passed]


def test_more_faults_than_there_can_be_are_said_and_nobody_is_named() -> None:
    verdict, _ = localise(20, with_faults(*[(node,) for node in range(0, 20, 3)]))
    assert not verdict.conclusive and not named(verdict)
    assert "more than 2 faults" in verdict.reason


@pytest.mark.parametrize("nodes", [3, 4, 9, 10, 33, 64])
def test_a_failure_that_does_not_repeat_names_nobody(nodes: int) -> None:
    world = tuple(range(nodes))
    verdict, history = localise(nodes, lambda group: group != world)
    assert not verdict.conclusive and not verdict.healthy and not named(verdict)
    assert len(history) <= rounds_max(nodes, 2, 1)


def test_a_history_that_was_not_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="round 1 of the history"):
        plan(4, [Tried(((0, 1),), (True,))])
    with pytest.raises(ValueError, match="at least 2 and 1"):
        plan(1, [])


# The circle method.


@given(st.integers(0, 40), st.integers(0, 50))
def test_rounds_are_disjoint_and_no_pair_meets_twice(nodes: int, rounds: int) -> None:
    found = pair_rounds(nodes, rounds)
    assert len(found) <= rounds
    for pairs in found:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        assert len(pairs) == nodes // 2
    met = [pair for pairs in found for pair in pairs]
    assert len(met) == len(set(met))


@given(st.integers(2, 30))
def test_with_enough_rounds_everybody_meets_everybody(nodes: int) -> None:
    met = {pair for pairs in pair_rounds(nodes, nodes) for pair in pairs}
    assert met == {(a, b) for a in range(nodes) for b in range(a + 1, nodes)}
