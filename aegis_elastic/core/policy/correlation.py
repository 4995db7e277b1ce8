"""Correlated failures: when many nodes fail together they are not at fault, and the recovery is held.

Two cases, shown by the findings of one round of checks. A *dependency* is down when all find the same:
storage, or the network. A failure is *correlated* when too large a share of the nodes is found broken within
a window: a driver update, a failed cooling, a defective check. Both hold the recovery, refund the charge, and
isolate no node. Storage is then probed by one node, so that it isn't overloaded by all at once when it comes
back; what no single node can probe is checked by all, after waits that double.

Pure, as all of `core`: findings and times in, a verdict with its reason out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import Finding
from aegis_elastic.core.policy.settings import Guard

STORAGE, NETWORK, CORRELATED = "storage", "network", "correlated"
# A check that failed itself, and storage that is merely slow, are no outage.
_NO_OUTAGE = frozenset({"software", "slow"})


class CommonFailure(NamedTuple):
    """What the failures have in common: `kind` (STORAGE, NETWORK or CORRELATED), and the reason as text."""

    kind: str
    reason: str


class WorkerFindings(NamedTuple):
    """The findings of one worker's checks in this round: its node, and when (wall seconds)."""

    node_name: str
    at: float
    findings: tuple[Finding, ...]


def judge(
    reported: Mapping[str, WorkerFindings], workers: Collection[str], now: float, policy: Guard
) -> CommonFailure | None:
    """The common failure of all `workers` of a job by what they `reported` in this round, if there is one.

    None also while one hasn't reported: one healthy node disproves a common failure.
    """
    if not workers or any(worker not in reported for worker in workers):
        return None
    broken = too_many_broken(reported, workers, now, policy)
    if broken is not None:
        return broken
    rounds = [reported[worker] for worker in workers]
    nodes = {each.node_name for each in rounds}
    if len(nodes) < 2:
        return None  # all are on one node, and it may be that node
    for kind, found in ((STORAGE, _storage), (NETWORK, _network)):
        codes_found = [next(found(each), "") for each in rounds]
        if all(codes_found):
            return CommonFailure(
                kind, f"{kind} is down for all {len(nodes)} nodes ({', '.join(sorted(set(codes_found)))})"
            )
    return None


def too_many_broken(
    reported: Mapping[str, WorkerFindings], workers: Collection[str], now: float, policy: Guard
) -> CommonFailure | None:
    """Whether the checks of one round find more nodes broken than can be the nodes' own fault: then a flag, a
    driver, the cooling, or a check of ours is wrong. At the bootcheck only this is judged: a dependency that
    is down fails it anyway, without blaming a node.
    """
    if not workers or any(worker not in reported for worker in workers):
        return None
    rounds = [reported[worker] for worker in workers]
    nodes, broken = {each.node_name for each in rounds}, _broken(rounds, now, policy)
    if len(broken) < policy.brake_nodes or len(broken) <= policy.brake_share * len(nodes):
        return None
    codes = ", ".join(sorted(set(broken.values())))
    return CommonFailure(
        CORRELATED,
        f"{len(broken)} of {len(nodes)} nodes are found broken together ({codes}): at most "
        f"{policy.brake_share:.0%} can be the nodes' own fault",
    )


def wait_s(times: int, policy: Guard, *, probed: bool) -> float:
    """Seconds to wait before all check again, the `times`th time (from 0) in this recovery.

    `probed`: one node probes for all and ends the wait, so only `hold_max_s` bounds it.
    """
    if probed:
        return policy.hold_max_s
    return float(min(policy.probe_s * 2.0 ** min(times, 60), policy.hold_max_s))


def _broken(rounds: Collection[WorkerFindings], now: float, policy: Guard) -> dict[str, str]:
    """The nodes that would have to leave, with the code of the finding."""
    found = {}
    for each in rounds:
        verdict = recovery.judge(each.findings)
        if verdict.level == 3 and now - each.at <= policy.brake_window_s:
            found[each.node_name] = verdict.code
    return found


def _storage(each: WorkerFindings) -> Iterator[str]:
    return (f.finding for f in each.findings if f.check == "io" and f.scope not in _NO_OUTAGE)


def _network(each: WorkerFindings) -> Iterator[str]:
    # Broken storage behind a network counts as storage.
    return (f.finding for f in each.findings if f.scope == "network" and f.check != "io")
