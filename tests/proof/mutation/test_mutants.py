"""Mutants: each is one change, none is lost on the way, and wrong ones are killed by a property."""

from __future__ import annotations

import pytest

from proof import worlds
from proof.check import check
from proof.mutation import hunt, mutants
from proof.mutation.mutants import Mutant
from proof.mutation.survivors import ACCEPTED

EVERY = tuple(mutants.mutants())


def test_there_are_many_and_every_source_has_some() -> None:
    assert len(EVERY) > 100
    assert {mutant.source for mutant in EVERY} == set(mutants.SOURCES) - mutants.WHOLE


def test_production_put_together_as_mutants_are_is_production() -> None:
    graph, violation = check(worlds.phases(2, 0, 1), hunt.unmutated())
    assert violation is None
    assert graph.states == check(worlds.phases(2, 0, 1))[0].states


@pytest.mark.parametrize("mutant", EVERY[7::180], ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_a_property_or_known_to_be_harmless(mutant: Mutant) -> None:
    catch = hunt.hunt(mutant)
    assert catch.by or mutant.name in ACCEPTED


def test_every_accepted_survivor_still_exists_and_has_a_reason() -> None:
    names = {mutant.name for mutant in EVERY}
    assert set(ACCEPTED) <= names
    assert all(len(reason) > 10 for reason in ACCEPTED.values())
