"""The two collective checks over the nodes: does a communicator come about, and how fast is each node in it.

One process per node takes part (nccl with GPUs, gloo without). Both meet their peers by the node's group
rank. A world that doesn't form is taken apart until it is known which node or link is broken
(`core.diagnosis.localization`); a slow node is told from its slow partners by rotating pairs
(`core.diagnosis.outliers`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from aegis_elastic.checks.collective.process_group import WorldError, connect, meet, process_group
from aegis_elastic.checks.collective.rounds import Member
from aegis_elastic.checks.contract.budgets import budget_s
from aegis_elastic.checks.contract.child_process import Note, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest, World
from aegis_elastic.core.diagnosis.localization import Fault, Localization
from aegis_elastic.core.diagnosis.outliers import PEERS_MIN, Exchange, schedule, slow_nodes

CONNECTION, PERFORMANCE = "allreduce_connection", "allreduce_performance"
# Of the connection's budget: for peers to come, and the end of the last round. Seconds that peers don't take
# go to the rounds.
MEET_SHARE, CONNECTION_SHARE = 0.35, 0.93
# Of the performance's budget, for all timed operations of a kind. A slow network gets fewer repetitions.
TIMED_SHARE = 0.25
# (bytes, repetitions) of all-reduces over all nodes: the first tells latency, the last bandwidth.
SIZES = ((4 << 10, 30), (1 << 20, 10), (16 << 20, 5))
# (bytes, repetitions, what it tells) of exchanges in pairs.
PAIR_SIZES = ((4 << 10, 10, "latency"), (4 << 20, 5, "bandwidth"))
# Latency is a matter of a busy core or a further switch more than of a fault: less than that isn't told.
LATENCY_FACTOR_MIN = 2.0
_ALONE = "this is the only node, there is no network between nodes to try"


def connection(request: CheckRequest, note: Note) -> Outcome:
    """Do all nodes form a group that sums up rightly; and if not, which node or link is it.

    Only the node that is at fault fails with scope "hardware"; a broken link fails at both its ends, and what
    can't be told at all whom it may be.
    """
    world = _world(request)
    if world.group_world_size == 1:
        return passed(f"{CONNECTION}: {_ALONE}")
    seconds = budget_s(CONNECTION, request.budgets_s)
    deadline = time.monotonic() + seconds * CONNECTION_SHARE
    try:
        store = connect(world, CONNECTION, seconds * MEET_SHARE, note)
        meet(store, world.group_rank, world.group_world_size, seconds * MEET_SHARE, note)
        member = Member(world, CONNECTION, store, deadline, note)
        return _located(member.run(), world, member.failures)
    except WorldError as error:
        return _without_world(CONNECTION, error)


def _located(verdict: Localization, world: World, failures: list[str]) -> Outcome:
    """The verdict over all nodes, from where this one stands."""
    me, size = world.group_rank, world.group_world_size
    if verdict.healthy:
        return passed(f"{CONNECTION}: {size} nodes form a group, and its sum is right")
    whom = "; ".join(" and ".join(map(_fault, alternative)) for alternative in verdict.ambiguous)
    details: dict[str, Scalar] = {
        "rounds": verdict.rounds,
        "nodes": ", ".join(map(str, verdict.nodes)),
        "links": ", ".join(f"{a}-{b}" for a, b in verdict.links),
        "ambiguous": whom,
    }
    how = f"{verdict.reason}, in {verdict.rounds} rounds"
    own = f"; here: {failures[-1]}" if failures else ""
    if me in verdict.nodes:
        text = f"this node, rank {me}, can't form a group with any other ({how}){own}"
        return failed(f"{CONNECTION}.node", "hardware", f"{CONNECTION}: {text}", details)
    links = [link for link in verdict.links if me in link]
    if links:
        text = f"{', '.join(map(_fault, links))} of {size} nodes is broken, its ends are sound ({how}){own}"
        return failed(f"{CONNECTION}.link", "network", f"{CONNECTION}: {text}", details)
    if any(me in fault for alternative in verdict.ambiguous for fault in alternative):
        text = f"can't tell what is broken, this may be it: {whom} ({how}){own}"
        return failed(f"{CONNECTION}.ambiguous", "unknown", f"{CONNECTION}: {text}", details)
    if not verdict.conclusive:
        text = f"{size} nodes form no group, and nobody can be named: {how}{own}"
        return failed(f"{CONNECTION}.unclear", "unknown", f"{CONNECTION}: {text}", details)
    named = ", ".join(map(_fault, [*((node,) for node in verdict.nodes), *verdict.links]))
    text = f"this node, rank {me}, is sound; broken is {named or whom} ({how})"
    return passed(f"{CONNECTION}: {text}", details)


def _fault(fault: Fault) -> str:
    return f"node rank {fault[0]}" if len(fault) == 1 else f"the link {fault[0]}-{fault[1]}"


def performance(request: CheckRequest, note: Note) -> Outcome:
    """Time all-reduces over all nodes and exchanges in rotating pairs; fails on a slow node, only there."""
    world = _world(request)
    size, seconds = world.group_world_size, budget_s(PERFORMANCE, request.budgets_s)
    if size == 1:
        return passed(f"{PERFORMANCE}: {_ALONE}")
    try:
        with process_group(world, PERFORMANCE, world.group_rank, size, 0, seconds, note) as device:
            stopwatch = _Stopwatch(device, seconds * TIMED_SHARE)
            details: dict[str, Scalar] = {}
            for size_bytes, repetitions in SIZES:
                note(f"timing all-reduces of {size_bytes} bytes")
                took_s = stopwatch.allreduce_s(size_bytes, repetitions)
                details[f"allreduce_{size_bytes}_bytes_s"] = took_s
            note("timing exchanges in pairs")
            exchanges = stopwatch.exchanges(world.group_rank, size, details)
            return _judge(world, exchanges, request.slow_factor, details)
    except WorldError as error:
        return _without_world(PERFORMANCE, error)


def _without_world(kind: str, error: WorldError) -> Outcome:
    who = "node rank " if error.code == "missing_peer" else ""
    return failed(f"{kind}.{error.code}", "network", f"{kind}: {who}{error}")


def _world(request: CheckRequest) -> World:
    if request.world is None:
        raise ValueError("the collective checks need a world")
    return request.world


class _Stopwatch:
    """Times collective operations; every method is called by all nodes alike, in the same order."""

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self._device, self._limit_s = device, limit_s

    def allreduce_s(self, size_bytes: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the median."""
        data = torch.zeros(size_bytes // 4, device=self._device)
        return self._median_s(lambda: dist.all_reduce(data), repetitions, self._limit_s / len(SIZES))

    def exchanges(self, me: int, size: int, details: dict[str, Scalar]) -> dict[str, list[Exchange]]:
        """What exchanges of each kind took, the same list for every node; empty if too few to compare."""
        rounds = schedule(size)
        limit_s = self._limit_s / max(1, len(rounds) * len(PAIR_SIZES))
        mine = torch.zeros(len(rounds), len(PAIR_SIZES), dtype=torch.float64, device=self._device)
        for number, (_, pairs) in enumerate(rounds):
            partner = next((sum(pair) - me for pair in pairs if me in pair), None)
            for kind, (size_bytes, repetitions, _) in enumerate(PAIR_SIZES):
                exchange = (lambda: None) if partner is None else self._exchange(partner, size_bytes)
                mine[number, kind] = self._median_s(exchange, repetitions, limit_s)
            if partner is not None:
                bandwidth = round(PAIR_SIZES[-1][0] / float(mine[number, -1]))
                key = f"pair_{partner}_bytes_per_s"
                details[key] = max(bandwidth, int(details.get(key) or 0))
        if not rounds:
            return {}
        everyone = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(everyone, mine)
        return {
            kind: [
                # Both ends timed the same exchange.
                Exchange(turn, (a, b), float(everyone[a][number, index] + everyone[b][number, index]) / 2)
                for number, (turn, pairs) in enumerate(rounds)
                for a, b in pairs
            ]
            for index, (_, _, kind) in enumerate(PAIR_SIZES)
        }

    def _exchange(self, partner: int, size_bytes: int) -> Callable[[], None]:
        sent, received = (torch.zeros(size_bytes // 4, device=self._device) for _ in range(2))

        def exchange() -> None:
            both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return exchange

    def _median_s(self, operation: Callable[[], None], repetitions: int, limit_s: float) -> float:
        """Median seconds of one operation, after a first one that makes the connections."""
        first_s = torch.tensor([self._once_s(operation)], dtype=torch.float64, device=self._device)
        # All must repeat it equally often. And nobody begins before all are through, or the wait for a
        # partner that is still busy with a slow one would count as slowness.
        dist.all_reduce(first_s, dist.ReduceOp.MAX)
        fit_report = int(limit_s / max(1e-9, float(first_s)))
        return statistics.median(
            self._once_s(operation) for _ in range(max(1, min(repetitions, fit_report - 1)))
        )

    def _once_s(self, operation: Callable[[], None]) -> float:
        self._finish()
        started = time.perf_counter()
        operation()
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _judge(
    world: World, exchanges: Mapping[str, list[Exchange]], factor: float, details: dict[str, Scalar]
) -> Outcome:
    size, me, (large_bytes, _) = world.group_world_size, world.group_rank, SIZES[-1]
    small_s, large_s = (
        float(details[f"allreduce_{each}_bytes_s"] or 0) for each in (SIZES[0][0], large_bytes)
    )
    # What every node must send and receive at least, so that the figure doesn't depend on the number of
    # nodes.
    bus = large_bytes * 2 * (size - 1) / size / large_s if large_s > 0 else math.inf
    details["bus_bytes_per_s"] = round(bus) if math.isfinite(bus) else None
    figures = f"all-reduce over {size} nodes: {small_s * 1e6:.0f} us, {bus / 1e9:.2f} GB/s"
    mine, others = [], []
    for kind, times in exchanges.items():
        least = factor if kind == "bandwidth" else max(factor, LATENCY_FACTOR_MIN)
        slow = slow_nodes(times, least)
        details[f"slow_{kind}"] = ", ".join(f"{node} x{times:.2f}" for node, times in slow.items())
        mine += [f"{slow[me]:.2f} x slower in {kind}"] if me in slow else []
        others += [
            f"node rank {node} ({times:.2f} x in {kind})" for node, times in slow.items() if node != me
        ]
    if mine:
        text = f"this node is {' and '.join(mine)} than its peers' median ({figures})"
        return failed(f"{PERFORMANCE}.slow", "slow", f"{PERFORMANCE}: {text}", details)
    names = f"; slow is {', '.join(others)}, not this one" if others else ""
    compared = "" if exchanges else f"; with fewer than {PEERS_MIN} nodes none can be called slow"
    return passed(f"{PERFORMANCE}: {figures}{names}{compared}", details)
