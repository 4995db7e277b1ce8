"""Hunting mutants: is every wrong version of the machine noticed by a property?

A mutant is killed by the first property that it breaks in one of the small worlds, by a promise it no longer
keeps, by growing without bound, or by raising. No mutant is compared with production: a survivor either
behaves the same in everything that matters, or shows a property that is missing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import NamedTuple

from proof import worlds
from proof.check import check
from proof.explore import Graph, Machine
from proof.mutation import mutants
from proof.mutation.mutants import Mutant
from proof.properties import liveness

# Production has at most a few thousand states in each of these worlds.
_STATES_MAX = 60_000
_PROMISED = {"phases 2/1": liveness.PROMISES, "small shrinking": liveness.ABSENCE}


class Catch(NamedTuple):
    """What became of a mutant: the property that killed it and in which world, or "" if it survived."""

    mutant: Mutant
    by: str
    world: str


def hunt(mutant: Mutant) -> Catch:
    """Try one mutant in every small world until something notices it."""
    try:
        machine = mutants.build(mutant)
    except Exception as error:  # noqa: BLE001 - a mutant may fail in any way, and failing is being noticed
        return Catch(mutant, type(error).__name__, "building")
    for world in worlds.SMALL:
        try:
            graph, violation = check(world, machine, limit=_STATES_MAX)
            broken = violation.name if violation else _unkept(graph, world.name)
        except Exception as error:  # noqa: BLE001 - as above: it crashed, so it was noticed
            broken = type(error).__name__
        if broken:
            return Catch(mutant, broken, world.name)
    return Catch(mutant, "", "")


def _unkept(graph: Graph, world: str) -> str:
    for promise in _PROMISED.get(world, ()):
        if liveness.judge(graph, promise).refuted:
            return promise.name
    return ""


def hunt_all(chosen: list[Mutant], processes: int) -> Iterator[Catch]:
    """Hunt them all, in that many processes, results as they come. The processes end with the iterator."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(hunt, chosen, chunksize=4)


def unmutated() -> Machine:
    """Production taken apart and put together as mutants are: it must survive, or the hunt proves nothing."""
    return mutants.build(None)
