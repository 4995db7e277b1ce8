"""What must happen in the end: `p` leads to `q` under weak fairness.

Checked by searching the graph for a fair way to avoid it. A run avoids `q` for ever only inside a strongly
connected part of the graph without `q`. Such a part is a real counter-example if fairness permits to stay:
every fair move is either taken inside it, or is impossible (or changes nothing) in some status of it, so that
it isn't continuously enabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from aegis_elastic.core.model import BOOTING, RECOVERING, TERMINAL, Mode, Phase, Status
from proof.explore import Graph, describe
from proof.properties.invariants import exceeded

Predicate = Callable[[Status], bool]
Successors = Callable[[Status], Iterable[Status]]

# What the environment does to a job; calm means that it has stopped doing so.
DISTURBANCE = frozenset(
    {
        "Restart",
        "Lost",
        "LostTogether",
        "Error",
        "Quit",
        "FinishFaulty",
        "FinishBad",
        "FinishSlow",
        "Independent",
        "IndependentEnd",
    }
)
NOTHING: frozenset[str] = frozenset()


def _nobody_led(s: Status) -> bool:
    """Independent mode was entered without any worker: those that join form a world without a master."""
    return s.mode is Mode.INDEPENDENT and not s.workers


class Promise(NamedTuple):
    """`p` leads to `q` while nothing of `calm_from` happens; what is `fair` happens in the end."""

    name: str
    p: Predicate
    q: Predicate
    calm_from: frozenset[str]
    fair: frozenset[str] = frozenset({"Reconcile", "Finish"})


def _over(s: Status) -> bool:
    return s.phase in TERMINAL


def _settled(s: Status) -> bool:
    return s.phase is Phase.RUN_COMMAND or s.phase in TERMINAL


def _hurt(s: Status) -> bool:
    return s.phase is Phase.RUN_COMMAND and any(worker.restarted or worker.failed for worker in s.workers)


def _waits_for_gone(s: Status) -> bool:
    return s.phase is Phase.RESTARTING and any(worker.gone for worker in s.workers)


PROMISES: tuple[Promise, ...] = (
    # The budget bounds losses, so recovery ends however hard it is disturbed.
    Promise("RecoveryEnds", lambda s: s.phase in RECOVERING, _settled, NOTHING),
    Promise("JobEnds", lambda s: not _over(s), _over, DISTURBANCE),
    Promise("NoLostFailure", _hurt, lambda s: s.phase is not Phase.RUN_COMMAND, NOTHING),
    Promise("QuitIsObeyed", lambda s: s.should_quit, _over, NOTHING, frozenset({"Reconcile"})),
    Promise("ExceededEnds", exceeded, lambda s: s.phase is Phase.FAILED, NOTHING),
    Promise("BootEnds", lambda s: s.phase in BOOTING, _settled, DISTURBANCE),
)

# The same where agents may stay away for ever: then time must pass, and no worker is waited for.
_TIME = frozenset({"Reconcile", "Finish", "Expire"})
ABSENCE: tuple[Promise, ...] = (
    Promise("RecoveryEnds", lambda s: s.phase in RECOVERING, _settled, NOTHING, _TIME),
    Promise(
        "JobEnds", lambda s: not _over(s), lambda s: _over(s) or _nobody_led(s), DISTURBANCE | {"Join"}, _TIME
    ),
    Promise("MissingAreNotWaitedFor", _waits_for_gone, lambda s: not _waits_for_gone(s), NOTHING, _TIME),
    Promise("ExceededEnds", exceeded, lambda s: s.phase is Phase.FAILED, NOTHING, _TIME),
)


class Refutation(NamedTuple):
    """A fair run that avoids a promise: its trace, and how many statuses the trap has."""

    name: str
    trace: tuple[str, ...]
    trap: int


class Outcome(NamedTuple):
    """Result for a promise: in how many statuses it was owed, and a refutation if it is not kept."""

    owed: int
    refuted: Refutation | None


def judge(graph: Graph, promise: Promise) -> Outcome:
    """Whether the promise is kept everywhere in the graph."""
    out = {
        s: [(m.label, m.worker, t) for m, _, t in edges if t != s and m.label not in promise.calm_from]
        for s, edges in graph.edges.items()
    }
    owed = [s for s in out if promise.p(s) and not promise.q(s)]
    trapped = _reach(owed, lambda s: (t for _, _, t in out[s] if not promise.q(t)))
    workers = {worker.name for s in trapped for worker in s.workers}
    fair = [
        (label, w) for label in sorted(promise.fair) for w in sorted(workers if label == "Finish" else {""})
    ]

    def inside(s: Status) -> Iterator[Status]:
        return (t for _, _, t in out[s] if t in trapped)

    for part in components(trapped, inside):
        members = set(part)
        if all(_permits(out, members, label, name) for label, name in fair):
            found = part[0]
            return Outcome(
                len(owed), Refutation(promise.name, (*graph.trace(found), describe(found)), len(part))
            )
    return Outcome(len(owed), None)


def _permits(
    out: dict[Status, list[tuple[str, str, Status]]], members: set[Status], label: str, worker: str
) -> bool:
    """Whether fairness of this move allows to stay among `members` for ever."""
    possible = 0
    for s in members:
        targets = [t for la, w, t in out[s] if (la, w) == (label, worker)]
        if any(t in members for t in targets):
            return True
        possible += bool(targets)
    return possible < len(members)


def _reach(start: Iterable[Status], successors: Successors) -> set[Status]:
    seen = set(start)
    stack = list(seen)
    while stack:
        for t in successors(stack.pop()):
            if t not in seen:
                seen.add(t)
                stack.append(t)
    return seen


def components(nodes: Iterable[Status], successors: Successors) -> Iterator[list[Status]]:
    """The strongly connected components (Tarjan's algorithm, without recursion)."""
    index: dict[Status, int] = {}
    low: dict[Status, int] = {}
    stack: list[Status] = []
    on_stack: set[Status] = set()
    for root in nodes:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(successors(root)))]
        while work:
            node, rest = work[-1]
            fresh = next((t for t in _tracked(node, rest, index, low, on_stack)), None)
            if fresh is not None:
                index[fresh] = low[fresh] = len(index)
                stack.append(fresh)
                on_stack.add(fresh)
                work.append((fresh, iter(successors(fresh))))
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                yield _popped(stack, on_stack, node)


def _tracked(
    node: Status,
    rest: Iterator[Status],
    index: dict[Status, int],
    low: dict[Status, int],
    on_stack: set[Status],
) -> Iterator[Status]:
    """The successors not seen yet; those on the stack lower the node's link on the way."""
    for t in rest:
        if t not in index:
            yield t
        elif t in on_stack:
            low[node] = min(low[node], index[t])


def _popped(stack: list[Status], on_stack: set[Status], node: Status) -> list[Status]:
    part: list[Status] = []
    while True:
        member = stack.pop()
        on_stack.discard(member)
        part.append(member)
        if member == node:
            return part
