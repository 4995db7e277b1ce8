"""The phase machine: `step(status, event, now) -> Transition`. All transitions live here.

Theory
------
A job moves Pending -> BootChecking -> RunCommand -> Succeed. A failure leads through a recovery:

* A worker's training fails while its agent lives: RunCommand -> Troubleshooting, that worker +1.
* An agent is lost: RunCommand -> Restarting until it is back or replaced, every lost worker +1, the job +1;
  then Troubleshooting. Troubleshooting ends in RunCommand again, or in Failed when the limit is exceeded.
* Losses while booting or recovering are not counted. Those in recovery are bounded by `recovery_budget`,
  since a crash loop inside recovery would otherwise never end.

Facts and decisions are separate. An event from outside only records a fact on the worker it concerns
(`finished`, `restarted`, `failed`, `faulty`); `Reconcile` is the turn to decide and takes the first rule of
`RULES` whose guard holds. Facts that arrive together are therefore judged together, and a master that died
between fact and decision decides the same when it is back: the decision depends on the status, not on
messages.

A message counts only if (uid, incarnation, seqNum) are current: the uid names an agent's life, the
incarnation the start of training, the seqNum the order. Every order and every reset takes a new seqNum, so a
duplicate, a late or a dead agent's message changes nothing. Only the first Error of an incarnation is
charged, because one crash makes every peer fail: the others are its consequences.

Terminal phases absorb. Count and phase change in the same step, so one compare-and-swap makes both durable.
`RULES` is also the table that the diagram in docs/ is generated from: every rule names where it can lead and
what it does to the retries, which a test checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from aegis_elastic.core.events import Event, Reconcile
from aegis_elastic.core.machine import conditions, decisions, remedies, requeue
from aegis_elastic.core.machine.change import Transition, create
from aegis_elastic.core.machine.facts import FACTS, after_the_end
from aegis_elastic.core.model import BOOTING, RECOVERING, TERMINAL, Phase, Status

__all__ = ["RULES", "Rule", "Transition", "create", "step"]


class Rule(NamedTuple):
    """One decision: in these phases, when `guard` holds, do `decide`. Earlier rules win.

    `to` are the phases it can lead to, `counts` what it does to the retries, as text for the diagram.
    """

    name: str
    phases: frozenset[Phase]
    guard: Callable[[Status, float], bool]
    decide: Callable[[Status, float], Transition]
    to: frozenset[Phase]
    counts: str = ""


_ALIVE = frozenset(Phase) - TERMINAL
_PENDING, _BOOT, _RUN, _RESTART, _TROUBLE, _SUCCEED, _FAILED = (frozenset({phase}) for phase in Phase)

_BOUNDED = "not counted, but bounded"
_GIVEN_BACK = "this incarnation's charge is given back, once"

RULES: tuple[Rule, ...] = (
    Rule("quit", _ALIVE, lambda s, now: s.should_quit, decisions.decide_quit, _FAILED),
    Rule(
        "independent_end", _PENDING, conditions.independent_over, decisions.decide_independent_end, TERMINAL
    ),
    Rule(
        "lost",
        _RUN,
        conditions.has_restarted,
        decisions.decide_lost_running,
        _RESTART,
        "every lost worker +1, the job +1",
    ),
    Rule("lost", BOOTING, conditions.lost_booting, decisions.decide_lost_booting, _PENDING, "not counted"),
    Rule(
        "lost",
        RECOVERING,
        conditions.has_restarted,
        decisions.decide_lost_recovering,
        _RESTART | _FAILED,
        _BOUNDED,
    ),
    Rule("refund", _RESTART, conditions.refund_is_due, remedies.decide_refund, _RESTART, _GIVEN_BACK),
    Rule("refund", _TROUBLE, conditions.refund_is_due, remedies.decide_refund, _TROUBLE, _GIVEN_BACK),
    Rule("release", _RESTART, conditions.released, remedies.decide_release, _RESTART | _FAILED, _BOUNDED),
    Rule("release", _TROUBLE, conditions.released, remedies.decide_release, _TROUBLE | _FAILED, _BOUNDED),
    Rule("exceeded", _TROUBLE, conditions.exceeded, decisions.decide_exceeded, _FAILED),
    Rule("leave", _BOOT, conditions.must_leave, decisions.decide_leave, _PENDING, "not counted"),
    Rule("leave", _TROUBLE, conditions.must_leave, decisions.decide_leave, _RESTART | _FAILED, "not counted"),
    Rule("relieve", _TROUBLE, conditions.to_relieve, remedies.decide_relieve, _RESTART, _BOUNDED),
    Rule(
        "renew", _TROUBLE, conditions.to_renew, remedies.decide_renew, _RESTART | _TROUBLE | _FAILED, _BOUNDED
    ),
    Rule(
        "boot_failed",
        _BOOT,
        conditions.boot_failed,
        decisions.decide_boot_failed,
        _PENDING | _FAILED,
        _BOUNDED,
    ),
    Rule("error", _RUN, conditions.has_failed, decisions.decide_error, _TROUBLE, "that worker +1"),
    Rule("evict", _RUN, conditions.must_evict, remedies.decide_evict, _RESTART | _RUN, "not counted"),
    Rule("seat", _PENDING, conditions.can_seat, decisions.decide_seat, _PENDING),
    Rule("seat", _RESTART, conditions.can_seat, decisions.decide_seat, _RESTART),
    Rule("ready", _RESTART, conditions.restarted_are_ready, decisions.decide_ready, _TROUBLE),
    Rule("last_call", _PENDING, conditions.last_call, decisions.decide_last_call, _PENDING),
    Rule("overdue", _PENDING, conditions.overdue, decisions.decide_overdue, _PENDING),
    Rule("overdue", _RESTART, conditions.overdue, decisions.decide_overdue, _RESTART | _FAILED),
    Rule("advance", _PENDING, conditions.may_advance, decisions.decide_advance, _BOOT),
    Rule("advance", _RUN, conditions.may_advance, decisions.decide_advance, _SUCCEED),
    Rule(
        "advance",
        _BOOT | _TROUBLE,
        conditions.may_advance,
        decisions.decide_advance,
        _RUN,
        "every worker := the job's count",
    ),
)


def step(status: Status, event: Event, now: float) -> Transition:
    """Apply one event. Pure: `now` (wall seconds) is an argument, and nothing else is read."""
    if status.phase in TERMINAL:
        return after_the_end(status, event)
    if requeue.rests(status, event):
        return requeue.at_rest(status, event)
    if isinstance(event, Reconcile):
        for rule in RULES:
            if status.phase in rule.phases and rule.guard(status, now):
                return rule.decide(status, now)
        return Transition(status, (), "nothing to decide", "wait")
    return FACTS[type(event)](status, event, now)
