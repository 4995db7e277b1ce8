"""Requeue: giving a job back to its scheduler, and resuming it in another allocation.

When the machines that are left don't suffice and a scheduler can start the job anew, the job is *suspended*
instead of failed: its record stays as it is, all agents leave with the exit code that asks for a requeue, and
nothing is decided any more. `Requeued` ends that. It is also the event after a scheduler has stopped a job
during training (preemption, a time limit): no agent was lost by a failure of its own, so nothing is charged,
and the job starts with the bootcheck, on the nodes that it has now.
"""

from __future__ import annotations

from typing import Any

from aegis_elastic.core import retry_accounts
from aegis_elastic.core.events import Close, Dismiss, Event, Join, Quit, Reconcile, Requeued
from aegis_elastic.core.machine.change import Transition, amend, edit, fail, is_independent, move, nothing
from aegis_elastic.core.model import BOOTING, Phase, Status

# Ranks that are terminated may save first, as long as it takes: so the first agent may be gone this long
# before the last when a scheduler ends them all.
TAKEN_AWAY_S = 120.0


def give_up(s: Status, reason: str, name: str) -> Transition:
    """The machines don't suffice: fail, or wait to be started anew where a scheduler does that."""
    if not s.spec.requeue:
        return fail(s, reason, name)
    text = f"{reason}: to be started anew by the scheduler"
    moved = move(s, s.phase, text, name, suspended=reason, deadline=0.0, held="", held_until=0.0)
    close = Close(moved.status.step, "Requeue", reason)
    return moved._replace(effects=(*moved.effects, close))


def rests(s: Status, event: Event) -> bool:
    """Whether the job is suspended and this event changes nothing of that."""
    return bool(s.suspended) and not (
        isinstance(event, (Requeued, Quit)) or (isinstance(event, Reconcile) and s.should_quit)
    )


def at_rest(s: Status, event: Event) -> Transition:
    """What an event comes to while the job is suspended."""
    why = f"the job waits to be started anew: {s.suspended}"
    if isinstance(event, Join):
        return Transition(s, (Dismiss(s.step, event.worker, event.uid, why),), why, "refused")
    return Transition(s, (), why, "ignored")


def requeued(s: Status, e: Requeued, now: float) -> Transition:
    """The scheduler has ended all agents and started others."""
    if e.attempt <= s.attempt and not s.suspended:
        return nothing(s, "known already")
    if is_independent(s):
        return nothing(s, "nobody leads this job's ranks: they have ended with their agents")
    if _taken_away(s, now):
        before = max(worker.retries for worker in s.workers) - 1
        workers = tuple(edit(worker, retries=min(worker.retries, before)) for worker in s.workers)
        s = amend(s, workers=workers, recover_count=before)
    if retry_accounts.exceeded((worker.retries for worker in s.workers), s.spec.max_retry):
        worst = max(worker.retries for worker in s.workers)
        return fail(
            amend(s, attempt=e.attempt),
            f"retries used up before the requeue: {worst} failures, at most {s.spec.max_retry} allowed",
            "requeued",
        )
    # The charge of a failure whose recovery the scheduler cut short stands.
    count = retry_accounts.recover_count((worker.retries for worker in s.workers), s.spec.max_retry)
    fresh: dict[str, Any] = {
        "workers": (), "spares": (), "checks": (), "clues": (), "root": "", "marks": (), "held": "",
        "held_until": 0.0, "suspended": "", "entries": 0, "charged": False, "renewed": False,
    }  # fmt: skip
    return move(
        s, Phase.PENDING, f"started anew by the scheduler (number {e.attempt}): not counted", "requeued",
        recover_count=s.recover_count if s.phase in BOOTING else count, attempt=max(e.attempt, s.attempt),
        deadline=now + s.spec.join_timeout_s, **fresh,
    )  # fmt: skip


def _taken_away(s: Status, now: float) -> bool:
    """Whether the charge is for the scheduler's own stop: all agents ended together, one of them was found
    lost before the new start was reported, and none came back. A failure is reported by its agent, and after
    a lost node the other agents live on.
    """
    lost = (
        s.phase is Phase.RESTARTING
        and s.charged
        and not s.last_root
        and any(worker.gone for worker in s.workers)
    )
    if not lost or (s.suspended and not all(worker.gone for worker in s.workers)):
        return False
    ended_at = [worker.updated_timestamp if worker.gone else now for worker in s.workers]
    return max(ended_at) - min(ended_at) <= TAKEN_AWAY_S
