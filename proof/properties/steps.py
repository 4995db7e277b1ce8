"""What must hold of every decision, seen from the status before and after it.

A predicate gets an `Edge`: the canonical status before, the move, and the transition as production gave it.
"""

from __future__ import annotations

from collections.abc import Callable

from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import Close, Dismiss, Publish
from aegis_elastic.core.model import BOOTING, RECOVERING, TERMINAL, Phase, Status, Worker
from aegis_elastic.core.rank_assignment import first_order
from proof.explore import Edge
from proof.properties.invariants import exceeded
from proof.worlds import NOW, protected

StepProperty = Callable[[Edge], bool]

CHECKED = (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING)


def decides(e: Edge) -> bool:
    """Whether this edge may decide: the controller's turn, or a merged decision of the agents."""
    return e.move.label in ("Reconcile", "Independent", "IndependentEnd")


def moved(e: Edge) -> bool:
    return e.transition.status.phase is not e.before.phase


def lost(s: Status) -> list[Worker]:
    return [worker for worker in s.workers if worker.restarted]


def entered(e: Edge, phase: Phase) -> bool:
    return moved(e) and e.transition.status.phase is phase


def turn(e: Edge, *phases: Phase) -> bool:
    """The controller's turn in one of these phases, with no quit pending."""
    return e.move.label == "Reconcile" and e.before.phase in phases and not e.before.should_quit


def _terminal_absorbing(e: Edge) -> bool:
    if e.before.phase not in TERMINAL:
        return True
    newcomer = e.move.label in ("Join", "Restart")
    return e.transition.status is e.before and [type(x) for x in e.transition.effects] == [Dismiss] * newcomer


def _facts_dont_decide(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if decides(e) or e.move.label == "Expire":
        return True
    if e.move.label == "Saved" and a.spec.retry_decay:
        return True  # the retry that it earns is a property of its own
    # The cluster's taints are no decision of this job.
    tainted = {"error_nodes"} if e.move.label in ("Taint", "Untaint") else set()
    same = all(
        getattr(a, name) == getattr(b, name)
        for name in (
            "phase",
            "recover_count",
            "seq_num",
            "incarnation",
            "entries",
            "deadline",
            "error_nodes",
            "mode",
        )
        if name not in tainted
    )
    return same and [p.retries for p in a.workers] == [p.retries for p in b.workers]


def _seq_monotonic(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    orders = [x for x in e.transition.effects if isinstance(x, Publish)]
    before = {worker.name: worker for worker in a.workers}
    again = any(before[p.name].finished and not p.finished for p in b.workers if p.name in before)
    needed = moved(e) or again or a.incarnation != b.incarnation or a.mode is not b.mode
    return (
        len(orders) <= 1
        and b.seq_num == a.seq_num + len(orders)
        and all(x.seq_num == b.seq_num for x in orders)
        and (bool(orders) or not needed)
    )


def _effects_carry_transition(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    grown = a.step if e.move.event is None or b is a else a.step + 1
    return b.step == grown and all(x.step == b.step for x in e.transition.effects)


def _reason_given(e: Edge) -> bool:
    return bool(e.transition.reason) and bool(e.transition.name)


def _count_only_in_run(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if a.phase is Phase.RUN_COMMAND and decides(e):
        return True
    then = {worker.name: worker.retries for worker in a.workers}
    if gives_back(e):
        return True
    if b.phase is Phase.FAILED:
        return all(p.retries == then[p.name] for p in b.workers)
    if entered(e, Phase.RUN_COMMAND):
        return b.recover_count == a.recover_count and all(p.retries == a.recover_count for p in b.workers)
    # A spare brings no retries of its own; those counted stay with the group rank.
    return b.recover_count == a.recover_count and max((p.retries for p in b.workers), default=0) == max(
        then.values(), default=0
    )


def gives_back(e: Edge) -> bool:
    """Whether this step may lower a worker's retries; `proof.properties.remedies` bounds that."""
    return e.transition.name == "refund" or (e.move.label == "Saved" and e.before.spec.retry_decay > 0)


def _one_bump(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if gives_back(e):
        return b.recover_count in (a.recover_count - 1, a.recover_count)
    if b.phase is Phase.FAILED:
        return b.recover_count in (a.recover_count, a.spec.max_retry + 1)
    counted = a.phase is Phase.RUN_COMMAND and b.phase in RECOVERING and e.transition.name != "evict"
    merged = e.transition.name == "merged" and a.phase is Phase.RUN_COMMAND
    return b.recover_count == min(a.recover_count + (counted or merged), a.spec.max_retry)


def _charged(e: Edge, who: set[str]) -> bool:
    """Exactly these workers were charged once; a spare takes over the retries of the worker it replaces."""
    a, b = e.before, e.transition.status
    then = [p.retries + (p.name in who) for p in a.workers]
    return [min(n, a.spec.max_retry + 1) for n in then] == [p.retries for p in b.workers[: len(a.workers)]]


def _loss_counted(e: Edge) -> bool:
    if not turn(e, Phase.RUN_COMMAND) or not lost(e.before):
        return True
    b = e.transition.status
    who = {p.name for p in lost(e.before)}
    named = b.root != "" and all(p.last_failed_reason for p in b.workers if p.name in who)
    remembered = b.charged and b.last_root == ""
    return b.phase is Phase.RESTARTING and b.entries == 1 and named and _charged(e, who) and remembered


def _error_counted(e: Edge) -> bool:
    failed = {p.name for p in e.before.workers if p.failed}
    if not turn(e, Phase.RUN_COMMAND) or lost(e.before) or not failed:
        return True
    b = e.transition.status
    return b.phase is Phase.TROUBLESHOOTING and b.entries == 0 and _charged(e, failed) and b.charged


def _loss_in_recovery(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if not turn(e, *RECOVERING) or not lost(a):
        return True
    if a.entries >= a.spec.recovery_budget:
        judged = not lost(b) and [p.retries for p in a.workers] == [p.retries for p in b.workers]
        return b.phase is Phase.FAILED and judged
    return b.phase is Phase.RESTARTING and b.entries == a.entries + 1 and _charged(e, set())


def _only_lost_reset(e: Edge) -> bool:
    """Entering Restarting changes the missing workers only."""
    a, b = e.before, e.transition.status
    if e.move.label != "Reconcile" or e.transition.name != "lost" or b.phase is not Phase.RESTARTING:
        return True
    for was, now in zip(a.workers, b.workers, strict=True):
        if now.name != was.name or was.restarted:
            fresh = (now.finished, now.restarted, now.failed, now.faulty, now.store) == (
                False,
                False,
                False,
                "",
                "",
            )
            if not fresh or now.inner_phase is not Phase.RESTARTING or now.updated_timestamp != NOW:
                return False
        elif (was.finished, was.inner_phase, was.gone, was.faulty, was.store) != (
            now.finished, now.inner_phase, now.gone, now.faulty, now.store,
        ) or now.failed:  # fmt: skip
            return False
    return True


def _loss_while_booting(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if not turn(e, *BOOTING) or not lost(a) or not protected(a):
        return True
    ready = a.phase is Phase.BOOT_CHECKING
    finished = [not p.restarted and (ready or p.finished) for p in a.workers]
    clean = all(
        p.inner_phase is Phase.PENDING and not (p.failed or p.faulty or p.restarted) for p in b.workers
    )
    waits = b.deadline == (a.deadline if a.deadline and not ready else NOW + a.spec.join_timeout_s)
    empty = all(
        p.store == "" and p.updated_timestamp == NOW
        for p, q in zip(b.workers, a.workers, strict=True)
        if q.restarted
    )
    return (
        b.phase is Phase.PENDING and [p.finished for p in b.workers] == finished and clean and waits and empty
    )


def _exceeded_is_final(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    return (
        not exceeded(a)
        or e.transition.name == "refund"
        or (exceeded(b) and b.phase is not Phase.RUN_COMMAND and b.phase is not Phase.SUCCEED)
    )


def _failed_after_diagnosis(e: Edge) -> bool:
    """Retries used up: the job fails at the end of the troubleshooting of the last failure."""
    a = e.before
    if not (turn(e, Phase.TROUBLESHOOTING) and exceeded(a)) or lost(a) or a.held:
        return e.transition.name != "exceeded"
    done = all(p.finished for p in a.workers)
    return entered(e, Phase.FAILED) == done and (not done or e.transition.name == "exceeded")


def _quit_is_obeyed_at_once(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if a.phase in TERMINAL or not a.should_quit or e.move.label != "Reconcile":
        return True
    return b.phase is Phase.FAILED and b.fail_reason == a.fail_reason and b.recover_count == a.recover_count


def _failed_why(e: Edge) -> bool:
    """Failed is entered for one of the reasons that the specification knows."""
    a = e.before
    if not entered(e, Phase.FAILED):
        return True
    return {
        "quit": a.should_quit,
        "exceeded": exceeded(a),
        "lost": a.entries == a.spec.recovery_budget,
        "leave": a.entries == a.spec.recovery_budget,
        "renew": a.entries == a.spec.recovery_budget,
        "release": a.entries == a.spec.recovery_budget,
        "boot_failed": a.phase is Phase.BOOT_CHECKING and any(p.failed for p in a.workers),
        "overdue": a.phase is Phase.RESTARTING and any(p.gone for p in a.workers),
        "independent_end": not protected(a),
        "merged": e.move.label.startswith("Independent"),
    }.get(e.transition.name, False)


def _boot_before_run(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    allowed = {
        Phase.PENDING: {Phase.PENDING, Phase.BOOT_CHECKING} | TERMINAL,
        Phase.BOOT_CHECKING: {Phase.BOOT_CHECKING, Phase.PENDING, Phase.RUN_COMMAND, Phase.FAILED},
        Phase.RUN_COMMAND: {Phase.RUN_COMMAND, Phase.RESTARTING, Phase.TROUBLESHOOTING} | TERMINAL,
        Phase.RESTARTING: {Phase.RESTARTING, Phase.TROUBLESHOOTING, Phase.FAILED},
        Phase.TROUBLESHOOTING: {Phase.TROUBLESHOOTING, Phase.RUN_COMMAND, Phase.RESTARTING, Phase.FAILED},
    }
    return a.phase in TERMINAL or b.phase in allowed[a.phase]


def _clean(worker: Worker) -> bool:
    return worker.finished and not (worker.restarted or worker.failed or worker.faulty or worker.renew)


def relieved(s: Status) -> list[str]:
    """The nodes that fit spares would relieve now, which is a preference only."""
    nodes = list(dict.fromkeys(p.node_name for p in s.workers if p.relieve))
    to_replace = [p for p in s.workers if p.node_name in nodes]
    fit = [p for p in s.spares if p.fit and p.node_name not in nodes]
    broken = any(p.faulty for p in s.workers) or exceeded(s) or s.held or s.entries >= s.spec.recovery_budget
    due = (
        s.phase is Phase.TROUBLESHOOTING and not broken and not lost(s) and all(p.finished for p in s.workers)
    )
    return nodes if due and len(fit) >= len(to_replace) else []


def _advance(e: Edge) -> bool:
    """The job goes on when, and only when, all have finished and nothing forbids it."""
    a, b = e.before, e.transition.status
    if not turn(e, *CHECKED, Phase.RUN_COMMAND):
        return True
    free = (
        bool(a.workers) and all(_clean(p) for p in a.workers) and not (a.phase in RECOVERING and exceeded(a))
    )
    free = free and not a.held and not relieved(a)
    onward = Phase.SUCCEED if a.phase is Phase.RUN_COMMAND else Phase.RUN_COMMAND
    return (b.phase is onward and moved(e)) == free


def _forms(e: Edge) -> bool:
    """Bootcheck begins with the whole world, or when the last call for the missing is over."""
    a = e.before
    if not turn(e, Phase.PENDING) or not protected(a):
        return not entered(e, Phase.BOOT_CHECKING)
    short = sum(not p.gone for p in a.workers) < a.spec.worker_num
    ready = bool(a.workers) and all(p.finished for p in a.workers) and not lost(a)
    full = len(a.workers) == a.spec.worker_num or a.deadline == 0.0
    expired = 0.0 < a.deadline <= NOW
    return entered(e, Phase.BOOT_CHECKING) == (ready and full and not (a.spares and short) and not expired)


def awaited(s: Status, worker: Worker) -> bool:
    """A worker that a spare may replace: gone, and its agent not on its way as a clean process."""
    return worker.gone and (not worker.renew or 0.0 < s.deadline <= NOW)


def _ready_when_back(e: Edge) -> bool:
    """Restarting waits for the missing workers, and for no others."""
    a = e.before
    if e.transition.name in ("refund", "release"):
        return not moved(e) or e.transition.status.phase is Phase.FAILED
    if not turn(e, Phase.RESTARTING) or lost(a):
        return not entered(e, Phase.TROUBLESHOOTING) or a.phase is Phase.RUN_COMMAND
    back = all(p.finished for p in a.workers if p.inner_phase is Phase.RESTARTING)
    replaceable = bool(a.spares) and any(awaited(a, p) for p in a.workers)
    return entered(e, Phase.TROUBLESHOOTING) == (back and not replaceable)


def _fresh_phase(e: Edge) -> bool:
    """A new phase starts fresh: no worker has finished it, no fact is pending."""
    b = e.transition.status
    if not moved(e) or b.phase not in (*CHECKED, Phase.RUN_COMMAND) or e.transition.name == "merged":
        return True
    return all(
        p.inner_phase is b.phase
        and (p.finished, p.failed, p.faulty, p.store) == (False, False, "", "")
        and p.restarted == (p.gone and b.phase is Phase.TROUBLESHOOTING)
        and p.updated_timestamp == NOW
        for p in b.workers
    )


def _incarnation_grows(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    starts = entered(e, Phase.RUN_COMMAND) or (e.transition.name == "merged" and b.phase is Phase.RUN_COMMAND)
    return b.incarnation == a.incarnation + starts


def _order_is_complete(e: Edge) -> bool:
    """An order to form a process group hands out the first worker's store, and names the checks to run."""
    a, b = e.before, e.transition.status
    if not moved(e) or e.transition.name == "merged":
        # The agents that restarted among themselves have a store already.
        return not moved(e) or b.store == ""
    if b.phase is Phase.BOOT_CHECKING:
        if [p.name for p in b.workers] != [p.name for p in first_order(a.workers)]:
            return False
        wanted = (first_order(a.workers)[0].store, recovery.BOOT_CHECKS[a.spec.bootcheck])
        return (b.store, b.checks) == wanted
    if b.phase is Phase.TROUBLESHOOTING:
        return (b.store, b.checks) == (
            a.workers[0].store,
            recovery.plan_checks(a.spec.troubleshoot, a.clues)[0],
        )
    if b.phase is Phase.RUN_COMMAND:
        return (b.store, b.checks, b.clues, b.root) == (a.workers[0].store, (), (), "")
    return b.store == ""


def _ends_closed(e: Edge) -> bool:
    b = e.transition.status
    closes = [x for x in e.transition.effects if isinstance(x, Close)]
    if not (moved(e) and b.phase in TERMINAL):
        return not closes
    right = [(x.outcome, x.reason) for x in closes] == [(b.phase.value, e.transition.reason)]
    return right and all(p.inner_phase is b.phase for p in b.workers)


def _table_is_honest(e: Edge) -> bool:
    """Every decision is a rule of the table, and leads where the table says."""
    a, b = e.before, e.transition.status
    if e.move.label != "Reconcile" or a.phase in TERMINAL:
        return True
    if e.transition.name == "wait":
        return b is a
    names = {"shrink": "overdue", "independent": "overdue"}
    name = names.get(e.transition.name, e.transition.name)
    return any(rule.name == name and a.phase in rule.phases and b.phase in rule.to for rule in e.rules)


STEPS: dict[str, StepProperty] = {
    "TerminalAbsorbing": _terminal_absorbing,
    "FactsDontDecide": _facts_dont_decide,
    "MasterSeqNumMonotonic": _seq_monotonic,
    "EffectsCarryTheirTransition": _effects_carry_transition,
    "ReasonGiven": _reason_given,
    "CountOnlyInRun": _count_only_in_run,
    "OneBump": _one_bump,
    "LossIsCounted": _loss_counted,
    "ErrorIsCounted": _error_counted,
    "LossInRecoveryIsBounded": _loss_in_recovery,
    "OnlyLostAreReset": _only_lost_reset,
    "LossWhileBooting": _loss_while_booting,
    "ExceededIsFinal": _exceeded_is_final,
    "FailedAfterDiagnosis": _failed_after_diagnosis,
    "QuitAtOnce": _quit_is_obeyed_at_once,
    "FailedForAKnownReason": _failed_why,
    "BootBeforeRun": _boot_before_run,
    "AdvanceWhenAllFinished": _advance,
    "FormsWhenComplete": _forms,
    "ReadyWhenMissingAreBack": _ready_when_back,
    "FreshPhase": _fresh_phase,
    "IncarnationGrows": _incarnation_grows,
    "OrderIsComplete": _order_is_complete,
    "EndIsClosed": _ends_closed,
    "TableIsHonest": _table_is_honest,
}
