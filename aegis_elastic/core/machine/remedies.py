"""Decisions beyond a plain restart: an eviction, a re-execution (level 2), relief by spares, a hold."""

from __future__ import annotations

from aegis_elastic.core.events import Dismiss, Page, RecordErrorNode, Renew
from aegis_elastic.core.machine import conditions
from aegis_elastic.core.machine.change import (
    Transition,
    amend,
    edit,
    edit_mark,
    enter_restarting,
    enter_troubleshooting,
    fail,
    feasible,
    names_of,
    note,
    relieved_nodes,
    reset,
)
from aegis_elastic.core.model import ErrorNode, NodeMark, Phase, Status, Verdict


def decide_evict(s: Status, now: float) -> Transition:
    """The marked node leaves with all its workers, if the others can go on without it."""
    mark = conditions.leaving_mark(s)
    assert mark is not None
    node = mark.node_name
    if not feasible(s, node):
        return _keep(s, mark)
    why = f"{mark.verdict.value}: {mark.evict}"
    kind = "slow" if mark.verdict is Verdict.SLOW else "hang"
    leaving = [worker for worker in s.workers if worker.node_name == node]
    effects = [RecordErrorNode(s.step + 1, node, why, kind)]
    dismissals = [
        Dismiss(s.step + 1, worker.name, worker.uid, f"this node is evicted, {why}")
        for worker in (*s.workers, *s.spares)
        if worker.node_name == node
    ]
    rid = amend(
        s, error_nodes=(*s.error_nodes, ErrorNode(node, why, kind, now, s.spec.job_name)),
        spares=tuple(spare for spare in s.spares if spare.node_name != node),
        marks=tuple(other for other in s.marks if other.node_name != node),
        evictions=s.evictions + len(leaving),
    )  # fmt: skip
    workers = tuple(
        reset(worker, Phase.RESTARTING, now, gone=True, uid="") if worker.node_name == node else worker
        for worker in s.workers
    )
    boundary = f" after the checkpoint of step {s.saved_step}" if mark.safe else ""
    made = enter_restarting(
        rid, now, f"{names_of(leaving)} leaves {node}{boundary}, {why}: not counted", "evict",
        workers=workers, clues=("slow",), last_root="",
    )  # fmt: skip
    return made._replace(effects=(*effects, *dismissals, *made.effects))


def _keep(s: Status, mark: NodeMark) -> Transition:
    """Nothing can replace it: a slow node is better than none. The mark stays, and the guard may allow the
    eviction again.
    """
    kept = tuple(
        edit_mark(other, evict="", safe=False) if other.node_name == mark.node_name else other
        for other in s.marks
    )
    text = (
        f"{mark.node_name} is marked {mark.verdict.value} ({mark.reason}) and stays: no checked spare waits, "
        f"and fewer than {s.spec.min_worker_num} workers would be left"
    )
    made = note(s, text, "evict", marks=kept)
    return made._replace(effects=(Page(made.status.step, f"evict.{mark.node_name}", text),))


def decide_relieve(s: Status, now: float) -> Transition:
    """Fit spares replace the workers of a node that fails too often. Nothing is found broken there, so it is
    not recorded for other jobs; it may come back and wait.
    """
    nodes = relieved_nodes(s)
    leaving = [worker for worker in s.workers if worker.node_name in nodes]
    workers = tuple(
        reset(worker, Phase.RESTARTING, now, gone=True, uid="") if worker.node_name in nodes else worker
        for worker in s.workers
    )
    rid = amend(
        s, spares=tuple(spare for spare in s.spares if spare.node_name not in nodes),
        marks=tuple(mark for mark in s.marks if mark.node_name not in nodes),
        reschedules=s.reschedules + len(leaving),
    )  # fmt: skip
    why = "; ".join(f"{node}: {reason}" for node, reason in nodes.items())
    made = enter_restarting(
        rid,
        now,
        f"{names_of(leaving)} is relieved: not counted; {why}",
        "relieve",
        workers=workers,
        last_root="",
    )
    step = made.status.step
    dismissals = [
        Dismiss(step, worker.name, worker.uid, f"a spare takes this node's place: {nodes[worker.node_name]}")
        for worker in (*s.workers, *s.spares)
        if worker.node_name in nodes
    ]
    page = Page(step, f"relieve.{', '.join(nodes)}", made.reason)
    return made._replace(effects=(*dismissals, page, *made.effects))


def decide_renew(s: Status, now: float) -> Transition:
    """Level 2, once a recovery: agents whose surroundings are broken re-execute themselves."""
    broken = [worker for worker in s.workers if worker.renew]
    why = "; ".join(f"{worker.name}: {worker.renew}" for worker in broken)
    if len(s.workers) > 1 and all(worker.renew.startswith("io.") for worker in s.workers):
        workers = tuple(edit(worker, renew="") for worker in s.workers)
        return note(s, f"broken for everybody, so no node can be blamed: {why}", "renew", workers=workers)
    if s.renewed:
        return _level_two_failed(s)
    workers = tuple(
        reset(worker, Phase.RESTARTING, now, gone=True, renew=worker.renew) if worker.renew else worker
        for worker in s.workers
    )
    made = enter_restarting(
        s, now, f"level 2, a clean process for {why}: not counted", "renew", workers=workers, renewed=True,
        last_level=2,
    )  # fmt: skip
    if made.status.phase is Phase.FAILED:
        return made
    step = made.status.step
    return made._replace(
        effects=(*(Renew(step, worker.name, worker.uid, worker.renew) for worker in broken), *made.effects)
    )


def _level_two_failed(s: Status) -> Transition:
    """A clean process found the same. Broken io of single nodes that can be spared is their hardware; for
    anything else no machine can be blamed: an operator is called, and training goes on as it is.
    """
    broken = [worker for worker in s.workers if worker.renew]
    why = "; ".join(f"{worker.name}: {worker.renew}" for worker in broken)
    away = {
        worker.name for worker in broken if worker.renew.startswith("io.") and feasible(s, worker.node_name)
    }
    if len(broken) == len(away) < len(s.workers):
        workers = tuple(
            edit(worker, faulty=worker.renew, renew="") if worker.renew else worker for worker in s.workers
        )
        return note(s, f"level 2 did not help, so it is the node: {why}", "renew", workers=workers)
    workers = tuple(edit(worker, renew="") for worker in s.workers)
    made = note(s, f"level 2 did not help, and no machine can be blamed: {why}", "renew", workers=workers)
    return made._replace(effects=(Page(made.status.step, f"renew.{names_of(broken)}", made.reason),))


def decide_refund(s: Status, now: float) -> Transition:
    """All retries were equal when training started, so a worker with more has been charged since."""
    before = max(worker.retries for worker in s.workers) - 1
    workers = tuple(edit(worker, retries=min(worker.retries, before)) for worker in s.workers)
    reason = f"the charge of incarnation {s.incarnation} is given back: {s.held}"
    return note(s, reason, "refund", workers=workers, recover_count=before, charged=False)


def decide_release(s: Status, now: float) -> Transition:
    """The wait is over: findings from before say nothing of the nodes, so all check again."""
    over = amend(s, held="", held_until=0.0, entries=s.entries + 1)
    reason = f"no longer held ({s.held})"
    if over.entries > s.spec.recovery_budget:
        allowed = f"at most {s.spec.recovery_budget} allowed"
        return fail(
            amend(over, entries=s.entries), f"recovery did not converge: {over.entries} rounds, {allowed}",
            "release",
        )  # fmt: skip
    if s.phase is Phase.TROUBLESHOOTING:
        return enter_troubleshooting(over, now, reason, "release", workers=s.workers)
    deadline = max(s.deadline, now + s.spec.last_call_s) if s.deadline else 0.0
    return note(over, reason, "release", deadline=deadline)
