"""The order that a status wants its workers to follow: derived, never stored.

Because it is derived, a master that comes back repeats exactly the order that its predecessor gave, and a
worker that missed it gets it again.
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

    `seats` say who takes part with which ranks; an agent that has no seat is a spare and waits. `store` is
    `host:port` of the TCPStore of the process group to form. `restart_count` is what the ranks see as
    TORCHELASTIC_RESTART_COUNT: how often training has been started before. `clues`: what the failure points
    at, for a troubleshooting. `peers`: what the median of all workers has for figures of the checks, as far
    as the master knows them from an earlier round; it isn't part of the status, and nothing is decided by it.
    `hanging`: what holds training up, and where; noted by all, and nothing is stopped because of it.
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
    """What holds the training of this status up, by the marks; "" if nothing does."""
    if status.phase is not Phase.RUN_COMMAND:
        return ""
    told = (f"{mark.verdict.value}: {mark.reason}" for mark in status.marks if mark.verdict in _HANGS)
    return next(told, "")[:_REASON_CHARS_MAX]


def derive_order(status: Status) -> Order:
    """The order that every worker of this job should be following now."""
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
