"""When a rule applies: questions about a status (and the time), answered without changing anything."""

from __future__ import annotations

from aegis_elastic.core import accounting
from aegis_elastic.core.machine.change import is_independent
from aegis_elastic.core.model import Phase, Status


def has_restarted(s: Status, now: float) -> bool:
    return any(pod.restarted for pod in s.pods)


def all_finished(s: Status, now: float) -> bool:
    return bool(s.pods) and all(pod.finished for pod in s.pods)


def boot_failed(s: Status, now: float) -> bool:
    return all_finished(s, now) and any(pod.failed for pod in s.pods)


def exceeded(s: Status, now: float) -> bool:
    return all_finished(s, now) and accounting.exceeded((pod.retries for pod in s.pods), s.spec.max_retry)


def can_seat(s: Status, now: float) -> bool:
    if not s.spares or is_independent(s):
        return False
    if s.phase is Phase.PENDING:
        return sum(not pod.gone for pod in s.pods) < s.spec.worker_num
    return any(pod.gone for pod in s.pods)


def last_call(s: Status, now: float) -> bool:
    enough = s.spec.min_worker_num <= len(s.pods) < s.spec.worker_num
    return enough and all_finished(s, now) and s.deadline > now + s.spec.last_call_s


def overdue(s: Status, now: float) -> bool:
    waiting = s.phase is Phase.PENDING or any(pod.gone for pod in s.pods)
    return waiting and not is_independent(s) and 0.0 < s.deadline <= now


def restarted_are_ready(s: Status, now: float) -> bool:
    return all(pod.finished for pod in s.pods if pod.inner_phase is Phase.RESTARTING)


def may_advance(s: Status, now: float) -> bool:
    if not all_finished(s, now):
        return False
    # In Pending the world is complete, or the last call is over (deadline 0 after `shrink`).
    return s.phase is not Phase.PENDING or len(s.pods) == s.spec.worker_num or s.deadline == 0.0


def lost_booting(s: Status, now: float) -> bool:
    return has_restarted(s, now) and not is_independent(s)


def has_failed(s: Status, now: float) -> bool:
    return any(pod.failed for pod in s.pods)


def must_leave(s: Status, now: float) -> bool:
    return all_finished(s, now) and any(pod.faulty for pod in s.pods)


def independent_over(s: Status, now: float) -> bool:
    over = bool(s.pods) and all(pod.finished or pod.gone for pod in s.pods)
    return is_independent(s) and (over or any(pod.failed for pod in s.pods))
