"""The verdict table: every verdict that any detector can give, with exactly one owner and one action.

Two safety mechanisms leave a gap where one detects what the other doesn't act on. So this is one table over
all detectors, and a test reads the detectors' code: a verdict without a row fails it, and so does one with
two. Where the owner is a human, that is a choice, and `PAGE` or `READ` says whether one is called.

`aegisctl verdicts` prints it.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

MACHINE, GUARD, BRAKE, HUMAN = "the phase machine", "the guard", "the brake", "a human"

RESTART = "level 1: restart the ranks in place"
RENEW = "level 2: the agent executes itself again"
ISOLATE = "level 3: the node leaves, is recorded and isolated"
RESTART_HUNG = "restart in place after the guard's rules; the same node again leaves, if it can be spared"
EVICT = "evict at the next completed checkpoint, after the guard's rules"
HOLD = "hold the recovery: one probe, jittered release, the charge given back"
BRAKE_HOLD = "hold the recovery, isolate nobody, call a human"
CHECK = "run all checks in the recovery, then as they find"
PAGE = "call a human"
READ = "a line of the journal and of the node's history, for a human"
NONE = "nothing is wrong by itself"

# The kind of a verdict: where it comes from.
MARK, CLASS, FINDING, SIGNATURE, NOTE, TOGETHER = "mark", "class", "finding", "signature", "note", "together"


class Row(NamedTuple):
    """One row. `verdict` is a code, or a pattern of codes (`*`); `scope` narrows a finding's."""

    kind: str
    verdict: str
    evidence: str
    owner: str
    action: str
    scope: str = "*"


TABLE: tuple[Row, ...] = (
    Row(
        MARK, "frozen", "a rank can't move: its process is stopped, dead inside, or held", GUARD, RESTART_HUNG
    ),
    Row(MARK, "desync", "ranks wait in a collective for one that stands elsewhere", GUARD, RESTART_HUNG),
    Row(MARK, "stalled", "no step, and no deadlock to be shown", HUMAN, PAGE),
    Row(MARK, "unreachable", "an agent is silent while steps advance", HUMAN, PAGE),
    Row(MARK, "slow", "own work clearly behind the peers', window after window", GUARD, EVICT),
    Row(CLASS, "process", "checks pass, training exited", MACHINE, RESTART),
    Row(CLASS, "unknown", "nothing tells", MACHINE, RESTART),
    Row(CLASS, "container", "the surroundings are broken, or level 1 failed again", MACHINE, RENEW),
    Row(CLASS, "hardware", "a gpu or rdma check fails, or one node is localised", MACHINE, ISOLATE),
    Row(CLASS, "user bug", "the same exception and frame, no progress between", MACHINE, RESTART),
    Row(CLASS, "dependency", "storage or network is down for everybody", BRAKE, HOLD),
    Row(CLASS, "checkpoint", "a checkpoint can't be read", HUMAN, PAGE),
    Row(CLASS, "hang", "stacks or states of ranks that hung", GUARD, RESTART_HUNG),
    Row(CLASS, "slow node", "a check finds it far behind its peers", GUARD, EVICT),
    Row(CLASS, "link", "two nodes can't talk, each can with others", HUMAN, PAGE),
    Row(FINDING, "gpu.*", "the gpu check, a node's hardware", MACHINE, ISOLATE, "hardware"),
    Row(FINDING, "gpu.*", "the gpu check, anything else", MACHINE, RESTART, "!hardware"),
    Row(FINDING, "rdma.*", "the rdma check, a node's hardware", MACHINE, ISOLATE, "hardware"),
    Row(FINDING, "rdma.*", "the rdma check, anything else", MACHINE, RESTART, "!hardware"),
    Row(FINDING, "io.*", "the io check, this node's own storage", MACHINE, RENEW, "node"),
    Row(FINDING, "io.*", "the io check, this node's own disk", MACHINE, RENEW, "hardware"),
    Row(
        FINDING,
        "io.*",
        "the io check, storage that all share or nobody's",
        MACHINE,
        RESTART,
        "!node,hardware",
    ),
    Row(FINDING, "runtime.*", "the runtime check", MACHINE, RENEW),
    Row(FINDING, "hang.*", "the hang check", MACHINE, RESTART),
    Row(FINDING, "env.*", "the bootcheck's versions", MACHINE, RESTART),
    Row(FINDING, "health.*", "the bootcheck's verified collectives", MACHINE, RESTART),
    Row(FINDING, "allreduce_connection.node", "one node explains all failures", MACHINE, ISOLATE, "hardware"),
    Row(FINDING, "allreduce_connection.node", "one node, not proven", MACHINE, RESTART, "!hardware"),
    Row(FINDING, "allreduce_connection.[!n]*", "a link, or ambiguous", MACHINE, RESTART),
    Row(FINDING, "allreduce_performance.*", "bandwidth against the peers'", MACHINE, RESTART),
    Row(TOGETHER, "storage", "the io check fails for everybody", BRAKE, HOLD),
    Row(TOGETHER, "network", "network findings on everybody", BRAKE, HOLD),
    Row(TOGETHER, "correlated", "too large a share of the nodes broken within a window", BRAKE, BRAKE_HOLD),
    Row(SIGNATURE, "ignore", "words that mean nothing", MACHINE, NONE),
    Row(SIGNATURE, "restart_in_place", "words of a fault of the processes", MACHINE, RESTART),
    Row(SIGNATURE, "restart_container", "words of broken surroundings", MACHINE, RENEW),
    Row(SIGNATURE, "isolate_node", "words of broken hardware: only a check sends away", MACHINE, CHECK),
    Row(SIGNATURE, "diagnose", "words that point at communication", MACHINE, CHECK),
    Row(SIGNATURE, "wait", "words of a dependency that is down", BRAKE, HOLD),
    Row(SIGNATURE, "fallback_checkpoint", "words of an unreadable checkpoint", HUMAN, PAGE),
    Row(
        SIGNATURE, "fail_fast", "words of a user's error (--aegis-fail-fast stops the job)", MACHINE, RESTART
    ),
    Row(SIGNATURE, "unknown", "words that nothing knows", MACHINE, RESTART),
    Row(NOTE, "cpu.*", "constant monitoring", HUMAN, READ),
    Row(NOTE, "gpu.zero", "constant monitoring", HUMAN, READ),
    Row(NOTE, "memory.*", "constant monitoring", HUMAN, READ),
    Row(NOTE, "network.*", "constant monitoring", HUMAN, READ),
    Row(NOTE, "signature.*", "a line that a rank has written", HUMAN, READ),
    Row(NOTE, "rank.slow", "slow, and not worth a restart", HUMAN, READ),
    Row(NOTE, "rank.ended_early", "a rank ended well while others go on", HUMAN, PAGE),
    Row(NOTE, "checkpoint.late", "an eviction waits for a checkpoint that doesn't come", HUMAN, PAGE),
    Row(NOTE, "checkpoint.unread", "a tracker that says nothing that could be read", HUMAN, READ),
    Row(NOTE, "success.false", "exit code 0 of a training that couldn't read where it stood", HUMAN, PAGE),
    Row(NOTE, "saver.*", "the saver has ended; the node's guard starts it again", HUMAN, READ),
    Row(NOTE, "spare.*", "a spare doesn't pass its checks and is no spare", HUMAN, READ),
    Row(NOTE, "bootcheck.*", "workers don't run the same versions", HUMAN, READ),
    Row(NOTE, "evict.*", "what an eviction has cost", HUMAN, READ),
    Row(NOTE, "agent.lost", "an agent that ended", MACHINE, RESTART),
    Row(NOTE, "user.repeated", "the same exception and frame again", MACHINE, RESTART),
    Row(NOTE, "verdict.checkpoint", "a checkpoint can't be read", HUMAN, PAGE),
    Row(NOTE, "verdict.link", "two nodes can't talk", HUMAN, PAGE),
    Row(NOTE, "verdict.[!cl]*", "what a failure was; its class has a row", HUMAN, READ),
    Row(NOTE, "verdict.container", "what a failure was; its class has a row", HUMAN, READ),
    Row(NOTE, "isolation.*", "what became of an isolation; failures page by themselves", HUMAN, READ),
    Row(NOTE, "guard.*", "what the guard decides; it pages by itself", HUMAN, READ),
)


def rows_for(kind: str, verdict: str, scope: str = "") -> list[Row]:
    """All rows for this verdict: exactly one, which a test checks."""
    return [
        row
        for row in TABLE
        if row.kind == kind and fnmatch.fnmatchcase(verdict, row.verdict) and _in_scope(scope, row.scope)
    ]


def pages(code: str) -> bool:
    """Whether a note with this code calls an operator by itself."""
    return any(row.action == PAGE for row in rows_for(NOTE, code))


def as_json() -> list[dict[str, str]]:
    """The table as `aegisctl verdicts --json` prints it."""
    return [
        {
            "verdict": _name(row),
            "kind": row.kind,
            "evidence": row.evidence,
            "owner": row.owner,
            "action": row.action,
        }
        for row in TABLE
    ]


def _name(row: Row) -> str:
    if row.scope == "*":
        return row.verdict
    return f"{row.verdict} ({'not ' if row.scope.startswith('!') else ''}{row.scope.lstrip('!')})"


def _in_scope(scope: str, wanted: str) -> bool:
    if wanted == "*":
        return True
    return (scope in wanted.lstrip("!").split(",")) is not wanted.startswith("!")
