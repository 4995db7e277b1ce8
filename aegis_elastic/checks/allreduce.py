"""The two collective checks over the nodes: does a communicator come about, and how fast is each node in it.

One process per node takes part (nccl with GPUs, gloo without). Both meet their peers by the node's group
rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from aegis_elastic.checks.budgets import budget_s
from aegis_elastic.checks.frame import Note, Outcome, Scalar, failed, passed
from aegis_elastic.checks.peers import PEERS_MIN, pair_rounds, slow_nodes
from aegis_elastic.checks.request import CheckRequest, World
from aegis_elastic.checks.world import WorldError, process_group

CONNECTION, PERFORMANCE = "allreduce_connection", "allreduce_performance"
# (bytes, repetitions): the first tells latency, the last bandwidth.
SIZES = ((4 << 10, 30), (1 << 20, 10), (16 << 20, 5))
PAIR_BYTES, PAIR_REPETITIONS, PAIR_ROUNDS_MAX = 4 << 20, 5, 8


def connection(request: CheckRequest, note: Note) -> Outcome:
    """Form one group over all nodes and sum up over it."""
    world = _world(request)

    def verify(device: torch.device) -> Outcome:
        size = world.group_world_size
        value = torch.full((1024,), float(world.group_rank + 1), device=device)
        dist.all_reduce(value)
        wrong = int((value != size * (size + 1) / 2).sum())
        if wrong:
            text = f"{CONNECTION}: {wrong} of 1024 sums over {size} nodes are wrong here"
            return failed(f"{CONNECTION}.wrong_value", "hardware", text)
        return passed(f"{CONNECTION}: {size} nodes form a group, and its sum is right")

    return _in_group(request, CONNECTION, note, verify)


def performance(request: CheckRequest, note: Note) -> Outcome:
    """Time all-reduces over all nodes and exchanges in pairs; fails on a node that is slow with everybody."""
    world = _world(request)

    def measure(device: torch.device) -> Outcome:
        details: dict[str, Scalar] = {}
        for size_bytes, repetitions in SIZES:
            note(f"timing all-reduces of {size_bytes} bytes")
            details[f"allreduce_{size_bytes}_bytes_s"] = _allreduce_s(size_bytes, repetitions, device)
        note("timing exchanges in pairs")
        best = _pair_bandwidths(world, device, details)
        return _judge(world, best, request.slow_factor, details)

    return _in_group(request, PERFORMANCE, note, measure)


def _in_group(
    request: CheckRequest, kind: str, note: Note, body: Callable[[torch.device], Outcome]
) -> Outcome:
    world = _world(request)
    if world.group_world_size == 1:
        return passed(f"{kind}: this is the only node, there is no network between nodes to try")
    seconds = budget_s(kind, request.budgets_s)
    try:
        with process_group(world, kind, world.group_rank, world.group_world_size, 0, seconds, note) as device:
            return body(device)
    except WorldError as error:
        who = "node rank " if error.code == "missing_peer" else ""
        return failed(f"{kind}.{error.code}", "network", f"{kind}: {who}{error}")


def _world(request: CheckRequest) -> World:
    if request.world is None:
        raise ValueError("the collective checks need a world")
    return request.world


def _timed_s(operation: Callable[[], None], repetitions: int, device: torch.device) -> float:
    """Median seconds of one operation, after a first one that makes the connections."""
    times = []
    operation()
    for _ in range(repetitions):
        _finish(device)
        started = time.perf_counter()
        operation()
        _finish(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allreduce_s(size_bytes: int, repetitions: int, device: torch.device) -> float:
    data = torch.zeros(size_bytes // 4, device=device)
    return _timed_s(lambda: dist.all_reduce(data), repetitions, device)


def _pair_bandwidths(world: World, device: torch.device, details: dict[str, Scalar]) -> dict[int, float]:
    """Every node's best bandwidth with a partner, bytes/s each way; empty if too few to compare."""
    size = world.group_world_size
    if size < PEERS_MIN:
        return {}
    mine = 0.0
    for pairs in pair_rounds(size, PAIR_ROUNDS_MAX):
        # Without this the wait for a partner that is still busy with a slow one would count as slowness.
        dist.barrier()
        partner = {**dict(pairs), **{b: a for a, b in pairs}}.get(world.group_rank)
        if partner is not None:
            bandwidth = PAIR_BYTES / _exchange_s(partner, device)
            details[f"pair_{partner}_bytes_per_s"] = round(bandwidth)
            mine = max(mine, bandwidth)
    everyone = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(size)]
    dist.all_gather(everyone, torch.tensor([mine], dtype=torch.float64, device=device))
    return {node: float(value) for node, value in enumerate(everyone)}


def _exchange_s(partner: int, device: torch.device) -> float:
    sent, received = (torch.zeros(PAIR_BYTES // 4, device=device) for _ in range(2))

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return _timed_s(exchange, PAIR_REPETITIONS, device)


def _judge(world: World, best: dict[int, float], factor: float, details: dict[str, Scalar]) -> Outcome:
    size, (large_bytes, _) = world.group_world_size, SIZES[-1]
    small_s, large_s = (
        float(details[f"allreduce_{each}_bytes_s"] or 0) for each in (SIZES[0][0], large_bytes)
    )
    # What every node must send and receive at least, so that the figure doesn't depend on the number of
    # nodes.
    bus = large_bytes * 2 * (size - 1) / size / large_s if large_s > 0 else math.inf
    details["bus_bytes_per_s"] = round(bus) if math.isfinite(bus) else None
    figures = f"all-reduce over {size} nodes: {small_s * 1e6:.0f} us, {bus / 1e9:.2f} GB/s"
    slow = slow_nodes(best, factor)
    if slow:
        details["slow_nodes"] = ", ".join(str(node) for node in slow)
    if world.group_rank in slow:
        text = f"this node is {slow[world.group_rank]:.1f} x slower than its peers' median ({figures})"
        return failed(f"{PERFORMANCE}.slow", "slow", f"{PERFORMANCE}: {text}", details)
    names = f"; slow are node ranks {details['slow_nodes']}, not this one" if slow else ""
    compared = "" if best else f"; with fewer than {PEERS_MIN} nodes none can be called slow"
    return passed(f"{PERFORMANCE}: {figures}{names}{compared}", details)
