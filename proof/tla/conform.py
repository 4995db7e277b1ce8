"""The model and the machine are one: TLC's graph of `spec/Phases.tla` against that of the production `step`.

Both are reduced to the same shape (`worlds.shape`) and compared as sets: every state, and every edge with the
name of the rule or of the event that made it. An edge more or less on either side is a miss.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from proof import worlds
from proof.explore import PRODUCTION, Machine, explore
from proof.tla import models, tlc
from proof.worlds import World

Shape = tuple[object, ...]
LabelledEdge = tuple[Shape, str, Shape]

_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w+)"')
_STATE = re.compile(r'^(-?\d+) \[(?:style = filled, ?)?label="(.*?)"(?:,style = filled)?\]')
_VARIABLE = re.compile(r"/\\ (\w+) = (.*?)(?=\n/\\|\Z)", re.DOTALL)
_ITEM = re.compile(r'(\w+) :> ("?\w+"?)')

# The model has one action for each rule; the machine's three losses share a name.
_RULES = {
    "RuleQuit": "quit",
    "RuleLostRunning": "lost",
    "RuleLostBooting": "lost",
    "RuleLostRecovering": "lost",
    "RuleExceeded": "exceeded",
    "RuleError": "error",
    "RuleReady": "ready",
    "RuleAdvance": "advance",
    "RuleRefund": "refund",
    "RuleRelease": "release",
    "RuleRenew": "renew",
}


# The model's variables, in the order of `worlds.shape`.
_OF_JOB = ("phase", "quit", "recoverCount", "entries", "charged", "held", "renewed")
_OF_WORKERS = ("inner", "finished", "retries", "restarted", "failed", "renew")


class Net(NamedTuple):
    """A graph as two sets: its states, and its labelled edges that lead to another state."""

    states: frozenset[Shape]
    edges: frozenset[LabelledEdge]


class Difference(NamedTuple):
    """What only one of the two has."""

    only_model: tuple[object, ...]
    only_machine: tuple[object, ...]

    def __bool__(self) -> bool:
        return bool(self.only_model or self.only_machine)


def machine_net(world: World, machine: Machine = PRODUCTION) -> Net:
    """The production graph of a world, reduced to its shape."""
    graph = explore(world, machine)
    shapes = {s: worlds.shape(s) for s in graph.parent}
    edges = {
        (shapes[s], name if move.label == "Reconcile" else move.label, shapes[t])
        for s, out in graph.edges.items()
        for move, name, t in out
        if shapes[t] != shapes[s]
    }
    return Net(frozenset(shapes.values()), frozenset(edges))


def model_net(workers: int, max_retry: int, budget: int, may: str = "{}") -> Net:
    """TLC's graph of `Phases.tla`. Raises what `tlc.run` raises."""
    constants = models.phases_constants(workers, max_retry, budget, may=may)
    model = models.Model("", "Phases", "graph", constants)
    with tempfile.TemporaryDirectory(prefix="aegis-graph-") as folder:
        dump = Path(folder) / "graph.dot"
        tlc.run(model.module, model.config(), dump=dump)
        return read_dump(dump)


def read_dump(path: Path) -> Net:
    """The graph in a file written by TLC's `-dump dot,actionlabels`."""
    states: dict[str, Shape] = {}
    named: list[tuple[str, str, str]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if edge := _EDGE.match(line):
                source, target, action = edge.groups()
                named.append((source, _RULES.get(action, action), target))
            elif state := _STATE.match(line):
                text = state.group(2).replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
                states[state.group(1)] = _shape(dict(_VARIABLE.findall(text)))
    edges = frozenset((states[s], label, states[t]) for s, label, t in named if s != t)
    return Net(frozenset(states.values()), edges)


def _shape(variables: dict[str, str]) -> Shape:
    workers = zip(
        *(list(_values(variables[name])) for name in _OF_WORKERS),
        strict=True,
    )
    head = (_value(variables[name].strip()) for name in _OF_JOB)
    return (*head, tuple(workers))


def _values(function: str) -> Iterator[object]:
    """The values of a function over workers, in the workers' order."""
    return (_value(text) for _, text in sorted(_ITEM.findall(function)))


def _value(text: str) -> object:
    if text in ("TRUE", "FALSE"):
        return text == "TRUE"
    return text.strip('"') if text.startswith('"') else int(text)


def compare(model: Net, machine: Net) -> Difference:
    """The states and edges that the two don't share."""
    return Difference(
        (*(model.states - machine.states), *(model.edges - machine.edges)),
        (*(machine.states - model.states), *(machine.edges - model.edges)),
    )
