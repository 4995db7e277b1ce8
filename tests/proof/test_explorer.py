"""The explorer over the production machine: what holds, what is reached, and that it would notice."""

from __future__ import annotations

import msgspec
import pytest

from aegis_elastic.core.events import Event
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Phase, Status
from proof import jobs, worlds
from proof.check import PROPERTIES, check
from proof.explore import PRODUCTION, Machine, explore
from proof.properties import liveness
from proof.worlds import World

NINE = {
    "ValidPhase", "ValidInnerPhase", "RecoverCountBound", "RetriesBound", "PhaseConsistency",
    "NoFinishDoubleProcessed", "MasterSeqNumMonotonic", "WorkerSeqNumBound", "StaleFinishRejected",
}  # fmt: skip


def altered(change: str) -> Machine:
    """Production with one thing done wrongly from outside, so that a property has something to find."""

    def step(s: Status, event: Event, now: float) -> Transition:
        moved = PRODUCTION.step(s, event, now)
        if change == "counts twice" and moved.name == "error":
            twice = msgspec.structs.replace(moved.status, recover_count=moved.status.recover_count + 1)
            return moved._replace(status=twice)
        if change == "no order" and moved.name == "ready":
            return moved._replace(effects=())
        if change == "forgets to end" and moved.name == "quit":
            return moved._replace(status=s)
        return moved

    return PRODUCTION._replace(step=step)


def test_the_nine_and_many_more_properties_have_a_name() -> None:
    assert set(PROPERTIES) >= NINE
    assert len(set(PROPERTIES) - NINE) >= 16
    assert len(liveness.PROMISES) >= 6


@pytest.mark.parametrize("world", [worlds.phases(2, 1), *worlds.SMALL[:20]], ids=lambda world: world.name)
def test_every_property_holds_in_a_small_world(world: World) -> None:
    _, violation = check(world)
    assert violation is None


def test_a_promise_is_kept_and_is_owed_somewhere() -> None:
    graph = explore(worlds.phases(2, 1))
    for promise in liveness.PROMISES:
        outcome = liveness.judge(graph, promise)
        assert outcome.refuted is None
        assert outcome.owed > 0


@pytest.mark.parametrize(
    ("change", "caught_by"), [("counts twice", "MaxAgrees"), ("no order", "MasterSeqNumMonotonic")]
)
def test_a_wrong_step_is_noticed_with_the_way_that_leads_there(change: str, caught_by: str) -> None:
    _, violation = check(worlds.phases(2, 1), altered(change))
    assert violation is not None
    assert violation.name in (caught_by, "RecoverCountBound", "OneBump")
    assert violation.trace[0].startswith("Pending")


def test_a_promise_that_is_broken_is_refuted_by_a_trap() -> None:
    graph = explore(worlds.phases(2, 0, 1), altered("forgets to end"))
    quits = next(promise for promise in liveness.PROMISES if promise.name == "QuitIsObeyed")
    refuted = liveness.judge(graph, quits).refuted
    assert refuted is not None
    assert "quit" in refuted.trace[-1]


def test_a_machine_that_grows_without_bound_is_stopped() -> None:
    _, violation = check(worlds.phases(2, 1), limit=100)
    assert violation is not None
    assert violation.name == "Finite"


def test_symmetry_of_workers_is_real() -> None:
    """Every status of two workers is reached with the workers exchanged, too: nobody is preferred."""
    known = explore(worlds.phases(2, 1)).parent
    shapes = {worlds.shape(s) for s in known}
    assert {worlds.shape(msgspec.structs.replace(s, workers=s.workers[::-1])) for s in known} == shapes


def test_what_the_worlds_must_reach_names_every_phase_and_rule() -> None:
    wanted = jobs.expected_witnesses()
    assert {phase.value for phase in Phase} <= wanted
    assert "exceeded in Troubleshooting" in wanted
