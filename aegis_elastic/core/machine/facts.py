"""Facts: what an event from outside records. Facts change a worker's record, never the phase.

The exceptions were decided elsewhere and are entered as they happened: `Independent` (by the agents, while no
master could be reached), `Requeued` (by the scheduler), `Relaunched` and `Cleared` (by the platform).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aegis_elastic.core import retry_accounts
from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import (
    Cleared,
    Dismiss,
    Error,
    Event,
    Finish,
    Independent,
    Join,
    Lost,
    Offer,
    Quit,
    Relaunched,
    Requeued,
    Started,
)
from aegis_elastic.core.machine.change import (
    Transition,
    amend,
    current_worker,
    edit,
    fail,
    is_independent,
    move,
    note,
    nothing,
    ranks_done,
    reset,
    starting,
    taint_of,
    with_worker,
)
from aegis_elastic.core.machine.node_facts import NODE_FACTS
from aegis_elastic.core.machine.platform import cleared, relaunched
from aegis_elastic.core.machine.requeue import requeued
from aegis_elastic.core.model import Phase, Status, Worker
from aegis_elastic.core.policy.node_records import clip


def after_the_end(s: Status, event: Event) -> Transition:
    if isinstance(event, Join):
        leave = Dismiss(s.step, event.worker, event.uid, f"the job has ended: {s.phase.value}")
        return Transition(s, (leave,), "the job has ended", "ended")
    return Transition(s, (), "the job has ended", "ended")


def _join(s: Status, e: Join, now: float) -> Transition:
    tainted = taint_of(s, e.node_name, now)
    if tainted:
        why = f"node {e.node_name} is not to be used: {tainted.reason}"
        return Transition(s, (Dismiss(s.step, e.worker, e.uid, why),), why, "refused")
    identity: dict[str, Any] = {
        "uid": e.uid,
        "node_name": e.node_name,
        "node_ip": e.node_ip,
        "nproc": e.nproc,
        "risk": e.risk,
    }
    worker = s.worker(e.worker)
    if worker is None:
        if any(spare.uid == e.uid for spare in s.spares):
            return nothing(s, "known already")
        spare = Worker(
            name=e.worker, inner_phase=Phase.PENDING, ordinal=e.ordinal, updated_timestamp=now, **identity
        )
        others = tuple(other for other in s.spares if other.name != e.worker)
        # Spares are taken from the front: the least risky node first, among equals in order of joining.
        before = tuple(other for other in others if other.risk <= e.risk)
        behind = tuple(other for other in others if other.risk > e.risk)
        return note(s, f"{e.worker} has come", "joined", spares=(*before, spare, *behind))
    if worker.uid == e.uid and not worker.gone:
        return nothing(s, "known already")
    # An agent whose ranks had finished is no loss; one whose end was not noticed was lost all the same.
    unnoticed = not worker.gone and not ranks_done(s, worker)
    back = edit(
        worker,
        gone=False,
        renew="",
        restarted=worker.restarted or unnoticed,
        updated_timestamp=now,
        **identity,
    )
    return note(s, f"{e.worker} is back with a new agent", "joined", workers=with_worker(s.workers, back))


def _lost(s: Status, e: Lost, now: float) -> Transition:
    lost = set(e.agents)
    workers = tuple(
        edit(worker, gone=True, restarted=not ranks_done(s, worker), store="", updated_timestamp=now)
        if (worker.name, worker.uid) in lost and not worker.gone
        else worker
        for worker in s.workers
    )
    spares = tuple(spare for spare in s.spares if (spare.name, spare.uid) not in lost)
    if workers == s.workers and spares == s.spares:
        return nothing(s, "none of these agents is current")
    names = ", ".join(sorted(name for name, _ in lost))
    return note(s, f"{names} lost: {e.reason}", "gone", workers=workers, spares=spares)


def _offer(s: Status, e: Offer, now: float) -> Transition:
    worker = s.worker(e.worker)
    if worker is None or worker.uid != e.uid or worker.store == e.store:
        return nothing(s, "not current, or known already")
    workers = with_worker(s.workers, edit(worker, store=e.store))
    return note(s, f"{e.worker} holds a store ready", "offered", workers=workers)


def _finish(s: Status, e: Finish, now: float) -> Transition:
    worker = current_worker(s, e.worker, e.uid, e.incarnation, e.seq_num)
    if worker is None or worker.finished:
        return nothing(s, "not current: acknowledged, changes nothing")
    changes: dict[str, Any] = {"finished": True, "store": e.store, "updated_timestamp": now}
    reason = f"{e.worker} finished {s.phase.value}"
    if s.phase in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING) and e.findings:
        verdict = recovery.judge(e.findings)
        reason = f"{e.worker}: {verdict.reason}"
        changes["last_failed_reason"] = verdict.code
        changes["faulty"] = verdict.code if verdict.level == 3 else ""
        troubled = s.phase is Phase.TROUBLESHOOTING
        changes["renew"] = verdict.code if troubled and verdict.level == 2 else worker.renew
        obstructed = verdict.level < 3 and recovery.obstructs(e.findings)
        changes["failed"] = s.phase is Phase.BOOT_CHECKING and obstructed
    return note(s, reason, "finished", workers=with_worker(s.workers, edit(worker, **changes)))


def _started(s: Status, e: Started, now: float) -> Transition:
    return nothing(s, f"{e.worker} started its ranks of incarnation {e.incarnation}")


def _error(s: Status, e: Error, now: float) -> Transition:
    worker = current_worker(s, e.worker, e.uid, e.incarnation, e.seq_num)
    running = s.phase is Phase.RUN_COMMAND or is_independent(s)
    if worker is None or not running or worker.finished or worker.restarted:
        return nothing(s, "not current: a consequence, or too late to matter")
    if any(other.failed for other in s.workers):
        return nothing(s, f"a consequence: {s.root} failed first in this incarnation")
    # Every worker's last reason stays in the record; the journal has all of it.
    failed = edit(
        worker, failed=True, last_failed_reason=clip(e.reason), store=e.store, updated_timestamp=now
    )
    return note(
        s,
        f"{e.worker} failed: {e.reason}",
        "failed",
        workers=with_worker(s.workers, failed),
        clues=e.clues,
        root=e.worker,
    )


def _merge(s: Status, e: Independent, now: float) -> Transition:
    worker = s.worker(e.worker)
    if e.incarnation != s.incarnation or worker is None or not _may_have_restarted(s):
        return nothing(s, "not current: in the accounts already, or never ours")
    limit = s.spec.max_retry
    # If the failure was reported before the master was out of reach, it has been charged already.
    counted = s.phase is Phase.TROUBLESHOOTING
    retries = worker.retries if counted else retry_accounts.charge(worker.retries, limit)
    charged = with_worker(s.workers, edit(worker, retries=retries, last_failed_reason=clip(e.reason)))
    if e.ended or retry_accounts.exceeded((p.retries for p in charged), limit):
        reason = f"{e.worker} failed while the plane was away ({e.reason}): retries used up"
        return fail(amend(s, workers=charged), reason, "merged")
    count = retry_accounts.recover_count((p.retries for p in charged), limit)
    workers = tuple(
        # A loss recorded meanwhile is a failure of its own: it must not vanish in this one.
        reset(p, Phase.RUN_COMMAND, now, retries=count, store=p.store, restarted=p.restarted or p.gone)
        for p in charged
    )
    how = "counted before" if counted else "counted once"
    reason = f"{e.worker} failed while the plane was away ({e.reason}): {how}, training runs on"
    changes = {**starting(s), "workers": workers, "recover_count": count, "incarnation": s.incarnation + 1}
    return move(s, Phase.RUN_COMMAND, reason, "merged", **changes)


def _may_have_restarted(s: Status) -> bool:
    """Whether this incarnation's agents can have restarted together: all are still the same."""
    if s.phase is Phase.TROUBLESHOOTING:
        return s.entries == 0 and not any(worker.gone or worker.restarted for worker in s.workers)
    return s.phase is Phase.RUN_COMMAND


def _quit(s: Status, e: Quit, now: float) -> Transition:
    if s.should_quit:
        return nothing(s, "asked already")
    return note(s, f"asked to quit: {e.reason}", "quitting", should_quit=True, fail_reason=e.reason)


FACTS: dict[type, Callable[[Status, Any, float], Transition]] = {
    **NODE_FACTS,
    Join: _join,
    Lost: _lost,
    Offer: _offer,
    Finish: _finish,
    Started: _started,
    Error: _error,
    Independent: _merge,
    Quit: _quit,
    Requeued: requeued,
    Relaunched: relaunched,
    Cleared: cleared,
}
