"""Building the next status: the only place where a `Status` is made or changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.core import retry_accounts
from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import Close, Dismiss, Effect, Publish, RecordErrorNode
from aegis_elastic.core.model import ErrorNode, JobSpec, Mode, NodeMark, Phase, Status, Verdict, Worker

# How long an agent that re-executes itself is waited for, though the others could go on without it.
RENEW_S = 120.0


class Transition(NamedTuple):
    """The result of a step: the new status (the same object if nothing changed), the effects, and why."""

    status: Status
    effects: tuple[Effect, ...]
    reason: str
    name: str


def create(spec: JobSpec, now: float) -> Status:
    """A new job's status: Pending, waiting for its workers until the join timeout."""
    return Status(spec=spec, phase=Phase.PENDING, seq_num=1, deadline=now + spec.join_timeout_s)


def enter_restarting(s: Status, now: float, reason: str, name: str, **changes: Any) -> Transition:
    """Enter Restarting (again): spares replace the gone; the recovery budget bounds the entries."""
    workers: tuple[Worker, ...] = changes.pop("workers")
    entries: int = changes.pop("entries", s.entries + 1)
    if entries > s.spec.recovery_budget:
        allowed = f"at most {s.spec.recovery_budget} allowed"
        why = f"recovery did not converge: {entries} entries into Restarting, {allowed}"
        return fail(amend(s, workers=workers, **changes), why, name)
    workers, spares, taken = replace_gone(workers, s.spares, now)
    waiting = any(worker.gone for worker in workers)
    enough = sum(not worker.gone for worker in workers) >= s.spec.min_worker_num
    patience_s = s.spec.last_call_s if enough else s.spec.rejoin_timeout_s
    if any(worker.gone and worker.renew for worker in workers):
        # It is known to come, but a clean process has to import everything first.
        patience_s = max(patience_s, min(RENEW_S, s.spec.rejoin_timeout_s))
    replaced = f"; {names_of(taken)} steps in" if taken else ""
    return move(
        s, Phase.RESTARTING, reason + replaced, name, workers=workers, spares=spares, entries=entries,
        deadline=now + patience_s if waiting else 0.0, **changes,
    )  # fmt: skip


def enter_troubleshooting(
    s: Status, now: float, reason: str, name: str, *, workers: tuple[Worker, ...], **changes: Any
) -> Transition:
    """Enter Troubleshooting: all ranks stop, all workers check; spares fill a world that is too small."""
    room = max(s.spec.worker_num - len(workers), 0)
    checks, why = recovery.plan_checks(s.spec.troubleshoot, s.clues)
    entered = tuple(
        # A worker whose ranks had finished and whose agent has left since counts as lost from now on.
        reset(worker, Phase.TROUBLESHOOTING, now, restarted=worker.gone)
        for worker in (*workers, *s.spares[:room])
    )
    reason = f"{reason}; {why}"
    changes |= {
        "store": workers[0].store,
        "workers": entered,
        "spares": s.spares[room:],
        "checks": checks,
        "deadline": 0.0,
    }
    return move(s, Phase.TROUBLESHOOTING, reason, name, **changes)


def replace_gone(
    workers: tuple[Worker, ...], spares: tuple[Worker, ...], now: float
) -> tuple[tuple[Worker, ...], tuple[Worker, ...], list[Worker]]:
    """Waiting spares replace workers that have no agent, with their ranks and retries: fit spares first, then
    the order of waiting.

    An agent that re-executes itself is on its way: it isn't replaced.
    """
    waiting, taken, seated = list(spares), [], []
    for worker in workers:
        if worker.gone and waiting and not worker.renew:
            spare = next((each for each in waiting if each.fit), waiting[0])
            waiting.remove(spare)
            taken.append(spare)
            worker = reset(spare, Phase.RESTARTING, now, retries=worker.retries)
        seated.append(worker)
    return tuple(seated), tuple(waiting), taken


def isolate_faulty_nodes(s: Status, now: float) -> tuple[tuple[Effect, ...], tuple[ErrorNode, ...]]:
    """The effects and the error nodes by which nodes with a failing check leave, with all their workers."""
    bad = faulty_nodes(s)
    effects: list[Effect] = [
        RecordErrorNode(s.step + 1, node, code, "hardware") for node, code in bad.items()
    ]
    effects += [
        Dismiss(s.step + 1, worker.name, worker.uid, f"this node is faulty: {bad[worker.node_name]}")
        for worker in (*s.workers, *s.spares)
        if worker.node_name in bad
    ]
    nodes = (ErrorNode(node, code, "hardware", now, s.spec.job_name) for node, code in bad.items())
    return tuple(effects), (*s.error_nodes, *nodes)


def faulty_nodes(s: Status) -> dict[str, str]:
    """The nodes with a hardware fault found by a check, with the code of the finding."""
    return {worker.node_name: worker.faulty for worker in s.workers if worker.faulty}


def relieved_nodes(s: Status) -> dict[str, str]:
    """The nodes that spares should replace, and why, if enough fit ones wait for all of their workers."""
    nodes = {worker.node_name: worker.relieve for worker in s.workers if worker.relieve}
    assignments = sum(worker.node_name in nodes for worker in s.workers)
    fit = sum(spare.fit and spare.node_name not in nodes for spare in s.spares)
    return nodes if assignments <= fit else {}


def starting(s: Status) -> dict[str, Any]:
    """The changes of a new start of training. Of the marks only those for slowness are kept, and the storm
    guard has to allow their eviction again: its permission was for the incarnation that is over.
    """
    marks = tuple(edit_mark(mark, evict="", safe=False) for mark in s.marks if mark.verdict is Verdict.SLOW)
    return {
        "entries": 0,
        "deadline": 0.0,
        "checks": (),
        "clues": (),
        "root": "",
        "charged": False,
        "renewed": False,
        "marks": marks,
    }


def feasible(s: Status, node_name: str) -> bool:
    """Whether training can go on without this node: fit spares for its workers, or enough workers left."""
    staying = sum(not worker.gone and worker.node_name != node_name for worker in s.workers)
    fit = sum(spare.fit and spare.node_name != node_name for spare in s.spares)
    return staying + fit >= len(s.workers) or staying >= s.spec.min_worker_num


def end(s: Status, phase: Phase, reason: str, name: str, **changes: Any) -> Transition:
    workers = tuple(edit(worker, inner_phase=phase) for worker in s.workers)
    moved = move(s, phase, reason, name, workers=workers, deadline=0.0, **changes)
    close = Close(moved.status.step, phase.value, reason)
    return moved._replace(effects=(*moved.effects, close))


def fail(s: Status, reason: str, name: str, **changes: Any) -> Transition:
    if (
        retry_accounts.exceeded((worker.retries for worker in s.workers), s.spec.max_retry)
        and not s.should_quit
    ):
        changes["recover_count"] = s.spec.max_retry + 1
    return end(s, Phase.FAILED, reason, name, fail_reason=reason, **changes)


def move(s: Status, phase: Phase, reason: str, name: str, **changes: Any) -> Transition:
    """Enter a phase: a new order with a new seqNum. `store` in `changes` if it is to form a process group."""
    moved = edit_status(s, **{"store": "", "phase": phase, "seq_num": s.seq_num + 1, **changes})
    return Transition(moved, (Publish(moved.step, moved.seq_num),), reason, name)


def note(s: Status, reason: str, name: str, **changes: Any) -> Transition:
    return Transition(edit_status(s, **changes), (), reason, name)


def nothing(s: Status, reason: str) -> Transition:
    return Transition(s, (), reason, "ignored")


def edit_status(s: Status, **changes: Any) -> Status:
    return msgspec.structs.replace(s, step=s.step + 1, **changes)


def amend(s: Status, **changes: Any) -> Status:
    """An unfinished next status, without a new step: the caller that finishes it takes the step, so that a
    transition is one step.
    """
    return msgspec.structs.replace(s, **changes)


def edit(worker: Worker, **changes: Any) -> Worker:
    return msgspec.structs.replace(worker, **changes)


def edit_mark(mark: NodeMark, **changes: Any) -> NodeMark:
    return msgspec.structs.replace(mark, **changes)


def reset(worker: Worker, phase: Phase, now: float, **changes: Any) -> Worker:
    """The worker at the start of a phase: nothing finished, no fact pending."""
    fresh: dict[str, Any] = {
        "finished": False,
        "restarted": False,
        "failed": False,
        "faulty": "",
        "fit": False,
        "renew": "",
        "relieve": "",
        "store": "",
    }
    return edit(worker, **{**fresh, "inner_phase": phase, "updated_timestamp": now, **changes})


def with_worker(workers: tuple[Worker, ...], changed: Worker) -> tuple[Worker, ...]:
    return tuple(changed if worker.name == changed.name else worker for worker in workers)


def names_of(workers: Iterable[Worker]) -> str:
    return ", ".join(worker.name for worker in workers)


def taint_of(s: Status, node_name: str, now: float) -> ErrorNode | None:
    """Why this node must not be used now, or None."""
    return next(
        (n for n in s.error_nodes if n.node_name == node_name and (n.until == 0 or now < n.until)), None
    )


def is_independent(s: Status) -> bool:
    return s.mode is Mode.INDEPENDENT


def ranks_done(s: Status, worker: Worker) -> bool:
    return s.phase is Phase.RUN_COMMAND and worker.finished


def current_worker(s: Status, name: str, uid: str, incarnation: int, seq_num: int) -> Worker | None:
    """The worker that sent a message, if the message is of its current life, incarnation and order.

    A worker that was declared lost has to join again before its messages count.
    """
    worker = s.worker(name)
    ids = (uid, incarnation, seq_num)
    current = worker is not None and not worker.gone and (worker.uid, s.incarnation, s.seq_num) == ids
    return worker if current else None
