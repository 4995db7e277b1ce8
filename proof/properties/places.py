"""What must hold of every step that concerns rank assignment, nodes, waiting, and independent mode."""

from __future__ import annotations

from aegis_elastic.core.events import Dismiss, RecordErrorNode
from aegis_elastic.core.model import BOOTING, TERMINAL, Phase, Status
from proof.explore import Edge
from proof.properties.invariants import exceeded
from proof.properties.steps import CHECKED, StepProperty, awaited, entered, lost, relieved, turn
from proof.worlds import NOW, protected

# What enters Restarting, anew or again.
ENTRIES = ("lost", "leave", "seat", "evict", "relieve", "renew")


def _nodes_banished(e: Edge) -> bool:
    """A node is isolated for a failing check only; it is recorded, and its agents dismissed, in the same
    step.
    """
    a, b = e.before, e.transition.status
    if e.move.label != "Reconcile":
        return e.move.label in ("Taint", "Untaint") or a.error_nodes == b.error_nodes
    leaves = e.transition.name in ("leave", "exceeded")
    bad = _bad_nodes(a) if leaves else evicted(e)
    kinds = {"slow", "hang"} if evicted(e) else {"hardware"}
    recorded = [x.node_name for x in e.transition.effects if isinstance(x, RecordErrorNode)]
    dismissed = [(x.worker, x.uid) for x in e.transition.effects if isinstance(x, Dismiss)]
    new = b.error_nodes[len(a.error_nodes) :]
    gone = bad or departed(e)
    return (
        recorded == bad == [n.node_name for n in new]
        and dismissed == [(p.name, p.uid) for p in (*a.workers, *a.spares) if p.node_name in gone]
        and b.error_nodes[: len(a.error_nodes)] == a.error_nodes
        and all(n.time == NOW and n.kind in kinds and n.reason for n in new)
    )


def evicted(e: Edge) -> list[str]:
    """The node that leaves in this step although nothing of it is broken."""
    if e.transition.name != "evict" or e.transition.status.phase is e.before.phase:
        return []
    return [n.node_name for n in e.transition.status.error_nodes if n not in e.before.error_nodes]


def departed(e: Edge) -> list[str]:
    """The nodes that leave in this step, for whatever reason."""
    if e.transition.name == "relieve":
        return relieved(e.before)
    return _bad_nodes(e.before) if e.transition.name == "leave" else evicted(e)


def _bad_nodes(s: Status) -> list[str]:
    return list(dict.fromkeys(p.node_name for p in s.workers if p.faulty))


def _faulty_leaves(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    done = bool(a.workers) and all(p.finished for p in a.workers) and not lost(a)
    # All workers of a faulty node leave with it.
    faulty = {p.name for p in a.workers if p.node_name in _bad_nodes(a)}
    if any(p.node_name in _bad_nodes(a) for p in b.spares) and e.transition.name == "leave":
        return b.phase is Phase.FAILED
    if not turn(e, *CHECKED) or not done or not faulty or exceeded(a) or a.held:
        return e.transition.name != "leave"
    if a.phase is Phase.BOOT_CHECKING:
        stayed = [p.name for p in b.workers] == [p.name for p in a.workers if p.name not in faulty]
        clean = all(p.finished and not p.failed and p.inner_phase is Phase.PENDING for p in b.workers)
        return b.phase is Phase.PENDING and stayed and clean and b.deadline == NOW + a.spec.join_timeout_s
    if a.entries >= a.spec.recovery_budget:
        return b.phase is Phase.FAILED
    free = all(
        p.name not in faulty
        or (p.gone and p.inner_phase is Phase.RESTARTING and not (p.uid or p.finished or p.faulty))
        for p in b.workers
    )
    return (
        b.phase is Phase.RESTARTING and b.entries == a.entries + 1 and free and b.reschedules == len(faulty)
    )


def _short_world_is_filled(e: Edge) -> bool:
    """Spares take part from the next recovery on, as far as the world is short, the oldest first."""
    a, b = e.before, e.transition.status
    if not entered(e, Phase.TROUBLESHOOTING):
        return True
    missing = max(a.spec.worker_num - len(a.workers), 0)
    joined = [p.name for p in b.workers[len(a.workers) :]] == [p.name for p in a.spares[:missing]]
    return joined and b.spares == a.spares[missing:]


def _seats_kept(e: Edge) -> bool:
    """Ranks stay: a group rank keeps its worker, or goes to a spare when its agent is gone."""
    a, b = e.before, e.transition.status
    if a.phase in BOOTING or e.transition.name == "shrink":
        return True
    spares = {p.name for p in a.spares}
    for i, was in enumerate(a.workers):
        empty = was.gone or was.node_name in departed(e)
        if b.workers[i].name != was.name and not (empty and b.workers[i].name in spares):
            return False
    return {p.name for p in b.workers[len(a.workers) :]} <= spares and len(b.workers) <= max(
        len(a.workers), a.spec.worker_num
    )


def _nobody_vanishes(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    here = {p.name for p in (*b.workers, *b.spares)}
    bad = departed(e)
    if e.move.label == "Taint":
        bad = [e.move.worker]  # only spares: for the workers FactsAreLocal says so
    gone = {p.name for p in a.workers if p.gone or p.restarted}
    gone |= {p.name for p in (*a.workers, *a.spares) if p.node_name in bad}
    late = (
        {p.name for p in a.workers if not p.finished}
        if e.transition.name in ("shrink", "independent")
        else set()
    )
    left = {e.move.worker} if e.move.label == "Lost" else set()
    return {p.name for p in (*a.workers, *a.spares)} - here <= gone | late | left


def _spares_step_in(e: Edge) -> bool:
    """No rank is without a worker while a spare waits."""
    a, b = e.before, e.transition.status
    if e.move.label != "Reconcile" or b.phase is not Phase.RESTARTING:
        return True
    if e.transition.name in ENTRIES:
        return not (b.spares and any(p.gone and not p.renew for p in b.workers))
    waits = a.held or e.transition.name in ("shrink", "refund", "release")
    return bool(waits) or not (a.spares and any(awaited(a, p) for p in a.workers))


def _waits_as_told(e: Edge) -> bool:
    """Entering Restarting waits for the gone: long if too few are left without them, else a last call."""
    a, b = e.before, e.transition.status
    if e.move.label != "Reconcile" or b.phase is not Phase.RESTARTING or e.transition.name not in ENTRIES:
        return True
    if not any(p.gone for p in b.workers):
        return b.deadline == 0.0
    enough = sum(not p.gone for p in b.workers) >= a.spec.min_worker_num
    patience_s = a.spec.last_call_s if enough else a.spec.rejoin_timeout_s
    coming = any(p.gone and p.renew for p in b.workers)
    return b.deadline == NOW + (max(patience_s, 120.0) if coming else patience_s)


def _seated(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if not turn(e, Phase.PENDING, Phase.RESTARTING) or lost(a) or not protected(a) or not a.spares:
        return e.transition.name != "seat"
    wanted = (
        sum(not p.gone for p in a.workers) < a.spec.worker_num
        if a.phase is Phase.PENDING
        else any(awaited(a, p) for p in a.workers)
    )
    if e.transition.name in ("refund", "release"):
        return b.spares == a.spares
    if not wanted:
        return e.transition.name != "seat"
    if a.phase is Phase.PENDING:
        stay = [p.name for p in a.workers if not p.gone]
        return [p.name for p in b.workers] == [*stay, a.spares[0].name] and b.spares == a.spares[1:]
    return b.entries == a.entries and _fit_first(a, b)


def _fit_first(a: Status, b: Status) -> bool:
    """Spares that passed their checks are taken first, the others in order."""
    line = [p.name for p in a.spares if p.fit] + [p.name for p in a.spares if not p.fit]
    seated = set(line[: len(a.spares) - len(b.spares)])
    return [p.name for p in b.spares] == [p.name for p in a.spares if p.name not in seated]


def _overdue(e: Edge) -> bool:
    """The deadline is over: on without the missing if enough are present; else the end, or standalone."""
    a, b = e.before, e.transition.status
    earlier_rule = e.transition.name in ("seat", "refund", "release") or bool(a.held)
    if (
        not turn(e, Phase.PENDING, Phase.RESTARTING)
        or lost(a)
        or not protected(a)
        or earlier_rule
        or entered(e, Phase.TROUBLESHOOTING)
    ):
        return e.transition.name not in ("shrink", "overdue", "independent")
    waiting = a.phase is Phase.PENDING or any(p.gone for p in a.workers)
    if not (waiting and 0.0 < a.deadline <= NOW):
        return e.transition.name not in ("shrink", "overdue", "independent")
    here = [p.name for p in a.workers if p.finished or (a.phase is Phase.RESTARTING and not p.gone)]
    if len(here) >= a.spec.min_worker_num:
        dropped = len(a.workers) - len(here)
        return (
            (e.transition.name, b.phase, b.deadline) == ("shrink", a.phase, 0.0)
            and [p.name for p in b.workers] == here
            and b.reschedules == dropped
        )
    if a.phase is Phase.RESTARTING:
        return b.phase is Phase.FAILED
    return (
        not protected(b)
        and b.phase is Phase.PENDING
        and b.deadline == 0.0
        and [p.name for p in b.workers] == here
    )


def _last_call(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if e.transition.name != "last_call":
        enough = a.spec.min_worker_num <= len(a.workers) < a.spec.worker_num and all(
            p.finished for p in a.workers
        )
        settled = bool(lost(a)) or e.transition.name in ("seat", "shrink", "advance")
        long = a.deadline > NOW + a.spec.last_call_s
        return not (turn(e, Phase.PENDING) and protected(a) and enough and long) or settled
    ready = a.phase is Phase.PENDING and all(p.finished for p in a.workers)
    return ready and NOW < b.deadline == NOW + a.spec.last_call_s < a.deadline


def _boot_failed(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    done = bool(a.workers) and all(p.finished for p in a.workers) and not lost(a)
    bad = any(p.failed for p in a.workers) and not any(p.faulty for p in a.workers)
    if not turn(e, Phase.BOOT_CHECKING) or not done or not bad:
        return e.transition.name != "boot_failed"
    if a.entries + 1 >= a.spec.bootcheck_attempts:
        return b.phase is Phase.FAILED
    ready = all(p.finished and p.inner_phase is Phase.PENDING and not p.failed for p in b.workers)
    return b.phase is Phase.PENDING and b.entries == a.entries + 1 and ready


def _independent_end(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if protected(a) or not turn(e, Phase.PENDING):
        return e.transition.name != "independent_end"
    failed = any(p.failed for p in a.workers)
    over = bool(a.workers) and all(p.finished or p.gone for p in a.workers)
    good = over and not failed and any(p.finished for p in a.workers)
    return (b.phase in TERMINAL) == (failed or over) and (b.phase is Phase.SUCCEED) == good


def _independence_stays(e: Edge) -> bool:
    """The mode changes only at the start of an incarnation: once independent, a job stays so."""
    a, b = e.before, e.transition.status
    return protected(a) or (not protected(b) and (b.phase in TERMINAL or a.seq_num == b.seq_num))


def _same_agents(s: Status) -> bool:
    """Whether this incarnation's agents can have restarted standalone."""
    if s.phase is Phase.TROUBLESHOOTING:
        return s.entries == 0 and not any(p.gone or p.restarted for p in s.workers)
    return s.phase is Phase.RUN_COMMAND


def _merged_once(e: Edge) -> bool:
    """A standalone restart of the agents: charged once, if it hasn't been yet; losses stay recorded."""
    a, b = e.before, e.transition.status
    if not e.move.label.startswith("Independent") or a.phase in TERMINAL:
        return e.transition.name != "merged"
    if not _same_agents(a):
        return b is a
    new = a.phase is Phase.RUN_COMMAND
    charged = [p.retries + (new and p.name == e.move.worker) for p in a.workers]
    if max(charged) > a.spec.max_retry or e.move.label == "IndependentEnd":
        return b.phase is Phase.FAILED and [p.retries for p in b.workers] == charged
    kept = [(p.name, p.uid, p.gone, p.restarted or p.gone, p.store) for p in a.workers] == [
        (p.name, p.uid, p.gone, p.restarted, p.store) for p in b.workers
    ]
    fresh = all(
        not p.finished and not p.failed and not p.faulty and p.updated_timestamp == NOW for p in b.workers
    )
    has_reason = [p.last_failed_reason for p in b.workers if p.name == e.move.worker] == [
        getattr(e.move.event, "reason", "")
    ]
    aligned = has_reason and all(p.retries == b.recover_count == a.recover_count + new for p in b.workers)
    rested = (b.entries, b.deadline, b.checks, b.clues, b.root) == (0, 0.0, (), (), "")
    return b.phase is Phase.RUN_COMMAND and aligned and fresh and kept and rested


PLACES: dict[str, StepProperty] = {
    "BanishedAreRecorded": _nodes_banished,
    "FaultyLeave": _faulty_leaves,
    "ShortWorldIsFilled": _short_world_is_filled,
    "SeatsAreKept": _seats_kept,
    "NobodyVanishes": _nobody_vanishes,
    "SparesStepIn": _spares_step_in,
    "WaitsAsTold": _waits_as_told,
    "SeatsAreFilled": _seated,
    "OverdueIsDecided": _overdue,
    "LastCall": _last_call,
    "BootcheckIsBounded": _boot_failed,
    "IndependentEnds": _independent_end,
    "IndependenceStays": _independence_stays,
    "MergedOnce": _merged_once,
}
