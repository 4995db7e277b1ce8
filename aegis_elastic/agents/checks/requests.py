"""Requests for this node's checks: made from an order and what the agent knows of its node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aegis_elastic.agents.peers.stores import split
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.checks.contract.budgets import DEFAULT_BUDGETS_S
from aegis_elastic.checks.contract.request import CheckRequest, RankExit, Scalar, World
from aegis_elastic.core.diagnosis.recovery import COLLECTIVE_CHECKS
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment

_GROUP_CHECKS = frozenset({"health", *COLLECTIVE_CHECKS})
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_DEVICE = re.compile(r"nvidia\d+")
# Clues for which the ranks' stacks are read before they are stopped: only then they show who waits for whom.
_HANG_CLUES = frozenset({"hang", "collective_timeout"})
# All nodes wait for this check, and stacks are read in a moment or not at all.
HANG_CHECK_S_MAX = 10.0


@dataclass(frozen=True)
class CheckSettings:
    """The user's settings for checks: directories by kind, budgets in seconds by check, how many GPUs there
    should be (None: as many as there are)."""

    paths: Mapping[str, str] = field(default_factory=dict)
    budgets_s: Mapping[str, float] = field(default_factory=dict)
    gpus: int | None = None


def count_gpus() -> int:
    """How many GPUs this node has as device files, without a call to a driver."""
    return sum(1 for entry in Path("/dev").iterdir() if _GPU_DEVICE.fullmatch(entry.name))


def expected_gpus(settings: CheckSettings, gpus: int, ranks: int) -> int | None:
    """How many GPUs the checks are to find: the user's setting, else those that the node has.

    If there are fewer than ranks, but more than half as many, some are taken to be missing, for which the
    node leaves. With fewer still, ranks share GPUs or need none: a job on CPUs must not lose its nodes.
    """
    if settings.gpus is not None:
        return settings.gpus
    missing = gpus < ranks < 2 * gpus and _VISIBLE not in os.environ
    return (ranks if missing else gpus) or None


def device_of(gpus: int, ranks: int) -> str:
    """The device of a process group of a node's ranks: "cuda" if each sees one of its own, else "cpu"."""
    seen = os.environ.get(_VISIBLE)
    if seen is not None:
        gpus = min(gpus, sum(1 for name in seen.split(",") if name.strip() not in ("", "-1")))
    return "cuda" if torch.version.cuda and ranks <= gpus else "cpu"


def needs_store(order: Order) -> bool:
    """Whether the order's checks form a process group."""
    return not _GROUP_CHECKS.isdisjoint(order.checks)


def suspects_hang(order: Order) -> bool:
    """Whether the ranks' stacks are to be read before they are stopped."""
    return "hang" in order.checks and not _HANG_CLUES.isdisjoint(order.clues)


def hang_check_request(me: Identity, settings: CheckSettings, pids: Mapping[int, int]) -> CheckRequest:
    """The request for the hang check of ranks that still live (global rank -> pid)."""
    seconds = min(settings.budgets_s.get("hang", DEFAULT_BUDGETS_S["hang"]), HANG_CHECK_S_MAX)
    return CheckRequest(
        checks=("hang",),
        worker=me.worker,
        node=me.node_name,
        rank_pids=dict(pids),
        budgets_s={"hang": seconds},
    )


def check_request(
    order: Order,
    assignment: RankAssignment,
    me: Identity,
    settings: CheckSettings,
    gpus: int,
    baseline: Mapping[str, Scalar],
    exits: Mapping[int, RankExit],
) -> CheckRequest:
    """The request for the checks of this order. Checks that need a store are left out if it names none.

    `gpus`: how many this node has. `baseline`: the counters of its devices at the last check that passed.
    `exits`: its ranks that ended by themselves.
    """
    world = None
    checks = order.checks
    if needs_store(order) and order.store:
        world = world_of(order, assignment, order.store, gpus)
    elif needs_store(order):
        checks = tuple(check for check in checks if check not in _GROUP_CHECKS)
    return CheckRequest(
        checks=checks,
        worker=me.worker,
        node=me.node_name,
        paths={"shm": "/dev/shm", **settings.paths},
        expected_gpus=expected_gpus(settings, gpus, assignment.nproc),
        world=world,
        baseline=dict(baseline),
        budgets_s=dict(settings.budgets_s),
        peer_medians=order.peers,
        exits=dict(exits),
    )


def world_of(order: Order, assignment: RankAssignment, store: str, gpus: int, tag: str = "") -> World:
    """The process group of the order's collective checks, for this rank assignment, with its store at
    `store`.
    """
    host, port = split(store)
    return World(
        group_rank=assignment.group_rank,
        group_world_size=len(order.assignments),
        rank_offset=assignment.rank_offset,
        world_size=sum(other.nproc for other in order.assignments),
        local_world_size=assignment.nproc,
        master_addr=host,
        master_port=port,
        device=device_of(gpus, assignment.nproc),
        tag=tag or str(order.seq_num),
    )
