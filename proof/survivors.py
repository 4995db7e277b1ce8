"""Mutants that no property can kill, because they do what production does. Each with the reason.

The names are those of `Mutant.name`: source, change, text of the line. A survivor that isn't here is a miss
of the proof, and a name here that no longer exists fails a test.
"""

from __future__ import annotations

_NEVER_EMPTY = (
    "the count is only asked of jobs that have workers, so what an empty one would count is never seen"
)

ACCEPTED: dict[str, str] = {
    "accounting: default= dropped: return min(max(retries, default=0), max_retry)": _NEVER_EMPTY,
    "accounting: 0 -> 1: return min(max(retries, default=0), max_retry)": _NEVER_EMPTY,
    "accounting: 1 -> 2: return min(retries + 1, max_retry + 1)": (
        "a charge falls on a worker of a running job, whose retries are within the limit: the cap never binds"
    ),
    "machine.guards: operand 3 dropped: "
    "return waiting and not s.held and not is_independent(s) and expired(s, now)": (
        "independence sets the deadline to 0, so nothing is overdue then anyway; said twice to be read"
    ),
    "machine.guards: operand 1 dropped: "
    "return s.phase is not Phase.PENDING or len(s.pods) == s.spec.worker_num or s.deadline == 0.0": (
        "outside Pending the deadline is 0 where everybody has finished (NothingLeftStanding)"
    ),
    "machine.decisions: max -> min: worst = max(pod.retries for pod in s.pods)": (
        "the number is for the reason's text only"
    ),
    "machine: Rule('lost', BOOTING, earlier: RULES: tuple[Rule, ...] = (": (
        "its guard excludes independent mode, and the rule before it holds in that mode alone"
    ),
    "machine: Rule('overdue', _PENDING, earlier: RULES: tuple[Rule, ...] = (": (
        "the rule before it holds only while the deadline is to come, this one only once it is reached"
    ),
}
