"""The two collective checks over the nodes: can they form a process group, and how fast is each node in it.

One process per node takes part (nccl with GPUs, gloo without), by the node's group rank. A group that doesn't
form is divided further until the broken node or link is known (`core.diagnosis.localization`); a slow node is
distinguished from its partners by rotating pairs (`core.diagnosis.outliers`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from aegis_elastic.checks.collective.process_group import (
    ProcessGroupError,
    connect,
    process_group,
    wait_for_peers,
)
from aegis_elastic.checks.collective.rounds import Member
from aegis_elastic.checks.contract.budgets import budget_s
from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest, World
from aegis_elastic.core.diagnosis.localization import Fault, Localization
from aegis_elastic.core.diagnosis.outliers import PEERS_MIN, Exchange, schedule, slow_nodes

CONNECTION, PERFORMANCE = "allreduce_connection", "allreduce_performance"
# Shares of the connection's budget: to wait for peers, and until the end of the last round. Time that waiting
# doesn't need goes to the rounds.
PEERS_SHARE, CONNECTION_SHARE = 0.35, 0.93
# Share of the performance's budget for all timed operations of a kind. A slow network gets fewer repetitions.
TIMED_SHARE = 0.25
# (bytes, repetitions) of all-reduces over all nodes: the first measures latency, the last bandwidth.
SIZES = ((4 << 10, 30), (1 << 20, 10), (16 << 20, 5))
# (bytes, repetitions, what it measures) of exchanges in pairs.
PAIR_SIZES = ((4 << 10, 10, "latency"), (4 << 20, 5, "bandwidth"))
# Latency depends more on a busy core or one more switch than on faults: smaller factors aren't reported.
LATENCY_FACTOR_MIN = 2.0
_SINGLE_NODE = "this is the only node, there is no network between nodes to try"


def connection(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Whether all nodes form a group that computes the right sum; and if not, which node or link is broken.

    Only the broken node fails with scope "hardware"; a broken link fails at both its ends; an ambiguous fault
    fails at all nodes that it may be.
    """
    world = _world(request)
    if world.group_world_size == 1:
        return passed(f"{CONNECTION}: {_SINGLE_NODE}")
    seconds = budget_s(CONNECTION, request.budgets_s)
    deadline = time.monotonic() + seconds * CONNECTION_SHARE
    try:
        store = connect(world, CONNECTION, seconds * PEERS_SHARE, on_step)
        wait_for_peers(store, world.group_rank, world.group_world_size, seconds * PEERS_SHARE, on_step)
        member = Member(world, CONNECTION, store, deadline, on_step)
        return _outcome(member.run(), world, member.failures)
    except ProcessGroupError as error:
        return _group_failure(CONNECTION, error)


def _outcome(verdict: Localization, world: World, failures: list[str]) -> Outcome:
    """The outcome for this node of the verdict over all nodes."""
    me, size = world.group_rank, world.group_world_size
    if verdict.healthy:
        return passed(f"{CONNECTION}: {size} nodes form a group, and its sum is right")
    alternatives = "; ".join(" and ".join(map(_fault, alternative)) for alternative in verdict.ambiguous)
    details: dict[str, Scalar] = {
        "rounds": verdict.rounds,
        "nodes": ", ".join(map(str, verdict.nodes)),
        "links": ", ".join(f"{a}-{b}" for a, b in verdict.links),
        "ambiguous": alternatives,
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
        text = f"can't tell what is broken, this may be it: {alternatives} ({how}){own}"
        return failed(f"{CONNECTION}.ambiguous", "unknown", f"{CONNECTION}: {text}", details)
    if not verdict.conclusive:
        text = f"{size} nodes form no group, and nobody can be named: {how}{own}"
        return failed(f"{CONNECTION}.unclear", "unknown", f"{CONNECTION}: {text}", details)
    named = ", ".join(map(_fault, [*((node,) for node in verdict.nodes), *verdict.links]))
    text = f"this node, rank {me}, is sound; broken is {named or alternatives} ({how})"
    return passed(f"{CONNECTION}: {text}", details)


def _fault(fault: Fault) -> str:
    return f"node rank {fault[0]}" if len(fault) == 1 else f"the link {fault[0]}-{fault[1]}"


def performance(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Time all-reduces over all nodes and exchanges in rotating pairs; fails only on a slow node."""
    world = _world(request)
    size, seconds = world.group_world_size, budget_s(PERFORMANCE, request.budgets_s)
    if size == 1:
        return passed(f"{PERFORMANCE}: {_SINGLE_NODE}")
    try:
        with process_group(world, PERFORMANCE, world.group_rank, size, 0, seconds, on_step) as device:
            timer = _Timer(device, seconds * TIMED_SHARE)
            details: dict[str, Scalar] = {}
            for size_bytes, repetitions in SIZES:
                on_step(f"timing all-reduces of {size_bytes} bytes")
                took_s = timer.allreduce_s(size_bytes, repetitions)
                details[f"allreduce_{size_bytes}_bytes_s"] = took_s
            on_step("timing exchanges in pairs")
            exchanges = timer.exchanges(world.group_rank, size, details)
            return _judge(world, exchanges, request.slow_factor, details)
    except ProcessGroupError as error:
        return _group_failure(PERFORMANCE, error)


def _group_failure(kind: str, error: ProcessGroupError) -> Outcome:
    prefix = "node rank " if error.code == "missing_peer" else ""
    return failed(f"{kind}.{error.code}", "network", f"{kind}: {prefix}{error}")


def _world(request: CheckRequest) -> World:
    if request.world is None:
        raise ValueError("the collective checks need a world")
    return request.world


class _Timer:
    """Times collective operations; every method is called by all nodes alike, in the same order."""

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self._device, self._limit_s = device, limit_s

    def allreduce_s(self, size_bytes: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the median."""
        data = torch.zeros(size_bytes // 4, device=self._device)
        return self._median_s(lambda: dist.all_reduce(data), repetitions, self._limit_s / len(SIZES))

    def exchanges(self, me: int, size: int, details: dict[str, Scalar]) -> dict[str, list[Exchange]]:
        """The times of exchanges of each kind, the same list on every node; empty if too few to compare."""
        rounds = schedule(size)
        limit_s = self._limit_s / max(1, len(rounds) * len(PAIR_SIZES))
        own = torch.zeros(len(rounds), len(PAIR_SIZES), dtype=torch.float64, device=self._device)
        for number, (_, pairs) in enumerate(rounds):
            partner = next((sum(pair) - me for pair in pairs if me in pair), None)
            for kind, (size_bytes, repetitions, _) in enumerate(PAIR_SIZES):
                exchange = (lambda: None) if partner is None else self._exchange(partner, size_bytes)
                own[number, kind] = self._median_s(exchange, repetitions, limit_s)
            if partner is not None:
                bandwidth = round(PAIR_SIZES[-1][0] / float(own[number, -1]))
                key = f"pair_{partner}_bytes_per_s"
                details[key] = max(bandwidth, int(details.get(key) or 0))
        if not rounds:
            return {}
        everyone = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(everyone, own)
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
        # All must repeat it equally often, and none may begin before all have finished: the wait for a
        # partner that is still busy with a slow node would count as slowness.
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
    # Bandwidth by the bytes that every node must send and receive at least, which makes it independent of the
    # number of nodes.
    bus = large_bytes * 2 * (size - 1) / size / large_s if large_s > 0 else math.inf
    details["bus_bytes_per_s"] = round(bus) if math.isfinite(bus) else None
    figures = f"all-reduce over {size} nodes: {small_s * 1e6:.0f} us, {bus / 1e9:.2f} GB/s"
    own, others = [], []
    for kind, times in exchanges.items():
        threshold = factor if kind == "bandwidth" else max(factor, LATENCY_FACTOR_MIN)
        slow = slow_nodes(times, threshold)
        details[f"slow_{kind}"] = ", ".join(f"{node} x{times:.2f}" for node, times in slow.items())
        own += [f"{slow[me]:.2f} x slower in {kind}"] if me in slow else []
        others += [
            f"node rank {node} ({times:.2f} x in {kind})" for node, times in slow.items() if node != me
        ]
    if own:
        text = f"this node is {' and '.join(own)} than its peers' median ({figures})"
        return failed(f"{PERFORMANCE}.slow", "slow", f"{PERFORMANCE}: {text}", details)
    names = f"; slow is {', '.join(others)}, not this one" if others else ""
    compared = "" if exchanges else f"; with fewer than {PEERS_MIN} nodes none can be called slow"
    return passed(f"{PERFORMANCE}: {figures}{names}{compared}", details)
