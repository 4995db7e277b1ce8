"""Decisions of `Reconcile`: one function for each rule, each returns its reason."""

from __future__ import annotations

from typing import Any

from aegis_elastic.core import retry_accounts
from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import Page
from aegis_elastic.core.machine import conditions
from aegis_elastic.core.machine.change import (
    Transition,
    amend,
    edit,
    end,
    enter_restarting,
    enter_troubleshooting,
    fail,
    faulty_nodes,
    isolate_faulty_nodes,
    move,
    names_of,
    note,
    reset,
    starting,
)
from aegis_elastic.core.machine.requeue import give_up
from aegis_elastic.core.model import Mode, Phase, Status
from aegis_elastic.core.rank_assignment import first_order


def decide_quit(s: Status, now: float) -> Transition:
    return fail(s, s.fail_reason, "quit")


def decide_lost_running(s: Status, now: float) -> Transition:
    limit = s.spec.max_retry
    workers = tuple(
        reset(
            worker,
            Phase.RESTARTING,
            now,
            retries=retry_accounts.charge(worker.retries, limit),
            last_failed_reason="agent lost",
        )
        if worker.restarted
        else edit(worker, failed=False)
        for worker in s.workers
    )
    count = retry_accounts.recover_count((worker.retries for worker in workers), limit)
    names = names_of(worker for worker in s.workers if worker.restarted)
    return enter_restarting(
        s, now, f"{names} lost in RunCommand: counted", "lost", workers=workers, recover_count=count,
        root=names, charged=True, last_root="",
    )  # fmt: skip


def decide_lost_booting(s: Status, now: float) -> Transition:
    ready = s.phase is Phase.BOOT_CHECKING
    workers = tuple(
        reset(worker, Phase.PENDING, now)
        if worker.restarted
        else edit(
            worker, inner_phase=Phase.PENDING, finished=ready or worker.finished, failed=False, faulty=""
        )
        for worker in s.workers
    )
    reason = (
        f"{names_of(worker for worker in s.workers if worker.restarted)} lost before training: not counted"
    )
    # Losses while Pending don't move the deadline: a crash loop there must end.
    deadline = s.deadline if s.phase is Phase.PENDING and s.deadline else now + s.spec.join_timeout_s
    return move(s, Phase.PENDING, reason, "lost", workers=workers, deadline=deadline)


def decide_lost_recovering(s: Status, now: float) -> Transition:
    workers = tuple(
        reset(worker, Phase.RESTARTING, now) if worker.restarted else worker for worker in s.workers
    )
    reason = (
        f"{names_of(worker for worker in s.workers if worker.restarted)} lost during recovery: not counted"
    )
    return enter_restarting(s, now, reason, "lost", workers=workers)


def decide_leave(s: Status, now: float) -> Transition:
    """Faulty nodes leave with all their workers, which wait to be replaced by a spare or a new agent."""
    effects, nodes = isolate_faulty_nodes(s, now)
    bad = faulty_nodes(s)
    leaving = [worker for worker in s.workers if worker.node_name in bad]
    names = names_of(leaving)
    tainted = amend(
        s, error_nodes=nodes, reschedules=s.reschedules + len(leaving),
        spares=tuple(spare for spare in s.spares if spare.node_name not in bad),
        marks=tuple(mark for mark in s.marks if mark.node_name not in bad),
    )  # fmt: skip
    if s.phase is Phase.BOOT_CHECKING:
        stay = tuple(
            edit(worker, inner_phase=Phase.PENDING, failed=False)
            for worker in s.workers
            if worker.node_name not in bad
        )
        moved = move(
            tainted, Phase.PENDING, f"{names} must leave: not counted", "leave", workers=stay,
            deadline=now + s.spec.join_timeout_s,
        )  # fmt: skip
    else:
        workers = tuple(
            reset(worker, Phase.RESTARTING, now, gone=True, uid="") if worker.node_name in bad else worker
            for worker in s.workers
        )
        moved = enter_restarting(tainted, now, f"{names} must leave: not counted", "leave", workers=workers)
    return moved._replace(effects=(*effects, *moved.effects))


def decide_exceeded(s: Status, now: float) -> Transition:
    effects, nodes = isolate_faulty_nodes(s, now)
    worst = max(worker.retries for worker in s.workers)
    reason = f"retries used up: {worst} failures, at most {s.spec.max_retry} allowed"
    failed = fail(amend(s, error_nodes=nodes), reason, "exceeded")
    return failed._replace(effects=(*effects, *failed.effects))


def decide_error(s: Status, now: float) -> Transition:
    limit = s.spec.max_retry
    charged = tuple(
        edit(worker, retries=retry_accounts.charge(worker.retries, limit)) if worker.failed else worker
        for worker in s.workers
    )
    count = retry_accounts.recover_count((worker.retries for worker in charged), limit)
    # Unknown progress is neither: only progress that is known not to have grown makes it "again".
    again = s.last_root == s.root and 0 <= s.highest_step <= s.last_step
    again = again and recovery.POSITION_CLUE not in s.clues
    level = s.last_level if again else 0
    entered = enter_troubleshooting(
        s, now, f"{s.root} failed: counted", "error", workers=charged, recover_count=count, charged=True,
        last_root=s.root, last_step=s.highest_step, last_level=max(level, 1),
    )  # fmt: skip
    if level == 1:
        return _renew(entered, s.root, f"failed again without getting past step {s.highest_step}")
    if level == 0 and recovery.CONTAINER_CLUE in s.clues:
        return _renew(entered, s.root, "says that its container's surroundings are broken")
    if level == 2:
        return _page(entered, f"restart.{s.root}", f"{s.root} fails again, and restarts don't help")
    return entered


def _renew(entered: Transition, root: str, why: str) -> Transition:
    """Restarting its processes won't help this worker: after the checks its agent re-executes itself."""
    status = entered.status
    workers = tuple(edit(worker, renew=why) if worker.name == root else worker for worker in status.workers)
    return entered._replace(status=amend(status, workers=workers), reason=f"{entered.reason}; {root} {why}")


def _page(made: Transition, key: str, text: str) -> Transition:
    page = Page(made.status.step, key, text)
    return made._replace(effects=(*made.effects, page))


def decide_ready(s: Status, now: float) -> Transition:
    return enter_troubleshooting(s, now, "every missing worker is back", "ready", workers=s.workers)


def decide_seat(s: Status, now: float) -> Transition:
    if s.phase is Phase.PENDING:
        seated, *rest = s.spares
        # After a requeue the job's count is older than its workers.
        workers = (
            *(worker for worker in s.workers if not worker.gone),
            edit(seated, retries=s.recover_count),
        )
        return note(s, f"{seated.name} takes a seat", "seat", workers=workers, spares=tuple(rest))
    # The time of an agent that should have come back as a new process is over.
    late = conditions.expired(s, now)
    workers = tuple(edit(worker, renew="") if worker.gone and late else worker for worker in s.workers)
    return enter_restarting(s, now, "a spare is waiting", "seat", workers=workers, entries=s.entries)


def decide_last_call(s: Status, now: float) -> Transition:
    return note(s, "enough workers are ready: last call", "last_call", deadline=now + s.spec.last_call_s)


def decide_overdue(s: Status, now: float) -> Transition:
    present = tuple(
        worker for worker in s.workers if worker.finished or (s.phase is Phase.RESTARTING and not worker.gone)
    )
    missing = names_of(worker for worker in s.workers if worker not in present)
    if len(present) >= s.spec.min_worker_num:
        # Those present go on without the missing. Renumbering is unavoidable: the world is smaller.
        reason = f"went on with {len(present)} workers, without {missing or 'more'}"
        dropped = len(s.workers) - len(present)
        # The retries of a dropped worker stay with the job: losing workers must not give retries back.
        worst = max(worker.retries for worker in s.workers)
        present = (edit(present[0], retries=worst), *present[1:])
        return note(s, reason, "shrink", workers=present, deadline=0.0, reschedules=s.reschedules + dropped)
    if s.phase is Phase.RESTARTING:
        reason = f"no healthy node left: {missing} did not come back and no spare was there"
        return give_up(s, reason, "overdue")
    reason = f"{len(present)} of {s.spec.min_worker_num} workers came in time: everybody runs independent"
    # Until here a Finish meant that they were ready; from now on it means that their ranks have ended.
    workers = tuple(reset(worker, Phase.PENDING, now) for worker in present)
    return move(s, Phase.PENDING, reason, "independent", workers=workers, mode=Mode.INDEPENDENT, deadline=0.0)


def decide_boot_failed(s: Status, now: float) -> Transition:
    what = "; ".join(f"{worker.name}: {worker.last_failed_reason}" for worker in s.workers if worker.failed)
    if s.entries + 1 >= s.spec.bootcheck_attempts:
        return fail(s, f"bootcheck failed: {what}", "boot_failed")
    workers = tuple(edit(worker, inner_phase=Phase.PENDING, failed=False) for worker in s.workers)
    return move(
        s, Phase.PENDING, f"bootcheck again: {what}", "boot_failed", workers=workers, entries=s.entries + 1
    )


def decide_advance(s: Status, now: float) -> Transition:
    if s.phase is Phase.PENDING:
        ordered = first_order(s.workers)
        workers = tuple(reset(worker, Phase.BOOT_CHECKING, now) for worker in ordered)
        plan: dict[str, Any] = {"checks": recovery.BOOT_CHECKS[s.spec.bootcheck], "store": ordered[0].store}
        return move(
            s, Phase.BOOT_CHECKING, "every worker is ready", "advance", workers=workers, deadline=0.0, **plan
        )
    if s.phase is Phase.RUN_COMMAND:
        return end(s, Phase.SUCCEED, "every worker finished", "advance")
    reason = "bootcheck passed" if s.phase is Phase.BOOT_CHECKING else "recovery done: all ranks start again"
    workers = tuple(reset(worker, Phase.RUN_COMMAND, now, retries=s.recover_count) for worker in s.workers)
    return move(
        s, Phase.RUN_COMMAND, reason, "advance", workers=workers, store=s.workers[0].store,
        incarnation=s.incarnation + 1, **starting(s),
    )  # fmt: skip


def decide_independent_end(s: Status, now: float) -> Transition:
    failed = next((worker for worker in s.workers if worker.failed), None)
    if failed:
        return fail(
            s, f"{failed.name} failed in independent mode: {failed.last_failed_reason}", "independent_end"
        )
    if not any(worker.finished for worker in s.workers):
        return fail(s, "every worker was lost in independent mode, none had finished", "independent_end")
    return end(s, Phase.SUCCEED, "every connected worker finished, in independent mode", "independent_end")
