"""Mutants that no property can kill, because they do what production does, each with the reason.

The names are those of `Mutant.name`: source, change, text of the line. A survivor that isn't here is a miss
of the proof, and a name here that no longer exists fails a test.
"""

from __future__ import annotations

_NEVER_EMPTY = (
    "the count is only asked of jobs that have workers, so what an empty one would count is never used"
)

ACCEPTED: dict[str, str] = {
    "retry_accounts: default= dropped: return min(max(retries, default=0), max_retry)": _NEVER_EMPTY,
    "retry_accounts: 0 -> 1: return min(max(retries, default=0), max_retry)": _NEVER_EMPTY,
    "retry_accounts: 1 -> 2: return min(retries + 1, max_retry + 1)": (
        "a charge falls on a worker of a running job, whose retries are within the limit: the cap never binds"
    ),
    "machine.conditions: operand 3 dropped: "
    "return waiting and not s.held and not is_independent(s) and expired(s, now)": (
        "in the worlds independence sets the deadline to 0, so nothing is overdue then anyway; noticed by a "
        "test where all machines were cleared (test_missing_workers.py)"
    ),
    "machine.conditions: operand 1 dropped: "
    "return s.phase is not Phase.PENDING or len(s.workers) == s.spec.worker_num or s.deadline == 0.0": (
        "outside Pending the deadline is 0 where everybody has finished (NothingLeftStanding)"
    ),
    "machine.node_facts: dropped: if not any((mark.node_name == e.node_name for mark in s.marks)):: "
    "def _evict(s: Status, e: Evict, now: float) -> Transition:": (
        "where nothing is marked no mark changes, which is refused two lines further on with another reason"
    ),
    "machine.node_facts: Eq -> NotEq: "
    "if before is not None and (before.reason, before.kind) == (e.reason, e.kind):": (
        "as for the line that it guards: the finder and the time are information for people"
    ),
    "machine.decisions: retries= dropped: edit(seated, retries=s.recover_count),": (
        "the count is above 0 in Pending after a requeue only, which the worlds don't have (requeue.txt does)"
    ),
    "machine.conditions: filter dropped: "
    "return next((mark for mark in ready if mark.node_name in seated), None)": (
        "noticed in the world `moved marks`, which is too large to hunt in, and by a scenario (eviction.txt)"
    ),
    "machine.node_facts: LtE -> Lt: fresh = now - s.saved_at <= BOUNDARY_S": (
        "a checkpoint is recent or long ago in the worlds, and never of that very moment"
    ),
    "machine.node_facts: operand 3 dropped: s.phase is not Phase.RUN_COMMAND": (
        "a worker that is gone while training runs has finished or counts as restarted, and is refused so"
    ),
    "machine.node_facts: until= dropped: node = msgspec.structs.replace(before, until=e.until)": (
        "in the worlds a taint stands or doesn't, and has no end; noticed by a scenario (nodes.txt)"
    ),
    "machine.remedies: spares= dropped: rid = amend(": (
        "in the worlds no spare waits on a node that also trains; noticed by scenarios (eviction.txt, "
        "relieved.txt)"
    ),
    "machine.node_facts: 30.0 -> 31.0: BOUNDARY_S = 30.0": (
        "a checkpoint is recent or long ago in the worlds; how many seconds that is is a choice, no property"
    ),
    "machine.node_facts: dropped: node = msgspec.structs.replace(before, until=e.until): "
    "if before is not None and (before.reason, before.kind) == (e.reason, e.kind):": (
        "the finder and the time are information for people; the node is refused all the same"
    ),
    "machine.decisions: max -> min: worst = max(worker.retries for worker in s.workers)": (
        "the number is for the reason's text only"
    ),
    'machine.change: False -> True: "fit": False,': (
        "fitness matters for waiting spares only, and a worker that has been reset has ranks"
    ),
    "machine.decisions: last_root= dropped: return enter_restarting(": (
        "in the worlds progress is unknown or moves where a loss stands between two failures of one "
        "worker; noticed by a scenario (level_two.txt)"
    ),
    "machine: Rule('lost', BOOTING, earlier: RULES: tuple[Rule, ...] = (": (
        "its guard excludes independent mode, and the rule before it holds in that mode only"
    ),
    "machine: Rule('overdue', _PENDING, earlier: RULES: tuple[Rule, ...] = (": (
        "the rule before it holds only while the deadline is to come, this one only once it is reached"
    ),
}
