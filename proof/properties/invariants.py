"""What must hold in every reachable status. The arithmetic is written out here again: a mutant of the
production's own must not be able to change the property that is to catch it.
"""

from __future__ import annotations

from collections.abc import Callable

from aegis_elastic.core.model import BOOTING, TERMINAL, Mode, Phase, Status
from aegis_elastic.core.protocol.orders import Action, derive_order

Invariant = Callable[[Status], bool]

# Workers that have not finished the newest order are still in the phase of the order before; only
# Restarting leaves the others there, because it resets the missing workers only.
_MAY_LAG = frozenset({Phase.RESTARTING, Phase.RUN_COMMAND, Phase.TROUBLESHOOTING})


def exceeded(s: Status) -> bool:
    """Some worker failed more often than the user allows."""
    return max((worker.retries for worker in s.workers), default=0) > s.spec.max_retry


def _largest(s: Status) -> int:
    return max((worker.retries for worker in s.workers), default=0)


def _phase_consistency(s: Status) -> bool:
    allowed = _MAY_LAG if s.phase is Phase.RESTARTING else frozenset({s.phase})
    return all(worker.finished or worker.inner_phase in allowed for worker in s.workers)


def _recover_count_bound(s: Status) -> bool:
    return 0 <= s.recover_count <= s.spec.max_retry + (s.phase is Phase.FAILED)


def _max_agrees(s: Status) -> bool:
    return s.phase in TERMINAL or s.recover_count == min(_largest(s), s.spec.max_retry)


def _aligned(s: Status) -> bool:
    if s.phase in BOOTING:
        return s.recover_count == 0 and all(worker.retries == 0 for worker in s.workers)
    return s.phase not in (Phase.RUN_COMMAND, Phase.SUCCEED) or all(
        worker.retries == s.recover_count for worker in s.workers
    )


def _failed_has_reason(s: Status) -> bool:
    return s.phase is not Phase.FAILED or bool(s.fail_reason)


def _over_limit_is_told(s: Status) -> bool:
    over = s.recover_count == s.spec.max_retry + 1
    return s.phase is not Phase.FAILED or over == (exceeded(s) and not s.should_quit)


def _bounded(s: Status) -> bool:
    return 0 <= s.entries <= s.spec.recovery_budget


def _one_error(s: Status) -> bool:
    failed = [worker for worker in s.workers if worker.failed]
    return s.phase is not Phase.RUN_COMMAND or len(failed) <= 1


def _never_run_on_black(s: Status) -> bool:
    black = {node.node_name for node in s.error_nodes}
    return s.phase is not Phase.RUN_COMMAND or not any(worker.node_name in black for worker in s.workers)


def _runs_with_enough(s: Status) -> bool:
    if s.phase not in (Phase.RUN_COMMAND, Phase.BOOT_CHECKING):
        return True
    return s.spec.min_worker_num <= len(s.workers) <= s.spec.worker_num


def _waiting_ends(s: Status) -> bool:
    """Waiting for a worker that isn't there is limited in time."""
    if s.phase is Phase.PENDING and s.mode is Mode.PROTECTED and not s.workers:
        return s.deadline > 0.0
    if s.phase is Phase.RESTARTING and any(
        worker.gone and not worker.restarted and not worker.finished for worker in s.workers
    ):
        return s.deadline > 0.0
    return True


def _rested(s: Status) -> bool:
    """While ranks run, and at the end, no recovery's deadline and no entry is left."""
    if s.phase in TERMINAL:
        return s.deadline == 0.0
    if s.phase is Phase.RUN_COMMAND:
        return s.deadline == 0.0 and s.entries == 0
    return s.phase not in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING) or s.deadline == 0.0


def _lost_is_marked(s: Status) -> bool:
    """A worker without an agent is marked: its loss is to be decided, or decided, or its ranks were done."""
    return all(
        not worker.gone
        or worker.restarted
        or worker.finished
        or s.phase not in (Phase.RUN_COMMAND, Phase.TROUBLESHOOTING)
        for worker in s.workers
    )


def _one_seat_each(s: Status) -> bool:
    everyone = [worker.name for worker in (*s.workers, *s.spares)]
    return len(everyone) == len(set(everyone)) and not any(spare.gone for spare in s.spares)


def _protected_training(s: Status) -> bool:
    return s.mode is Mode.PROTECTED or s.phase in TERMINAL or s.phase is Phase.PENDING


def _worker_seq_bound(s: Status) -> bool:
    order = derive_order(s)
    return (order.seq_num, order.incarnation) == (s.seq_num, s.incarnation) and (
        (order.action is Action.CLOSE) == (s.phase in TERMINAL)
    )


def _ends_honestly(s: Status) -> bool:
    """Succeed means that ranks finished, on every worker that has an agent left."""
    if s.phase is not Phase.SUCCEED:
        return True
    done = [worker.finished for worker in s.workers]
    return all(done) if s.mode is Mode.PROTECTED else any(done)


INVARIANTS: dict[str, Invariant] = {
    "ValidPhase": lambda s: s.phase in Phase,
    "ValidInnerPhase": lambda s: all(worker.inner_phase in Phase for worker in s.workers),
    "RecoverCountBound": _recover_count_bound,
    "RetriesBound": lambda s: all(0 <= worker.retries <= s.spec.max_retry + 1 for worker in s.workers),
    "PhaseConsistency": _phase_consistency,
    "WorkerSeqNumBound": _worker_seq_bound,
    "MaxAgrees": _max_agrees,
    "Aligned": _aligned,
    "NeverRunsExceeded": lambda s: s.phase is not Phase.RUN_COMMAND or not exceeded(s),
    "FailedHasReason": _failed_has_reason,
    "QuitIsNotExhaustion": _over_limit_is_told,
    "RecoveryBounded": _bounded,
    "OneErrorPerIncarnation": _one_error,
    "NeverRunOnBlack": _never_run_on_black,
    "EnoughWorkers": _runs_with_enough,
    "WaitingIsBounded": _waiting_ends,
    "NothingLeftStanding": _rested,
    "LossIsMarked": _lost_is_marked,
    "OneSeatPerWorker": _one_seat_each,
    "IndependentIsPending": _protected_training,
    "SuccessIsEarned": _ends_honestly,
}
