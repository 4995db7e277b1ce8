"""When a rule applies: questions about a status (and the time), answered without changing anything."""

from __future__ import annotations

from aegis_elastic.core import retry_accounts
from aegis_elastic.core.machine.change import is_independent, relieved_nodes
from aegis_elastic.core.model import NodeMark, Phase, Status, Verdict


def has_restarted(s: Status, now: float) -> bool:
    return any(worker.restarted for worker in s.workers)


def all_finished(s: Status, now: float) -> bool:
    return bool(s.workers) and all(worker.finished for worker in s.workers)


def boot_failed(s: Status, now: float) -> bool:
    return all_finished(s, now) and any(worker.failed for worker in s.workers)


def exceeded(s: Status, now: float) -> bool:
    over = retry_accounts.exceeded((worker.retries for worker in s.workers), s.spec.max_retry)
    return all_finished(s, now) and not s.held and over


def can_seat(s: Status, now: float) -> bool:
    # In independent mode only workers that join after all were cleared are taken in (`machine.platform`).
    if not s.spares or (is_independent(s) and not s.deadline):
        return False
    if s.phase is Phase.PENDING:
        return sum(not worker.gone for worker in s.workers) < s.spec.worker_num
    return any(worker.gone and (not worker.renew or expired(s, now)) for worker in s.workers)


def expired(s: Status, now: float) -> bool:
    return 0.0 < s.deadline <= now


def last_call(s: Status, now: float) -> bool:
    enough = s.spec.min_worker_num <= len(s.workers) < s.spec.worker_num
    return enough and all_finished(s, now) and s.deadline > now + s.spec.last_call_s


def overdue(s: Status, now: float) -> bool:
    waiting = s.phase is Phase.PENDING or any(worker.gone for worker in s.workers)
    return waiting and not s.held and not is_independent(s) and expired(s, now)


def restarted_are_ready(s: Status, now: float) -> bool:
    return all(worker.finished for worker in s.workers if worker.inner_phase is Phase.RESTARTING)


def may_advance(s: Status, now: float) -> bool:
    if not all_finished(s, now) or s.held:
        return False
    # In Pending the world is complete, or the last call is over (deadline 0 after `shrink`).
    return s.phase is not Phase.PENDING or len(s.workers) == s.spec.worker_num or s.deadline == 0.0


def lost_booting(s: Status, now: float) -> bool:
    return has_restarted(s, now) and not is_independent(s)


def has_failed(s: Status, now: float) -> bool:
    return any(worker.failed for worker in s.workers)


def must_leave(s: Status, now: float) -> bool:
    return all_finished(s, now) and not s.held and any(worker.faulty for worker in s.workers)


def to_renew(s: Status, now: float) -> bool:
    return all_finished(s, now) and not s.held and any(worker.renew for worker in s.workers)


def to_relieve(s: Status, now: float) -> bool:
    # It is a preference: its cost in entries must not end the job.
    affordable = s.entries < s.spec.recovery_budget
    return all_finished(s, now) and not s.held and affordable and bool(relieved_nodes(s))


def refund_is_due(s: Status, now: float) -> bool:
    return bool(s.held) and s.charged


def released(s: Status, now: float) -> bool:
    # Troubleshooting starts over, so the current one is finished first.
    done = s.phase is Phase.RESTARTING or all_finished(s, now)
    return bool(s.held) and s.held_until <= now and done


def leaving_mark(s: Status) -> NodeMark | None:
    """The mark whose node may leave now: the storm guard allows it, and a checkpoint if it is only slow."""
    seated = {worker.node_name for worker in s.workers}
    ready = (mark for mark in s.marks if mark.evict and (mark.safe or mark.verdict is not Verdict.SLOW))
    return next((mark for mark in ready if mark.node_name in seated), None)


def must_evict(s: Status, now: float) -> bool:
    return leaving_mark(s) is not None and not all_finished(s, now)


def independent_over(s: Status, now: float) -> bool:
    over = bool(s.workers) and all(worker.finished or worker.gone for worker in s.workers)
    return is_independent(s) and (over or any(worker.failed for worker in s.workers))
