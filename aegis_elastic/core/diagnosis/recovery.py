"""From evidence to the cheapest recovery that can work (section 9 of the specification).

Level 1 restarts the worker processes in place, level 2 the container, level 3 isolates the node. `judge`
reads the findings of one worker's checks; `plan_checks` says which checks a recovery asks for, and why.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.events import Finding

# The names of the cheap checks: a new one is added here, in `checks.runner.CHEAP_MODULES` and in
# `checks.contract.budgets`.
CHEAP_CHECKS = ("io", "gpu", "runtime", "rdma", "hang")
COLLECTIVE_CHECKS = ("allreduce_connection", "allreduce_performance")
# gpu and rdma also leave the counters against which later checks are judged.
BOOT_CHECKS = {"off": (), "env": ("env", "gpu", "rdma"), "full": ("env", "gpu", "rdma", "health")}

# Clues (found by the agent in exit codes, exceptions and log lines) that point at communication.
COMMUNICATION_CLUES = frozenset({"collective_timeout", "network", "hang", "slow", "cause_unknown"})
# The root's own output points at its container's surroundings (`signatures`: restart_container): level 2.
CONTAINER_CLUE = "container"

# The step at the failure is counted from the last start only, so it can't be compared with the one at the
# failure before: whether training has got further is unknown.
POSITION_CLUE = "position_unknown"

# Found by `core.diagnosis.localization`: every explanation of what failed among the nodes has this one. Any
# other failure of a collective is no proof against the node that reports it.
LOCALISED_NODE = "allreduce_connection.node"


class Assessment(msgspec.Struct, frozen=True, rename="camel"):
    """What the findings amount to: the fault's class, the level that answers it, the code that decided."""

    fault_class: str
    level: int
    code: str
    reason: str


PROCESS = Assessment("process", 1, "", "every check passed: the processes failed, not the machine")


def judge(findings: tuple[Finding, ...]) -> Assessment:
    """The assessment of one worker's failed checks; the worst one decides."""
    # `max` keeps the first of equals; with no finding at all the processes failed, not the machine.
    return max(map(_judge_one, findings), key=lambda each: each.level, default=PROCESS)


# What a bootcheck may find and training starts all the same: a node that is merely slow, and the failure of
# a check of our own.
_NO_OBSTACLE = frozenset({"slow", "software"})


def obstructs(findings: tuple[Finding, ...]) -> bool:
    """Whether these findings of a bootcheck keep training from starting."""
    return any(finding.scope not in _NO_OBSTACLE for finding in findings)


def _judge_one(finding: Finding) -> Assessment:
    code = finding.finding or f"{finding.check}.failed"
    if finding.scope == "hardware" and finding.check in ("gpu", "rdma"):
        return Assessment("hardware", 3, code, f"{finding.check} check: {code}: the node must leave")
    if finding.scope == "hardware" and code == LOCALISED_NODE:
        return Assessment(
            "hardware", 3, code, f"{finding.check} check: {code}: no group forms with this node"
        )
    if finding.check == "runtime" or (finding.check == "io" and finding.scope in ("node", "hardware")):
        return Assessment(
            "container", 2, code, f"{finding.check} check: {code}: the container's surroundings are broken"
        )
    return Assessment("unknown", 1, code, f"{finding.check} check: {code}: no machine can be blamed for it")


def plan_checks(policy: str, clues: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The checks that a troubleshooting round runs, and the reason.

    `policy` is `--aegis-troubleshoot`; `clues` what the failure pointed at.
    """
    if policy == "off":
        return (), "troubleshooting is off"
    if policy == "full":
        return CHEAP_CHECKS + COLLECTIVE_CHECKS, "the policy is to run all seven"
    pointing = sorted(COMMUNICATION_CLUES.intersection(clues))
    if pointing:
        return CHEAP_CHECKS + COLLECTIVE_CHECKS, f"something points at communication: {', '.join(pointing)}"
    return CHEAP_CHECKS, "nothing points at communication"
