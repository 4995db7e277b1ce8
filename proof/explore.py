"""Breadth-first through everything that the production `step` can do in a world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from aegis_elastic.core import machine as production
from aegis_elastic.core.events import Event
from aegis_elastic.core.machine import Rule, Transition
from aegis_elastic.core.model import JobSpec, Status
from proof import worlds
from proof.worlds import EXPIRED, LONG_AGO, NOW, Move, World


class Machine(NamedTuple):
    """The machine under proof: the production one, or a mutant of it."""

    step: Callable[[Status, Event, float], Transition]
    create: Callable[[JobSpec, float], Status]
    rules: tuple[Rule, ...]


PRODUCTION = Machine(production.step, production.create, production.RULES)


class Edge(NamedTuple):
    """One step: from a canonical status, by a move, the transition as `step` gave it, and where it leads.

    `rules` is the table of the machine that took it.
    """

    before: Status
    move: Move
    transition: Transition
    after: Status
    rules: tuple[Rule, ...]


class Explosion(Exception):
    """A world has more states than it may: with the production machine a bound that is missing."""


class Graph:
    """The reachable statuses of a world in the order found, each with its depth and its way back."""

    def __init__(self, world: World, first: Status) -> None:
        self.world = world
        self.first = first
        self.parent: dict[Status, tuple[Status, Move] | None] = {first: None}
        self.edges: dict[Status, list[tuple[Move, str, Status]]] = {}

    @property
    def states(self) -> int:
        return len(self.parent)

    def edge_count(self) -> int:
        """Labelled edges that lead somewhere else."""
        return sum(len({(m.label, n, t) for m, n, t in out if t != s}) for s, out in self.edges.items())

    def trace(self, status: Status) -> list[str]:
        """How one gets there from the start, one line a move."""
        lines: list[str] = []
        while (came := self.parent[status]) is not None:
            lines.append(f"{came[1].label} {came[1].worker} -> {describe(status)}")
            status = came[0]
        return [describe(status), *reversed(lines)]


def describe(s: Status) -> str:
    """A status in one line: phase, counts, and each worker's phase, retries and facts."""
    workers = " ".join(
        f"{p.name}[{p.inner_phase.value} {p.retries}"
        + "".join(f" {f}" for f in ("finished", "gone", "restarted", "failed", "faulty") if getattr(p, f))
        + "]"
        for p in s.workers
    )
    waiting = f" spares {len(s.spares)}" if s.spares else ""
    extra = "".join(
        text for text, on in ((" quit", s.should_quit), (" independent", not worlds.protected(s))) if on
    )
    counts = f"count {s.recover_count} entries {s.entries} deadline {s.deadline:g}"
    return f"{s.phase.value} {counts}{extra} {workers}{waiting}"


def first_status(world: World, machine: Machine) -> Status:
    """Where a world begins: an empty job, or one whose workers have all been seated."""
    s = machine.create(world.spec, NOW)
    if world.formed:
        for name in world.workers[: world.spec.worker_num]:
            s = machine.step(s, worlds.join(name, 1, world.features), NOW).status
            s = machine.step(s, worlds.moves(world, s).__next__().event or _never(), NOW).status
    return worlds.canonical(s)


def _never() -> Event:
    raise AssertionError("the first move of every world is Reconcile")


def take(machine: Machine, s: Status, move: Move) -> Transition:
    """One move: time passing is the environment's, everything else is a step."""
    if move.label == "TrainsOn":
        return Transition(msgspec.structs.replace(s, saved_at=LONG_AGO), (), "training goes on", "time")
    if move.event is None:
        return Transition(msgspec.structs.replace(s, deadline=EXPIRED), (), "time passes", "time")
    return machine.step(s, move.event, NOW)


def walk(
    world: World, machine: Machine = PRODUCTION, *, limit: int = 3_000_000, keep: bool = True
) -> tuple[Graph, Iterator[Edge]]:
    """The graph, filled while the edges are drawn from the iterator; edges are kept only if `keep`.

    Raises `Explosion` while drawing if more than `limit` states are found.
    """
    graph = Graph(world, first_status(world, machine))
    return graph, _walk(graph, machine, limit, keep)


def _walk(graph: Graph, machine: Machine, limit: int, keep: bool) -> Iterator[Edge]:
    queue = deque([graph.first])
    # Equal statuses are made one object, which halves memory and makes look-ups cheap.
    known: dict[Status, Status] = {graph.first: graph.first}
    while queue:
        s = queue.popleft()
        out: list[tuple[Move, str, Status]] = []
        for move in worlds.moves(graph.world, s):
            transition = take(machine, s, move)
            found = s if transition.status is s else worlds.canonical(transition.status)
            after = known.get(found)
            if after is None:
                known[found] = after = found
                graph.parent[found] = (s, move)
                queue.append(found)
                if len(known) > limit:
                    raise Explosion(f"{graph.world.name}: more than {limit} states")
            if keep:
                out.append((move, transition.name, after))
            yield Edge(s, move, transition, after, machine.rules)
        if keep:
            graph.edges[s] = out


def explore(world: World, machine: Machine = PRODUCTION, *, limit: int = 3_000_000) -> Graph:
    """The whole graph of a world, without judging it."""
    graph, edges = walk(world, machine, limit=limit)
    for _ in edges:
        pass
    return graph
