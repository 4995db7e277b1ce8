"""Exploring a world and judging every status and every step on the way."""

from __future__ import annotations

from typing import NamedTuple

from aegis_elastic.core.model import Phase, Status
from proof.explore import PRODUCTION, Edge, Explosion, Graph, Machine, walk
from proof.properties.facts import FACTS, stale_is_rejected
from proof.properties.invariants import INVARIANTS
from proof.properties.places import PLACES
from proof.properties.reliefs import RELIEFS
from proof.properties.remedies import REMEDIES, REMEDY_INVARIANTS
from proof.properties.steps import STEPS, decides
from proof.worlds import NOW, World

PROPERTIES: tuple[str, ...] = (
    "JobIsBorn", *INVARIANTS, *REMEDY_INVARIANTS, "NoFinishDoubleProcessed", "StaleFinishRejected",
    *STEPS, *PLACES, *FACTS, *REMEDIES, *RELIEFS,
)  # fmt: skip
# A fact decides nothing, which is a property itself (FactsDontDecide): properties of decisions then hold of
# it, and needn't be evaluated again.
_OF_ALL = (
    "TerminalAbsorbing", "FactsDontDecide", "MasterSeqNumMonotonic", "EffectsCarryTheirTransition",
    "ReasonGiven",
)  # fmt: skip
_OF_DECISIONS = {**STEPS, **PLACES, **FACTS, **REMEDIES, **RELIEFS}
_OF_FACTS = {**{name: STEPS[name] for name in _OF_ALL}, **FACTS, **REMEDIES, **RELIEFS}
_OF_STATES = {**INVARIANTS, **REMEDY_INVARIANTS}


class Violation(NamedTuple):
    """A property that does not hold, and how one gets to where it does not."""

    name: str
    trace: tuple[str, ...]


def broken_state(machine: Machine, s: Status) -> str | None:
    """The first property that this status breaks, or None."""
    for name, holds in _OF_STATES.items():
        if not holds(s):
            return name
    return stale_is_rejected(machine, s)


def broken_step(edge: Edge) -> str | None:
    """The first property that this step breaks, or None."""
    properties = _OF_DECISIONS if decides(edge) else _OF_FACTS
    return next((name for name, holds in properties.items() if not holds(edge)), None)


def broken_birth(world: World, machine: Machine) -> str | None:
    """Whether a new job begins as it must: Pending, empty, its first order out, a limit to its waiting."""
    born = machine.create(world.spec, NOW)
    empty = Status(world.spec, Phase.PENDING, seq_num=1, deadline=NOW + world.spec.join_timeout_s)
    return None if born == empty else "JobIsBorn"


def check(
    world: World, machine: Machine = PRODUCTION, *, limit: int = 3_000_000, keep: bool = True
) -> tuple[Graph, Violation | None]:
    """Explore until everything is seen or a property is broken, breadth-first: a trace is a shortest one."""
    graph, edges = walk(world, machine, limit=limit, keep=keep)
    broken = broken_birth(world, machine) or broken_state(machine, graph.first)
    if broken:
        return graph, Violation(broken, tuple(graph.trace(graph.first)))
    judged = 1
    try:
        for edge in edges:
            broken = broken_step(edge)
            if broken is None and graph.states > judged:
                judged = graph.states
                broken = broken_state(machine, edge.after)
            if broken:
                last = (
                    f"{edge.move.label} {edge.move.worker}: {edge.transition.name}: {edge.transition.reason}"
                )
                return graph, Violation(broken, (*graph.trace(edge.before), last))
    except Explosion as unbounded:
        return graph, Violation("Finite", (str(unbounded),))
    return graph, None
