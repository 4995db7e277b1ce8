"""The pieces of the proof as jobs that can run side by side, each with one row of the table as its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from aegis_elastic.core.machine import RULES
from aegis_elastic.core.model import TERMINAL, Phase
from proof import induction, worlds
from proof.check import PROPERTIES, check
from proof.explore import Graph, explore
from proof.mutation import hunt, mutants
from proof.properties import liveness
from proof.properties.liveness import Promise
from proof.tla import conform, models, tlc
from proof.tla.models import Model
from proof.worlds import World

# Transitions that a rule makes under a name of their own.
_ALIASES = {"shrink": "overdue", "independent": "overdue"}


class Row(NamedTuple):
    """One line of the table. `seen` are the witnesses that it contributes; `detail` explains a miss."""

    model: str
    kind: str
    states: int
    edges: int
    time_s: float
    result: str
    ok: bool
    seen: frozenset[str] = frozenset()
    detail: str = ""


class Job(NamedTuple):
    """A piece of work: a function of this module and its arguments, so that another process can run it."""

    work: Callable[..., Row]
    args: tuple[object, ...]
    weight: int = 1

    def run(self) -> Row:
        """Do the work. A tool that isn't there is a row of its own, never a skip."""
        try:
            return self.work(*self.args)
        except (tlc.ToolMissing, RuntimeError) as error:
            name = str(getattr(self.args[0], "name", self.args[0])) if self.args else self.work.__name__
            return Row(name, self.work.__name__, 0, 0, 0.0, "could not run", False, detail=str(error))


def safety(world: World) -> Row:
    """Every property in every status and step of a world of the production machine."""
    begun = time.monotonic()
    graph, violation = check(world)
    result = violation.name if violation else f"{len(PROPERTIES)} properties hold"
    detail = "\n".join(violation.trace) if violation else ""
    return Row(
        f"step, {world.name}", "safety", graph.states, graph.edge_count(), time.monotonic() - begun, result,
        violation is None, _seen(graph), detail,
    )  # fmt: skip


def _seen(graph: Graph) -> frozenset[str]:
    """Phases, moves and decisions that this world reached."""
    seen: set[str] = set()
    for s, out in graph.edges.items():
        seen.add(s.phase.value)
        for move, name, target in out:
            seen.add(move.label)
            if move.label == "Reconcile" and s.phase not in TERMINAL and name != "wait":
                rule = _ALIASES.get(name, name)
                seen.add(f"{rule} in {s.phase.value}")
                seen.add(f"{rule}: {s.phase.value} -> {target.phase.value}")
                seen.add(name)
    return frozenset(seen)


def expected_witnesses() -> frozenset[str]:
    """What all worlds together must have reached: phases, events, rules in all their phases and targets."""
    expected = {phase.value for phase in Phase}
    for rule in RULES:
        expected |= {f"{rule.name} in {phase.value}" for phase in rule.phases}
        expected |= {f"{rule.name}: {source.value} -> {to.value}" for source in rule.phases for to in rule.to}
    moves = (
        "Reconcile", "Quit", "Expire", "LostTogether", "Restart", "Lost", "Join", "Independent",
        "IndependentEnd", "Finish", "Error", "Offer", "FinishFaulty", "FinishBad", "FinishSlow",
        "FinishBroken", "FinishBrokenIo", "Mark slow", "Mark hung", "Unmark slow", "Unmark hung", "Act",
        "ActManual", "Evict", "Fit", "Saved", "SavedAgain", "SavedLower", "TrainsOn", "Progress",
        "ProgressAgain", "Hold", "Release", "HoldOver", "Taint", "TaintAgain", "Untaint",
    )  # fmt: skip
    return frozenset(expected) | frozenset(moves) | {"shrink", "independent"}


def promises(world: World, promised: tuple[str, ...], absent: bool) -> Row:
    """The promises of that name over a world's graph, under fairness."""
    begun = time.monotonic()
    graph = explore(world)
    known: tuple[Promise, ...] = liveness.ABSENCE if absent else liveness.PROMISES
    refuted, idle = [], []
    for promise in known:
        if promise.name in promised:
            outcome = liveness.judge(graph, promise)
            refuted += [outcome.refuted] if outcome.refuted else []
            idle += [promise.name] if not outcome.owed else []
    names = ", ".join(r.name for r in refuted) or ", ".join(f"{name} is never owed" for name in idle)
    detail = "\n".join(refuted[0].trace) if refuted else ""
    return Row(
        f"step, {world.name}", "liveness", graph.states, graph.edge_count(), time.monotonic() - begun,
        names or f"{len(promised)} promises kept", not (refuted or idle), detail=detail,
    )  # fmt: skip


def model(config: Model, workers: int = 1) -> Row:
    """One TLC config: must hold, must reach, or must be violated."""
    found = tlc.run(config.module, config.config(), workers=workers, coverage=config.kind == "safety")
    if config.kind == "defect":
        caught = found.violated in (config.expect, "temporal") and found.violated != ""
        result = f"caught by {config.expect}" if caught else "NOT caught"
        return _model_row(config, found, result, caught)
    if config.kind == "witness":
        missing = models.WITNESSES[config.module] - found.witnesses
        result = (
            f"{len(found.witnesses)} witnesses reached"
            if not missing
            else f"missing: {', '.join(sorted(missing))}"
        )
        return _model_row(config, found, result, found.violated == "Unreached" and not missing)
    idle = {action for action, times in found.actions.items() if not times} - models.ONLY_DEFECTS
    idle -= models.RARE if config.constants.get("May") == "{}" else frozenset()
    count = len(config.invariants) + len(config.properties)
    result = found.violated or (
        f"never taken: {', '.join(sorted(idle))}" if idle else f"{count} properties hold"
    )
    return _model_row(config, found, result, found.finished and not idle)


def _model_row(config: Model, found: tlc.Result, result: str, ok: bool) -> Row:
    detail = "" if ok else found.output[-4000:]
    return Row(
        config.name, config.kind, found.distinct, found.generated, found.time_s, result, ok, detail=detail
    )


def conformance(workers: int, max_retry: int, budget: int, rare: tuple[str, ...] = ()) -> Row:
    """The model's graph and the machine's are the same sets of states and of labelled edges."""
    begun = time.monotonic()
    theirs = conform.model_net(workers, max_retry, budget, models.may(*rare))
    ours = conform.machine_net(worlds.phases(workers, max_retry, budget, rare))
    difference = conform.compare(theirs, ours)
    result = f"TLC {len(theirs.states)}/{len(theirs.edges)} = step {len(ours.states)}/{len(ours.edges)}"
    detail = ""
    if difference:
        result = f"{len(difference.only_model)} only in TLC, {len(difference.only_machine)} only in step"
        detail = "\n".join(str(item) for side in difference for item in side[:4])
    name = " ".join([f"Phases.tla and step, {workers}/{max_retry}", *rare])
    return Row(
        name, "equality", len(ours.states), len(ours.edges), time.monotonic() - begun, result, not difference,
        detail=detail,
    )  # fmt: skip


def translation(module: str) -> Row:
    """The TLA+ in the module is the translation of its PlusCal."""
    begun = time.monotonic()
    same = tlc.translate(module) == (tlc.SPEC / f"{module}.tla").read_text(encoding="utf-8")
    result = "up to date" if same else f"stale: run python -m proof.tla.tlc {module}"
    return Row(f"{module}.tla", "translation", 0, 0, time.monotonic() - begun, result, same)


def induct(workers: int) -> Row:
    """The invariants by induction, for every maxRetry."""
    proof = induction.prove(workers)
    result = (
        f"{proof.obligations} obligations, every maxRetry"
        if not proof.failed
        else "; ".join(proof.failed[:3])
    )
    return Row(f"z3, {workers} workers", "induction", 0, 0, proof.time_s, result, not proof.failed)


def relation(world: World) -> Row:
    """z3's relation is the production step on every explored edge, both ways."""
    begun = time.monotonic()
    graph = explore(world)
    wrong = induction.faithful(graph)
    result = "relation = step" if not wrong else f"{len(wrong)} statuses differ"
    return Row(
        f"z3 and step, {world.name}", "equality", graph.states, graph.edge_count(), time.monotonic() - begun,
        result, not wrong, detail="\n".join(wrong[:4]),
    )  # fmt: skip


def hunting(chosen: tuple[mutants.Mutant, ...]) -> Row:
    """A batch of mutants; `seen` names those that survived."""
    begun = time.monotonic()
    catches = [hunt.hunt(mutant) for mutant in chosen]
    alive = frozenset(catch.mutant.name for catch in catches if not catch.by)
    return Row("mutants", "batch", 0, 0, time.monotonic() - begun, "", True, alive)
