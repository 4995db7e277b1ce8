"""What must hold of marks and evictions, of what the guard allows, of holds and refunds, and of level 2.

As everywhere here the expectation is computed anew, in another way than the machine's.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import Dismiss, Page, Renew
from aegis_elastic.core.model import (
    RECOVERING,
    TERMINAL,
    ErrorNode,
    NodeMark,
    Phase,
    Status,
    Verdict,
    Worker,
)
from proof.explore import Edge
from proof.properties.invariants import exceeded
from proof.properties.places import departed, evicted
from proof.properties.steps import StepProperty, lost, relieved, turn
from proof.worlds import NOW

Marks = tuple[NodeMark, ...]
LAST_CALL_S = 30.0


def _name(e: Edge) -> str:
    return e.transition.name


def _done(s: Status) -> bool:
    return bool(s.workers) and all(p.finished for p in s.workers)


def _step_of(e: Edge) -> int:
    return int(getattr(e.move.event, "step", -1))


# ---------------------------------------------------------------- marks and evictions


def _leaving(s: Status) -> NodeMark | None:
    """The first mark that may be evicted, at a boundary if it is slow, of a node with workers."""
    for mark in s.marks:
        seated = any(p.node_name == mark.node_name for p in s.workers)
        if seated and mark.evict and (mark.verdict is not Verdict.SLOW or mark.safe):
            return mark
    return None


def _spared(s: Status, node: str) -> bool:
    stay = [p for p in s.workers if p.node_name != node and not p.gone]
    checked = [p for p in s.spares if p.node_name != node and p.fit]
    return len(stay) >= s.spec.min_worker_num or len(stay) + len(checked) >= len(s.workers)


def _no_early_evict(e: Edge) -> bool:
    """No node is evicted unmarked, without the guard's permission, or, if only slow, before a checkpoint."""
    a = e.before
    return all(
        any(m.node_name == node and m.evict and (m.safe or m.verdict is not Verdict.SLOW) for m in a.marks)
        for node in evicted(e)
    )


def _no_suicidal_evict(e: Edge) -> bool:
    return all(_spared(e.before, node) for node in evicted(e))


def _evicts_when_it_may(e: Edge) -> bool:
    """A node that may leave and can be spared does so at the next turn; else an operator is called, once."""
    a, b = e.before, e.transition.status
    failed = any(p.failed for p in a.workers)
    mark = _leaving(a) if turn(e, Phase.RUN_COMMAND) and not (lost(a) or failed or _done(a)) else None
    if mark is None:
        return _name(e) != "evict"
    if _spared(a, mark.node_name):
        return evicted(e) == [mark.node_name] and b.phase is Phase.RESTARTING
    pages = [x.key for x in e.transition.effects if isinstance(x, Page)]
    same = (b.phase, b.workers, b.spares) == (a.phase, a.workers, a.spares)
    return same and pages == [f"evict.{mark.node_name}"] and len(e.transition.effects) == 1


def _eviction_is_free(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    for node in evicted(e):
        leaving = [p.name for p in a.workers if p.node_name == node]
        kind = "slow" if any(m.node_name == node and m.verdict is Verdict.SLOW for m in a.marks) else "hang"
        recorded = [n.kind for n in b.error_nodes if n.node_name == node]
        free = (b.recover_count, b.charged, b.entries, b.last_root) == (a.recover_count, a.charged, 1, "")
        kept = [p.retries for p in a.workers] == [p.retries for p in b.workers]
        empty = all(
            p.gone and not p.uid and p.inner_phase is Phase.RESTARTING and not p.finished
            for p in b.workers
            if p.node_name == node
        )
        stay = [p.inner_phase for p in b.workers if p.name in {q.name for q in a.workers} - set(leaving)]
        if not (free and kept and empty) or b.evictions != len(leaving) or "slow" not in b.clues:
            return False
        if set(stay) - {Phase.RUN_COMMAND} or recorded not in ([kind], ["slow"], ["hang"]):
            return False
    return True


def _marked(e: Edge) -> Marks:
    """The marks that there should be after this step."""
    a, label = e.before, e.move.label
    node = next((p.node_name for p in (*a.workers, *a.spares) if p.name == e.move.worker), "")
    if label.startswith("Mark ") and a.phase is Phase.RUN_COMMAND:
        verdict = Verdict.SLOW if label.endswith("slow") else Verdict.DESYNC
        known = any((m.node_name, m.verdict) == (node, verdict) for m in a.marks)
        there = any(p.node_name == node and not p.gone for p in a.workers)
        return a.marks if known or not there else (*a.marks, NodeMark(node, "", verdict, "", 0.0))
    if label.startswith("Unmark "):
        verdict = Verdict.SLOW if label.endswith("slow") else Verdict.DESYNC
        return tuple(m for m in a.marks if (m.node_name, m.verdict) != (node, verdict))
    if label in ("Evict", "EvictGone"):
        node = node or e.move.worker
        near = a.saved_at == NOW
        return tuple(
            msgspec.structs.replace(m, evict="yes", safe=m.safe and (near or m.verdict is not Verdict.SLOW))
            if m.node_name == node and not m.evict
            else m
            for m in a.marks
        )
    if _saved_is_new(e):
        return tuple(msgspec.structs.replace(m, safe=True) for m in a.marks)
    if nodes := departed(e):
        return tuple(m for m in a.marks if m.node_name not in nodes)
    if _name(e) == "evict":
        return _after_refusal(e)
    if e.transition.status.incarnation > a.incarnation:
        slow = (m for m in a.marks if m.verdict is Verdict.SLOW)
        return tuple(msgspec.structs.replace(m, evict="", safe=False) for m in slow)
    return a.marks


def _after_refusal(e: Edge) -> Marks:
    a, mark = e.before, _leaving(e.before)
    node = mark.node_name if mark else ""
    return tuple(
        msgspec.structs.replace(m, evict="", safe=False) if m.node_name == node else m for m in a.marks
    )


def _mark_is_of_node(e: Edge) -> bool:
    """Marks come by detectors, go with their node or their incarnation, and don't move with a worker."""
    if e.before.phase in TERMINAL:
        return True

    def summary(marks: Marks) -> list[tuple[str, str, bool, bool]]:
        return sorted((m.node_name, m.verdict.value, bool(m.evict), m.safe) for m in marks)

    if e.move.label.startswith(("Mark ", "Unmark ", "Evict")) and summary(e.before.marks) == summary(
        _marked(e)
    ):
        return e.transition.status is e.before
    new = [m for m in e.transition.status.marks if m not in e.before.marks and m.time == NOW]
    named = all(m.worker and m.reason for m in new)
    return summary(e.transition.status.marks) == summary(_marked(e)) and named


def _act_is_an_error(e: Edge) -> bool:
    """The guard's restart of a hung rank is answered as that rank's failure; without its mark, not at all."""
    a, b = e.before, e.transition.status
    if e.move.label not in ("Act", "ActManual") or a.phase in TERMINAL:
        return True
    worker = a.worker(e.move.worker)
    assert worker is not None
    fit = a.phase is Phase.RUN_COMMAND and not (worker.gone or worker.finished or worker.restarted)
    marked = any(m.node_name == worker.node_name and m.verdict is Verdict.DESYNC for m in a.marks)
    now = b.worker(worker.name)
    by_hand = e.move.label == "ActManual"  # which needs no mark; but the place of the hang is still wanted
    if not fit or not (marked or by_hand) or any(p.failed for p in a.workers):
        return b is a
    if now is None or not now.failed or ("manual" if by_hand else "desync") not in now.last_failed_reason:
        return False
    clues = ("hang",) if marked else ()
    return (b.root, b.clues, now.updated_timestamp) == (worker.name, clues, NOW)


# ---------------------------------------------------------------- checkpoints and progress


def _saved_is_new(e: Edge) -> bool:
    a, step = e.before, _step_of(e)
    if not e.move.label.startswith("Saved") or a.phase in TERMINAL:
        return False
    return step > a.saved_step or (step < a.saved_step and a.saved_in != a.incarnation)


def _saved_is_noted(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if not e.move.label.startswith("Saved") or a.phase in TERMINAL:
        return True
    if not _saved_is_new(e):
        return b is a
    step = _step_of(e)
    noted = (b.saved_step, b.saved_at, b.saved_in) == (step, NOW, a.incarnation)
    proven = step > a.highest_saved
    earned = (
        proven
        and a.phase is Phase.RUN_COMMAND
        and a.recover_count > 0
        and a.spec.retry_decay > 0
        and (a.saves + 1) % a.spec.retry_decay == 0
    )
    accounts = [p.retries - earned for p in a.workers] == [p.retries for p in b.workers]
    return (
        noted
        and accounts
        and b.recover_count == a.recover_count - earned
        and b.saves == a.saves + proven
        and b.highest_saved == max(a.highest_saved, step)
        and b.highest_step == max(a.highest_step, step)
    )


def _progress_is_noted(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if not e.move.label.startswith("Progress") or a.phase in TERMINAL:
        return True
    grows = _step_of(e) > a.highest_step
    return b.highest_step == _step_of(e) if grows else b is a


# ---------------------------------------------------------------- holds and refunds


def _hold_is_noted(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if a.phase in TERMINAL:
        return True
    if e.move.label == "Hold":
        may = a.phase in RECOVERING and not a.held
        return (bool(b.held), b.held_until) == (True, NOW + 100.0) if may else b is a
    if e.move.label == "HoldOver":
        return b is a
    if e.move.label == "Release":
        waits = bool(a.held) and a.held_until > NOW
        return (b.held, b.held_until) == (a.held, NOW) if waits else b is a
    return bool(b.held) == bool(a.held) or _name(e) == "release" or b.phase in TERMINAL


def _refund_once(e: Edge) -> bool:
    """The charge of this incarnation is refunded when its recovery is held; once, and only then."""
    a, b = e.before, e.transition.status
    due = turn(e, *RECOVERING) and not lost(a) and bool(a.held) and a.charged
    if (_name(e) == "refund") != due:
        return False
    if not due:
        return True
    top = max(p.retries for p in a.workers)
    back = [top - 1 if p.retries == top else p.retries for p in a.workers]
    others = (b.phase, b.entries, b.spares, b.held, b.held_until) == (
        a.phase, a.entries, a.spares, a.held, a.held_until,
    )  # fmt: skip
    return (
        others
        and not b.charged
        and [p.retries for p in b.workers] == back
        and b.recover_count == max(back) <= a.spec.max_retry
        and not exceeded(b)
    )


def _held_waits(e: Edge) -> bool:
    """While held nothing is decided about nodes or the end; afterwards all are checked again."""
    a, b = e.before, e.transition.status
    if not turn(e, *RECOVERING) or lost(a) or not a.held or a.charged:
        return _name(e) != "release"
    over = a.held_until <= NOW and (a.phase is Phase.RESTARTING or _done(a))
    if not over:
        return b is a if a.phase is Phase.TROUBLESHOOTING else _name(e) in ("seat", "ready", "wait")
    if _name(e) != "release" or b.held or b.held_until:
        return False
    if a.entries >= a.spec.recovery_budget:
        return b.phase is Phase.FAILED and b.entries == a.entries
    if b.entries != a.entries + 1 or b.phase is not a.phase:
        return False
    if a.phase is Phase.TROUBLESHOOTING:
        return not any(p.finished or p.faulty or p.renew for p in b.workers) and b.deadline == 0.0
    return b.deadline == (max(a.deadline, NOW + LAST_CALL_S) if a.deadline else 0.0)


# ---------------------------------------------------------------- level 2


def _broken(s: Status) -> list[Worker]:
    return [p for p in s.workers if p.renew]


def _renewal(e: Edge) -> bool:
    """Broken surroundings are answered by a clean process, once; the same finding again by other rules."""
    a, b = e.before, e.transition.status
    due = turn(e, Phase.TROUBLESHOOTING) and _done(a) and not (lost(a) or a.held or exceeded(a))
    if not due or any(p.faulty for p in a.workers) or relieved(a) or not _broken(a):
        return _name(e) != "renew" and not any(isinstance(x, Renew) for x in e.transition.effects)
    renewed = [(x.worker, x.uid) for x in e.transition.effects if isinstance(x, Renew)]
    io = [p for p in a.workers if p.renew.startswith("io.")]
    if len(io) == len(a.workers) > 1:
        return b.phase is a.phase and not _broken(b) and not e.transition.effects
    if a.renewed:
        return not renewed and _again_broken(e, io)
    if a.entries >= a.spec.recovery_budget:
        return b.phase is Phase.FAILED and not renewed
    gone = [(p.name, p.uid, p.retries) for p in b.workers if p.gone and p.renew]
    return (
        b.phase is Phase.RESTARTING
        and renewed == [(p.name, p.uid) for p in _broken(a)]
        and gone == [(p.name, p.uid, p.retries) for p in _broken(a)]
        and all(p.inner_phase is Phase.RESTARTING and not p.finished for p in b.workers if p.renew)
        and (b.entries, b.renewed, b.last_level) == (a.entries + 1, True, 2)
        and b.recover_count == a.recover_count
    )


def _again_broken(e: Edge, io: list[Worker]) -> bool:
    a, b = e.before, e.transition.status
    pages = [x for x in e.transition.effects if isinstance(x, Page)]
    nodes = len(io) == len(_broken(a)) < len(a.workers) and all(_spared(a, p.node_name) for p in io)
    if nodes:
        return (
            not pages and not _broken(b) and [p.name for p in b.workers if p.faulty] == [p.name for p in io]
        )
    return len(pages) == 1 and not _broken(b) and not any(p.faulty for p in b.workers) and b.phase is a.phase


def _renewed_comes_back(e: Edge) -> bool:
    """A worker that comes back is a clean process: its `renew` is cleared."""
    now = e.transition.status.worker(e.move.worker)
    was = e.before.worker(e.move.worker)
    if e.move.label != "Join" or was is None or now is None or not was.gone or e.transition.effects:
        return True
    return not now.renew and now.restarted == was.restarted


def _failed_again(e: Edge) -> bool:
    """The same worker again, and training got no further: level 2, and then a page."""
    a, b = e.before, e.transition.status
    if _name(e) != "error":
        return True
    root = next(p.name for p in a.workers if p.failed)
    again = a.last_root == root and a.highest_step >= 0 and a.highest_step <= a.last_step
    level = a.last_level if again and recovery.POSITION_CLUE not in a.clues else 0
    renews = level == 1 or (level == 0 and recovery.CONTAINER_CLUE in a.clues)
    pages = [x for x in e.transition.effects if isinstance(x, Page)]
    wanted = [p.name for p in b.workers if p.renew]
    return (
        wanted == ([root] if renews else [])
        and len(pages) == (level == 2)
        and b.last_level == (2 if level == 2 else 1)
        and (b.last_root, b.last_step) == (root, a.highest_step)
    )


def _broken_is_noted(e: Edge) -> bool:
    was, now = e.before.worker(e.move.worker), e.transition.status.worker(e.move.worker)
    if not e.move.label.startswith("Finish") or was is None or now is None or was.finished:
        return True
    found = e.move.label in ("FinishBroken", "FinishBrokenIo") and e.before.phase is Phase.TROUBLESHOOTING
    return e.before.phase in TERMINAL or bool(now.renew) == (found or bool(was.renew and not _checks(e)))


def _checks(e: Edge) -> bool:
    """Whether this Finish has checks with findings."""
    return e.move.label != "Finish" and e.before.phase is Phase.TROUBLESHOOTING


# ---------------------------------------------------------------- nodes


def _taint_is_noted(e: Edge) -> bool:
    a, b, node = e.before, e.transition.status, e.move.worker
    if e.move.label not in ("Taint", "Untaint") or a.phase in TERMINAL:
        return e.move.label != "TaintAgain" or b is a

    def others(nodes: tuple[ErrorNode, ...]) -> list[str]:
        return sorted(n.node_name for n in nodes if n.node_name != node)

    kept = others(a.error_nodes) == others(b.error_nodes)
    there = any(n.node_name == node for n in b.error_nodes)
    if e.move.label == "Untaint":
        return kept and not there and b.spares == a.spares
    dismissed = [(x.worker, x.uid) for x in e.transition.effects if isinstance(x, Dismiss)]
    waiting = [(p.name, p.uid) for p in a.spares if p.node_name == node]
    return kept and there and dismissed == waiting and not any(p.node_name == node for p in b.spares)


def _fit_is_noted(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if e.move.label != "Fit" or a.phase in TERMINAL:
        return True
    pairs = zip(a.spares, b.spares, strict=True)
    return all(now.fit == (was.fit ^ (was.name == e.move.worker)) for was, now in pairs)


REMEDIES: dict[str, StepProperty] = {
    "NoEarlyEvict": _no_early_evict,
    "NoSuicidalEvict": _no_suicidal_evict,
    "EvictsWhenItMay": _evicts_when_it_may,
    "EvictionIsFree": _eviction_is_free,
    "MarkIsOfNode": _mark_is_of_node,
    "ActIsAnError": _act_is_an_error,
    "SavedIsNoted": _saved_is_noted,
    "ProgressIsNoted": _progress_is_noted,
    "HoldIsNoted": _hold_is_noted,
    "RefundOnce": _refund_once,
    "HeldWaits": _held_waits,
    "RenewOnce": _renewal,
    "RenewedComesBack": _renewed_comes_back,
    "FailedAgain": _failed_again,
    "BrokenIsNoted": _broken_is_noted,
    "TaintIsNoted": _taint_is_noted,
    "FitIsNoted": _fit_is_noted,
}


# ---------------------------------------------------------------- what holds in every status


def _nothing_pending(s: Status) -> bool:
    """Charges, holds and renewals belong to a recovery; while ranks run none is left."""
    recovering = s.phase in RECOVERING
    free = not (s.charged or s.renewed or s.held or s.held_until)
    return recovering or s.phase in TERMINAL or (free and not any(p.renew or p.relieve for p in s.workers))


def _charged_stands_higher(s: Status) -> bool:
    top = max((p.retries for p in s.workers), default=0)
    if s.phase not in RECOVERING:
        return True
    return top >= 1 if s.charged else top == s.recover_count


def _renewing_is_away(s: Status) -> bool:
    """Between its old process and its new one a renewing worker has no agent, and is waited for."""
    return s.phase is not Phase.RESTARTING or all(
        not (p.renew and p.gone) or p.restarted or (not p.finished and s.deadline > 0.0) for p in s.workers
    )


REMEDY_INVARIANTS: dict[str, Callable[[Status], bool]] = {
    "NothingPendingWhileRunning": _nothing_pending,
    "ChargedStandsHigher": _charged_stands_higher,
    "RenewingIsAway": _renewing_is_away,
}
