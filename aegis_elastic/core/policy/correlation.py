"""When many fail together it is not the nodes: who finds that out holds the recovery instead of isolating.

Two cases, told by the findings of one round of checks. A *dependency* is down when everybody finds the same:
storage, or the network. A failure is *correlated* when too large a share of the nodes is found broken within
a window: a driver update, a cooling that failed, a check of ours that is wrong. Both hold the recovery, give
the charge back, and isolate nobody. Storage is then probed by one, so that what comes up again isn't knocked
down by everybody at once; what no single node can probe is looked at by all, after waits that double.

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
    """What so many have in common: `kind`, and in words."""

    kind: str
    reason: str


class WorkerFindings(NamedTuple):
    """What one worker's checks found: its node, when (wall seconds)."""

    node_name: str
    at: float
    findings: tuple[Finding, ...]


def judge(
    reported: Mapping[str, WorkerFindings], workers: Collection[str], now: float, policy: Guard
) -> CommonFailure | None:
    """What all `workers` of a job have in common by what they `reported` of this round, if anything.

    None also as long as one hasn't reported: one healthy node shows that it isn't everybody.
    """
    if not workers or any(worker not in reported for worker in workers):
        return None
    broken = too_many_broken(reported, workers, now, policy)
    if broken is not None:
        return broken
    rounds = [reported[worker] for worker in workers]
    nodes = {each.node_name for each in rounds}
    if len(nodes) < 2:
        return None  # everybody is one, and it may as well be that node
    for kind, found in ((STORAGE, _storage), (NETWORK, _network)):
        everybodys = [next(found(each), "") for each in rounds]
        if all(everybodys):
            return CommonFailure(
                kind, f"{kind} is down for all {len(nodes)} nodes ({', '.join(sorted(set(everybodys)))})"
            )
    return None


def too_many_broken(
    reported: Mapping[str, WorkerFindings], workers: Collection[str], now: float, policy: Guard
) -> CommonFailure | None:
    """Checks of one round that condemn more nodes than can be the nodes' own fault: a flag, a driver, the
    cooling, or a check of ours is wrong. At a first check nothing else is looked at: a dependency that is
    down fails it anyway, without blaming anybody.
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
    """How long to wait before everybody looks again, the `times`th time (from 0) in this recovery.

    `probed`: one looks for all, and ends the wait; so it may be as long as it will.
    """
    if probed:
        return policy.hold_max_s
    return float(min(policy.probe_s * 2.0 ** min(times, 60), policy.hold_max_s))


def _broken(rounds: Collection[WorkerFindings], now: float, policy: Guard) -> dict[str, str]:
    """The nodes that would have to leave, with the code that says so."""
    found = {}
    for each in rounds:
        verdict = recovery.judge(each.findings)
        if verdict.level == 3 and now - each.at <= policy.brake_window_s:
            found[each.node_name] = verdict.code
    return found


def _storage(each: WorkerFindings) -> Iterator[str]:
    return (f.finding for f in each.findings if f.check == "io" and f.scope not in _NO_OUTAGE)


def _network(each: WorkerFindings) -> Iterator[str]:
    # Broken storage behind a network is storage's matter.
    return (f.finding for f in each.findings if f.scope == "network" and f.check != "io")
