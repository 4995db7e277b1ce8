"""Facts about machines that the platform is asked to recreate (`core.policy.missing_workers`)."""

from __future__ import annotations

from aegis_elastic.core.events import Cleared, Relaunched, Remake
from aegis_elastic.core.machine.change import Transition, fail, is_independent, move, note, nothing
from aegis_elastic.core.model import Mode, Phase, Status


def relaunched(s: Status, e: Relaunched, now: float) -> Transition:
    """The missing machines are recreated, and waited for: nothing is counted."""
    if not _waits(s):
        return nothing(s, "nobody is waited for any more")
    noted = note(s, f"{e.reason}: made anew, not counted", "relaunched", deadline=max(s.deadline, e.until))
    return _remake(noted, e.machines, e.reason)


def cleared(s: Status, e: Cleared, now: float) -> Transition:
    """All workers go, one retry is counted, and what joins in their place runs as a plain job."""
    if not _waits(s):
        return nothing(s, "nobody is waited for any more")
    if s.recover_count >= s.spec.max_retry:
        worst = s.spec.max_retry + 1
        return fail(s, f"{e.reason}: {worst} failures, at most {s.spec.max_retry} allowed", "cleared",
                    recover_count=worst)  # fmt: skip
    moved = move(
        s, Phase.PENDING, f"{e.reason}: all are cleared, counted; a plain job from now on", "cleared",
        workers=(), spares=(), recover_count=s.recover_count + 1, mode=Mode.INDEPENDENT,
        # Above 0: those that join are taken in as workers, so that the job's end is known.
        deadline=now + s.spec.join_timeout_s,
    )  # fmt: skip
    return _remake(moved, e.machines, e.reason)


def _waits(s: Status) -> bool:
    return s.phase is Phase.PENDING and not is_independent(s) and not s.should_quit


def _remake(made: Transition, machines: tuple[str, ...], reason: str) -> Transition:
    effects = (Remake(made.status.step, machines, reason),) if machines else ()
    return made._replace(effects=(*made.effects, *effects))
