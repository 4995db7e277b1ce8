"""The arithmetic for every limit: the machine's invariants proved by induction, with maxRetry a variable.

Exploring fixes maxRetry; this does not. The transition relation is written for z3 over a symbolic maxRetry,
budget and any history, for a fixed number of workers: the invariants hold at the start, and every action
preserves them. So that it is no third model of its own, `faithful` compares the relation with the production
`step` on every explored edge: each must be one of the relation's, and each step of the relation from an
explored status must be an explored edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import z3

from aegis_elastic.core.model import Phase, Status
from proof.explore import Graph

_PHASES = {phase: number for number, phase in enumerate(Phase)}
PENDING, BOOT, RUN, RESTART, TROUBLE, SUCCEED, FAILED = (_PHASES[phase] for phase in Phase)


class State(NamedTuple):
    """One status as symbols: the fields of `worlds.shape`."""

    phase: Any
    quit: Any
    count: Any
    entries: Any
    charged: Any
    inner: list[Any]
    finished: list[Any]
    retries: list[Any]
    restarted: list[Any]
    failed: list[Any]


class Relation(NamedTuple):
    """The machine as formulas: limits, two statuses, and each action as a constraint between them.

    `rare` are the actions that give back: a refund and an earned retry. When they happen is left open, which
    is more than the machine does; `faithful` looks at worlds without them.
    """

    limit: Any
    budget: Any
    before: State
    after: State
    actions: dict[str, Any]
    rare: dict[str, Any]


class Proof(NamedTuple):
    """What z3 made of it: how many obligations, those that failed, and how long it took."""

    workers: int
    obligations: int
    failed: tuple[str, ...]
    time_s: float


def _symbols(workers: int, mark: str) -> State:
    def ints(name: str) -> list[Any]:
        return [z3.Int(f"{name}{i}{mark}") for i in range(workers)]

    def bools(name: str) -> list[Any]:
        return [z3.Bool(f"{name}{i}{mark}") for i in range(workers)]

    return State(
        z3.Int("phase" + mark), z3.Bool("quit" + mark), z3.Int("count" + mark), z3.Int("entries" + mark),
        z3.Bool("charged" + mark),
        ints("inner"), bools("finished"), ints("retries"), bools("restarted"), bools("failed"),
    )  # fmt: skip


def _least(a: Any, b: Any) -> Any:
    return z3.If(a < b, a, b)


def _largest(values: list[Any]) -> Any:
    top = values[0]
    for value in values[1:]:
        top = z3.If(value > top, value, top)
    return top


def _in(phase: Any, *among: int) -> Any:
    return z3.Or([phase == one for one in among])


class _Builder:
    """Actions are given by what they change; everything else stays."""

    def __init__(self, limit: Any, before: State, after: State) -> None:
        self.limit, self.a, self.b = limit, before, after
        self.all = range(len(before.inner))

    def action(self, guard: Any, **changes: Any) -> Any:
        """`changes` maps a field to its new value: a term, or a function of the worker's number."""
        terms = [guard]
        for name in State._fields:
            old, new = getattr(self.a, name), getattr(self.b, name)
            change: Any = changes.get(name)
            if isinstance(old, list):
                terms += [new[i] == (old[i] if change is None else change(i)) for i in self.all]
            else:
                terms.append(new == (old if change is None else change))
        return z3.And(terms)

    def enter(self, phase: Any, guard: Any, **changes: Any) -> Any:
        """A new phase from nothing."""
        none: Callable[[int], Any] = lambda i: z3.BoolVal(False)  # noqa: E731
        return self.action(
            guard, phase=phase, inner=lambda i: phase, finished=none, restarted=none, failed=none, **changes
        )


def relation(workers: int) -> Relation:
    """The phase machine of that many workers, as `spec/Phases.tla` and `core.machine` have it."""
    limit, budget = z3.Int("maxRetry"), z3.Int("budget")
    a, b = _symbols(workers, ""), _symbols(workers, "'")
    build = _Builder(limit, a, b)
    actions = {**_rules(build, budget), **_events(build)}
    return Relation(limit, budget, a, b, actions, _gives_back(build))


def _gives_back(build: _Builder) -> dict[str, Any]:
    a = build.a
    before = _largest(a.retries) - 1
    return {
        "refund": build.action(
            z3.And(_in(a.phase, RESTART, TROUBLE), a.charged), charged=z3.BoolVal(False), count=before,
            retries=lambda i: _least(a.retries[i], before),
        ),
        "saved": build.action(
            z3.And(a.phase == RUN, a.count > 0), count=a.count - 1, retries=lambda i: a.retries[i] - 1
        ),
    }  # fmt: skip


def _rules(build: _Builder, budget: Any) -> dict[str, Any]:
    a, limit, every = build.a, build.limit, build.all
    awake = z3.Not(a.quit)
    lost, done, hurt = z3.Or(a.restarted), z3.And(a.finished), z3.Or(a.failed)
    over = z3.Or([n > limit for n in a.retries])
    no: Callable[[int], Any] = lambda i: z3.BoolVal(False)  # noqa: E731
    none = z3.BoolVal(False)

    def charge(who: list[Any]) -> list[Any]:
        return [z3.If(who[i], _least(a.retries[i] + 1, limit + 1), a.retries[i]) for i in every]

    def reset(value: Any, other: list[Any]) -> Callable[[int], Any]:
        return lambda i: z3.If(a.restarted[i], value, other[i])

    at_loss, at_error = charge(a.restarted), charge(a.failed)
    clear: dict[str, Any] = {"finished": reset(z3.BoolVal(False), a.finished), "restarted": no, "failed": no}
    back = z3.And([z3.Implies(a.inner[i] == RESTART, a.finished[i]) for i in every])
    tired = a.entries >= budget
    losing = z3.And(awake, lost, _in(a.phase, RESTART, TROUBLE))
    going = z3.And(awake, done, z3.Not(lost), z3.Not(hurt))
    final_count = z3.If(over, limit + 1, a.count)
    ready = z3.And(awake, z3.Not(lost), a.phase == RESTART, back)
    erring = z3.And(awake, z3.Not(lost), hurt, a.phase == RUN)
    return {
        "quit": build.action(
            z3.And(a.quit, a.phase < SUCCEED), phase=z3.IntVal(FAILED), inner=lambda i: FAILED, charged=none
        ),
        "lost running": build.action(
            z3.And(awake, lost, a.phase == RUN), phase=z3.IntVal(RESTART), inner=reset(RESTART, a.inner),
            retries=lambda i: at_loss[i], count=_least(_largest(at_loss), limit),
            entries=a.entries + 1, charged=z3.BoolVal(True), **clear,
        ),
        "lost booting": build.action(
            z3.And(awake, lost, _in(a.phase, PENDING, BOOT)),
            phase=z3.IntVal(PENDING), inner=lambda i: PENDING,
            finished=lambda i: z3.And(z3.Not(a.restarted[i]), z3.Or(a.phase == BOOT, a.finished[i])),
            restarted=no, failed=no,
        ),
        "lost recovering": build.action(
            z3.And(losing, z3.Not(tired)), phase=z3.IntVal(RESTART), inner=reset(RESTART, a.inner),
            entries=a.entries + 1, **clear,
        ),
        "lost for good": build.action(
            z3.And(losing, tired), phase=z3.IntVal(FAILED), inner=lambda i: FAILED, count=final_count,
            charged=none,
            **clear,
        ),
        "exceeded": build.action(
            z3.And(awake, done, z3.Not(lost), over, a.phase == TROUBLE),
            phase=z3.IntVal(FAILED), inner=lambda i: FAILED, count=limit + 1, charged=none,
        ),
        "error": build.enter(
            z3.IntVal(TROUBLE), erring, charged=z3.BoolVal(True), retries=lambda i: at_error[i],
            count=_least(_largest(at_error), limit),
        ),
        "ready": build.enter(z3.IntVal(TROUBLE), ready),
        "begin": build.enter(z3.IntVal(BOOT), z3.And(going, a.phase == PENDING)),
        "run": build.enter(
            z3.IntVal(RUN),
            z3.And(going, _in(a.phase, BOOT, TROUBLE), z3.Not(z3.And(a.phase == TROUBLE, over))),
            retries=lambda i: a.count, entries=z3.IntVal(0), charged=none,
        ),
        "succeed": build.action(
            z3.And(going, a.phase == RUN), phase=z3.IntVal(SUCCEED), inner=lambda i: SUCCEED
        ),
    }  # fmt: skip


def _events(build: _Builder) -> dict[str, Any]:
    a, every = build.a, build.all
    alive = a.phase < SUCCEED

    def mark(field: str, who: int) -> dict[str, Any]:
        old = getattr(a, field)
        return {field: lambda i: z3.BoolVal(True) if i == who else old[i]}

    finish = [build.action(z3.And(alive, z3.Not(a.finished[w])), **mark("finished", w)) for w in every]
    restart = [
        build.action(
            z3.And(alive, z3.Not(a.restarted[w]), z3.Not(z3.And(a.phase == RUN, a.finished[w]))),
            **mark("restarted", w),
        )
        for w in every
    ]
    error = [
        build.action(
            z3.And(a.phase == RUN, z3.Not(a.finished[w]), z3.Not(a.restarted[w]), z3.Not(z3.Or(a.failed))),
            **mark("failed", w),
        )
        for w in every
    ]
    return {
        "Finish": z3.Or(finish),
        "Restart": z3.Or(restart),
        "Error": z3.Or(error),
        "Quit": build.action(z3.And(alive, z3.Not(a.quit)), quit=z3.BoolVal(True)),
    }


def invariants(r: Relation, s: State) -> dict[str, Any]:
    """What is proved of every reachable status; together they are inductive."""
    limit, budget = r.limit, r.budget
    over = z3.Or([n > limit for n in s.retries])
    alive = s.phase < SUCCEED
    top = _largest(s.retries)
    lag = z3.And(s.phase == RESTART)
    each = range(len(s.inner))
    return {
        "ValidPhase": z3.And(s.phase >= PENDING, s.phase <= FAILED),
        "ValidInnerPhase": z3.And([z3.And(p >= PENDING, p <= FAILED) for p in s.inner]),
        "RecoverCountBound": z3.And(s.count >= 0, s.count <= limit + z3.If(s.phase == FAILED, 1, 0)),
        "RetriesBound": z3.And([z3.And(n >= 0, n <= limit + 1) for n in s.retries]),
        "PhaseConsistency": z3.And(
            [
                z3.Or(s.finished[i], s.inner[i] == s.phase, z3.And(lag, _in(s.inner[i], RUN, TROUBLE)))
                for i in each
            ]
        ),
        "MaxAgrees": z3.Implies(s.phase != FAILED, s.count == _least(top, limit)),
        "Aligned": z3.Implies(_in(s.phase, RUN, SUCCEED), z3.And([n == s.count for n in s.retries])),
        "NothingCountedBefore": z3.Implies(_in(s.phase, PENDING, BOOT), z3.And([n == 0 for n in s.retries])),
        "ExceededOnlyInRecovery": z3.Implies(over, _in(s.phase, RESTART, TROUBLE, FAILED)),
        "FailedHasReason": z3.Implies(s.phase == FAILED, z3.Or(s.quit, over, s.entries >= budget)),
        "QuitIsNotExhaustion": z3.Implies(
            s.phase == FAILED, (s.count == limit + 1) == z3.And(over, z3.Not(s.quit))
        ),
        "RecoveryBounded": z3.And(s.entries >= 0, s.entries <= budget),
        "FreshWhileRunning": z3.Implies(
            z3.And(alive, z3.Not(_in(s.phase, RESTART, TROUBLE))), s.entries == 0
        ),
        "ChargedStandsHigher": z3.Implies(s.charged, z3.And(_in(s.phase, RESTART, TROUBLE), top >= 1)),
        "OneErrorPerIncarnation": z3.AtMost(*s.failed, 1) if len(s.failed) > 1 else z3.BoolVal(True),
        "ErrorsOnlyWhileRunning": z3.Implies(
            z3.Or(s.failed), z3.Or(s.phase == RUN, z3.And(s.quit, s.phase == FAILED))
        ),
    }


def steps(r: Relation) -> dict[str, Any]:
    """What is proved of every step, given the invariants."""
    a, b, limit = r.before, r.after, r.limit
    over = z3.Or([n > limit for n in a.retries])
    counted = z3.And(a.phase == RUN, _in(b.phase, RESTART, TROUBLE))
    same = z3.And([b.retries[i] == a.retries[i] for i in range(len(a.retries))])
    return {
        "ExceededIsFinal": z3.Implies(over, z3.And(b.phase != RUN, z3.Or([n > limit for n in b.retries]))),
        "OneBump": z3.Implies(b.phase != FAILED, b.count == _least(a.count + z3.If(counted, 1, 0), limit)),
        "CountOnlyInRun": z3.Or(
            same, a.phase == RUN, z3.And(b.phase == RUN, z3.And([n == a.count for n in b.retries]))
        ),
        "TerminalAbsorbing": a.phase < SUCCEED,
    }


def _start(r: Relation) -> Any:
    a = r.before
    blank = [z3.Not(x) for field in (a.finished, a.restarted, a.failed) for x in field]
    zero = [n == 0 for n in (*a.retries, a.count, a.entries)]
    blank.append(z3.Not(a.charged))
    return z3.And(a.phase == PENDING, z3.Not(a.quit), *[p == PENDING for p in a.inner], *blank, *zero)


def prove(workers: int) -> Proof:
    """Start, every action against every invariant, every action against every step property."""
    begun = time.monotonic()
    r = relation(workers)
    before, after = invariants(r, r.before), invariants(r, r.after)
    sane = z3.And(r.limit >= 0, r.budget >= 1)
    failed: list[str] = []
    obligations = 0

    solver = z3.Solver()
    solver.add(sane, _start(r))
    for name, holds in before.items():
        obligations += 1
        if not _refutes(solver, holds):
            failed.append(f"{name} at the start")
    goals = {**after, **steps(r)}
    given_back = {**after, "OneBack": r.after.count >= r.before.count - 1, "Alive": r.before.phase < SUCCEED}
    for action, constraint in {**r.actions, **r.rare}.items():
        solver = z3.Solver()
        solver.add(sane, *before.values(), constraint)
        for name, holds in (given_back if action in r.rare else goals).items():
            obligations += 1
            if not _refutes(solver, holds):
                failed.append(f"{name} after {action}")
    return Proof(workers, obligations, tuple(failed), time.monotonic() - begun)


def _refutes(solver: Any, holds: Any) -> bool:
    solver.push()
    solver.add(z3.Not(holds))
    refuted = solver.check() == z3.unsat
    solver.pop()
    return bool(refuted)


def _facts(s: State, status: Status) -> list[tuple[Any, Any]]:
    """The symbols of a status beside the values that a real one has."""
    pairs = [
        (s.phase, z3.IntVal(_PHASES[status.phase])),
        (s.quit, z3.BoolVal(status.should_quit)),
        (s.count, z3.IntVal(status.recover_count)),
        (s.entries, z3.IntVal(status.entries)),
        (s.charged, z3.BoolVal(status.charged)),
    ]
    for i, worker in enumerate(status.workers):
        pairs += [
            (s.inner[i], z3.IntVal(_PHASES[worker.inner_phase])),
            (s.finished[i], z3.BoolVal(worker.finished)),
            (s.retries[i], z3.IntVal(worker.retries)),
            (s.restarted[i], z3.BoolVal(worker.restarted)),
            (s.failed[i], z3.BoolVal(worker.failed)),
        ]
    return pairs


def faithful(graph: Graph) -> list[str]:
    """Where the relation and the production graph of a phases world differ: edges that only one has."""
    job = graph.world.spec
    r = relation(job.worker_num)
    limits = [(r.limit, z3.IntVal(job.max_retry)), (r.budget, z3.IntVal(job.recovery_budget))]
    possible = z3.Or(list(r.actions.values()))
    wrong: list[str] = []
    for status, out in graph.edges.items():
        here = z3.simplify(z3.substitute(possible, *limits, *_facts(r.before, status)))
        targets = list({t for _, _, t in out if t != status})
        there = [z3.And([x == v for x, v in _facts(r.after, t)]) for t in targets]
        solver = z3.Solver()
        # Both directions at once: the relation's next statuses are exactly those that production reaches.
        solver.add(here != (z3.Or(there) if there else z3.BoolVal(False)))
        if solver.check() != z3.unsat:
            wrong.append(f"{status.phase.value} {solver.model()}")
    return wrong
