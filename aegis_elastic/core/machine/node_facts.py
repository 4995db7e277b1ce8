"""Facts about nodes and progress: marks, what the storm guard allows, checkpoints, taints, and holds. As all
facts they change what is known, never the phase.

A mark ends nothing. It becomes an eviction when three things have come together: the detector's mark, after
it the storm guard's permission (`Evict`), and, for a node that is only slow, a checkpoint that completed
after the mark, so that nothing is lost by stopping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aegis_elastic.core.events import (
    Act,
    Dismiss,
    Evict,
    Fit,
    Hold,
    Mark,
    Noted,
    Progress,
    Release,
    Relieve,
    Saved,
    Taint,
    Unmark,
    Untaint,
)
from aegis_elastic.core.machine.change import Transition, edit, edit_mark, note, nothing, with_worker
from aegis_elastic.core.model import RECOVERING, ErrorNode, NodeMark, Phase, Status, Verdict

# A permission that comes within this time after a checkpoint can still use it: the storm guard may take that
# long to verify. Later, the next checkpoint is waited for.
BOUNDARY_S = 30.0


def _noted(s: Status, e: Noted, now: float) -> Transition:
    where = " on ".join(part for part in (e.worker, e.node_name) if part)
    return Transition(s, (), f"{e.code}: {where}: {e.detail}", "noted")


def _progress(s: Status, e: Progress, now: float) -> Transition:
    if e.step <= s.highest_step:
        return nothing(s, "known already")
    return note(s, f"training has reached step {e.step}", "progress", highest_step=e.step)


def _saved(s: Status, e: Saved, now: float) -> Transition:
    # After a restart from an older checkpoint, training passes lower steps again.
    if e.step == s.saved_step or (e.step < s.saved_step and s.incarnation == s.saved_in):
        return nothing(s, f"step {e.step} is not newer than the checkpoint of step {s.saved_step}")
    marks = tuple(edit_mark(mark, safe=True) for mark in s.marks)
    # Proven progress, steps that were never saved before, earns a retry back. While ranks run, all retries
    # are equal.
    saves = s.saves + (e.step > s.highest_saved)
    decay = s.spec.retry_decay
    due = decay > 0 and saves > s.saves and saves % decay == 0
    earned = due and s.phase is Phase.RUN_COMMAND and s.recover_count > 0
    workers = tuple(edit(worker, retries=worker.retries - 1) for worker in s.workers) if earned else s.workers
    return note(
        s,
        f"checkpoint of step {e.step} is complete ({e.kind}: {e.path})"
        + (f"; {saves} of them earned a retry back" if earned else ""),
        "saved",
        workers=workers,
        recover_count=s.recover_count - earned,
        saved_step=e.step,
        saved_at=now,
        saved_in=s.incarnation,
        highest_saved=max(s.highest_saved, e.step),
        saves=saves,
        highest_step=max(s.highest_step, e.step),
        marks=marks,
    )


def _mark(s: Status, e: Mark, now: float) -> Transition:
    if s.phase is not Phase.RUN_COMMAND:
        return nothing(s, "training doesn't run: there is nothing to judge a node by")
    if any((mark.node_name, mark.verdict) == (e.node_name, e.verdict) for mark in s.marks):
        return nothing(s, "marked already")
    if not any(worker.node_name == e.node_name and not worker.gone for worker in s.workers):
        return nothing(s, f"nobody runs on {e.node_name}")
    mark = NodeMark(e.node_name, e.worker, e.verdict, e.reason, now)
    return note(s, f"{e.node_name} is marked {e.verdict.value}: {e.reason}", "marked", marks=(*s.marks, mark))


def _unmark(s: Status, e: Unmark, now: float) -> Transition:
    marks = tuple(m for m in s.marks if (m.node_name, m.verdict) != (e.node_name, e.verdict))
    if marks == s.marks:
        return nothing(s, "not marked")
    return note(
        s, f"{e.node_name} is no longer marked {e.verdict.value}: {e.reason}", "unmarked", marks=marks
    )


def _act(s: Status, e: Act, now: float) -> Transition:
    worker = s.worker(e.worker)
    if (
        s.phase is not Phase.RUN_COMMAND
        or worker is None
        or worker.gone
        or worker.finished
        or worker.restarted
    ):
        return nothing(s, "too late to matter: its training doesn't run")
    if any(other.failed for other in s.workers):
        return nothing(s, f"{s.root} failed first in this incarnation")
    marked = any(m.node_name == worker.node_name and m.verdict.value == e.verdict for m in s.marks)
    if not marked and e.verdict != "manual":
        return nothing(s, f"{worker.node_name} is not marked {e.verdict}, or no longer")
    # A manual restart of a node that is marked as hanging wants to know where it hung, too.
    hangs = marked or any(m.node_name == worker.node_name and m.verdict is not Verdict.SLOW for m in s.marks)
    failed = edit(worker, failed=True, last_failed_reason=f"{e.verdict}: {e.reason}", updated_timestamp=now)
    return note(
        s, f"{e.worker} is to be restarted, {e.verdict}: {e.reason}", "failed",
        workers=with_worker(s.workers, failed), clues=("hang",) if hangs else (), root=e.worker,
    )  # fmt: skip


def _evict(s: Status, e: Evict, now: float) -> Transition:
    if not any(mark.node_name == e.node_name for mark in s.marks):
        return nothing(s, f"{e.node_name} is not marked, or no longer")
    fresh = now - s.saved_at <= BOUNDARY_S
    marks = tuple(
        edit_mark(mark, evict=e.reason, safe=mark.safe and (fresh or mark.verdict is not Verdict.SLOW))
        if mark.node_name == e.node_name and not mark.evict
        else mark
        for mark in s.marks
    )
    if marks == s.marks:
        return nothing(s, "allowed already")
    return note(s, f"{e.node_name} may be evicted: {e.reason}", "may_evict", marks=marks)


def _relieve(s: Status, e: Relieve, now: float) -> Transition:
    if s.phase is not Phase.TROUBLESHOOTING:
        return nothing(s, "nothing recovers in place: there is nobody to relieve")
    workers = tuple(
        edit(worker, relieve=worker.relieve or e.reason)
        if worker.node_name == e.node_name and not worker.gone
        else worker
        for worker in s.workers
    )
    if workers == s.workers:
        return nothing(s, f"nobody is on {e.node_name}, or known already")
    return note(s, f"a spare would be better than {e.node_name}: {e.reason}", "to_relieve", workers=workers)


def _fit(s: Status, e: Fit, now: float) -> Transition:
    spares = tuple(
        edit(spare, fit=e.fit) if (spare.name, spare.uid) == (e.worker, e.uid) else spare
        for spare in s.spares
    )
    if spares == s.spares:
        return nothing(s, "not a spare, or known already")
    result = "passed its checks" if e.fit else f"did not pass its checks: {e.reason}"
    return note(s, f"{e.worker} waits and {result}", "fit", spares=spares)


def _taint(s: Status, e: Taint, now: float) -> Transition:
    others = tuple(node for node in s.error_nodes if node.node_name != e.node_name)
    before = next((node for node in s.error_nodes if node.node_name == e.node_name), None)
    if before is not None and (before.reason, before.kind, before.until) == (e.reason, e.kind, e.until):
        return nothing(s, "known already")
    node = ErrorNode(e.node_name, e.reason, e.kind, now, "", e.until)
    if before is not None and (before.reason, before.kind) == (e.reason, e.kind):
        # A node that this job has found comes back with its end; it stays this job's finding.
        node = msgspec.structs.replace(before, until=e.until)
    # A spare there would be used some time; a worker that runs there goes on until it joins again.
    why = f"node {e.node_name} is not to be used: {e.reason}"
    dismissed = tuple(
        Dismiss(s.step + 1, spare.name, spare.uid, why)
        for spare in s.spares
        if spare.node_name == e.node_name
    )
    spares = tuple(spare for spare in s.spares if spare.node_name != e.node_name)
    made = note(
        s, f"{e.node_name} is tainted ({e.kind}): {e.reason}", "tainted",
        error_nodes=(*others, node), spares=spares,
    )  # fmt: skip
    return made._replace(effects=dismissed)


def _untaint(s: Status, e: Untaint, now: float) -> Transition:
    nodes = tuple(node for node in s.error_nodes if node.node_name != e.node_name)
    if nodes == s.error_nodes:
        return nothing(s, "not tainted")
    return note(s, f"{e.node_name} may be used again: {e.reason}", "untainted", error_nodes=nodes)


def _hold(s: Status, e: Hold, now: float) -> Transition:
    if s.phase not in RECOVERING:
        return nothing(s, "nothing is recovering: there is nothing to hold")
    if e.until <= now or s.held:
        return nothing(s, "held already, or over already")
    return note(s, f"recovery waits: {e.reason}", "held", held=e.reason, held_until=e.until)


def _release(s: Status, e: Release, now: float) -> Transition:
    if not s.held or s.held_until <= now:
        return nothing(s, "nothing is held, or no longer")
    # `Reconcile` ends the wait, with an order of its own.
    return note(s, f"what was waited for is back: {e.reason}", "released", held_until=now)


NODE_FACTS: dict[type, Callable[[Status, Any, float], Transition]] = {
    Noted: _noted,
    Progress: _progress,
    Saved: _saved,
    Mark: _mark,
    Unmark: _unmark,
    Act: _act,
    Evict: _evict,
    Relieve: _relieve,
    Fit: _fit,
    Taint: _taint,
    Untaint: _untaint,
    Hold: _hold,
    Release: _release,
}
