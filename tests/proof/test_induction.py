"""Induction: every limit at once; and the relation that it is about is the production step."""

from __future__ import annotations

import pytest
import z3

from proof import induction, worlds
from proof.explore import explore


@pytest.mark.parametrize("workers", [2, 3])
def test_the_invariants_are_inductive_for_every_limit(workers: int) -> None:
    proof = induction.prove(workers)
    assert proof.failed == ()
    assert proof.obligations > 200


def test_the_relation_is_the_production_step() -> None:
    graph = explore(worlds.phases(2, 0, 1))
    assert induction.faithful(graph) == []


def test_a_relation_that_differs_by_one_edge_is_noticed() -> None:
    graph = explore(worlds.phases(2, 0, 1))
    status = next(s for s, out in graph.edges.items() if any(t != s for _, _, t in out))
    graph.edges = {status: [(m, n, t) for m, n, t in graph.edges[status] if t == status]}
    assert len(induction.faithful(graph)) == 1


def test_a_wrong_invariant_is_refuted() -> None:
    r = induction.relation(2)
    solver = z3.Solver()
    solver.add(r.limit >= 0, *induction.invariants(r, r.before).values(), z3.Or(list(r.actions.values())))
    solver.add(r.after.count > 1)
    assert solver.check() == z3.sat
