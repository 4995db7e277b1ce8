"""The order that follows from a status: derived, never stored.

Because it is derived, a restarted master repeats exactly its predecessor's order, and a worker that missed it
gets it again.
"""

from __future__ import annotations

import enum

import msgspec

from aegis_elastic.core.model import Mode, Phase, Status, Verdict
from aegis_elastic.core.rank_assignment import RankAssignment, assign_ranks


class Action(str, enum.Enum):
    """What an agent is to do. It reports Finish for every one of them but `close`."""

    READY = "ready"
    BOOTCHECK = "bootcheck"
    RUN = "run"
    STOP = "stop"
    TROUBLESHOOT = "troubleshoot"
    INDEPENDENT = "independent"
    CLOSE = "close"


# The wire's three phase labels (section 6); information only, the action says what to do.
WIRE_PHASE = {
    Action.READY: "bootcheck",
    Action.BOOTCHECK: "bootcheck",
    Action.INDEPENDENT: "command",
    Action.RUN: "command",
    Action.STOP: "troubleshoot",
    Action.TROUBLESHOOT: "troubleshoot",
    Action.CLOSE: "command",
}

_ACTION = {
    Phase.PENDING: Action.READY,
    Phase.BOOT_CHECKING: Action.BOOTCHECK,
    Phase.RUN_COMMAND: Action.RUN,
    Phase.RESTARTING: Action.STOP,
    Phase.TROUBLESHOOTING: Action.TROUBLESHOOT,
    Phase.SUCCEED: Action.CLOSE,
    Phase.FAILED: Action.CLOSE,
}


class Order(msgspec.Struct, frozen=True, rename="camel"):
    """One order to all workers of a job.

    `assignments` ("seats" on the wire) say who takes part with which ranks; an agent without one is a spare
    and waits. `store` is `host:port` of the TCPStore of the process group to form. `restart_count` is what
    the ranks see as TORCHELASTIC_RESTART_COUNT: how often training has been started before. `clues`: what the
    failure points at, for troubleshooting. `peers`: medians over all workers of figures that the checks
    measure, as far as the master knows them from an earlier round; not part of the status, and nothing is
    decided by them. `hanging`: what holds training up, and where; logged by all, and stops nothing.
    """

    seq_num: int
    incarnation: int
    action: Action
    assignments: tuple[RankAssignment, ...] = msgspec.field(name="seats")
    store: str
    checks: tuple[str, ...]
    restart_count: int
    recover_count: int
    max_retry: int
    outcome: str = ""
    reason: str = ""
    clues: tuple[str, ...] = ()
    peers: dict[str, float] = {}
    hanging: str = ""


_HANGS = (Verdict.FROZEN, Verdict.DESYNC, Verdict.STALLED)
_REASON_CHARS_MAX = 500


def hanging(status: Status) -> str:
    """What holds training up by the marks in this status, at most 500 characters; "" if nothing does."""
    if status.phase is not Phase.RUN_COMMAND:
        return ""
    reasons = (f"{mark.verdict.value}: {mark.reason}" for mark in status.marks if mark.verdict in _HANGS)
    return next(reasons, "")[:_REASON_CHARS_MAX]


def derive_order(status: Status) -> Order:
    """The order that every worker of this job is to follow now."""
    action = _ACTION[status.phase]
    if status.phase is Phase.PENDING and status.mode is Mode.INDEPENDENT:
        action = Action.INDEPENDENT
    if status.suspended:
        action = Action.CLOSE
    return Order(
        seq_num=status.seq_num,
        incarnation=status.incarnation,
        action=action,
        assignments=assign_ranks(status.workers),
        store=status.store,
        checks=status.checks,
        restart_count=max(status.incarnation - 1, 0),
        recover_count=status.recover_count,
        max_retry=status.spec.max_retry,
        outcome=("Requeue" if status.suspended else status.phase.value) if action is Action.CLOSE else "",
        reason=status.suspended or status.fail_reason,
        clues=status.clues if action is Action.TROUBLESHOOT else (),
        hanging=hanging(status),
    )
