"""What this node's checks are asked: from an order and what the agent knows of its node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from aegis_elastic.agents.link import Identity
from aegis_elastic.agents.stores import split
from aegis_elastic.checks.request import CheckRequest, Scalar, World
from aegis_elastic.core.orders import Order
from aegis_elastic.core.ranks import Seat
from aegis_elastic.core.recovery import COLLECTIVE_CHECKS

_MEETING_CHECKS = frozenset({"health", *COLLECTIVE_CHECKS})
_DEVICE = re.compile(r"nvidia\d+")


def count_gpus() -> int:
    """How many GPUs this node shows as devices, without touching a driver: what later checks expect to
    find.
    """
    return sum(1 for entry in Path("/dev").iterdir() if _DEVICE.fullmatch(entry.name))


def needs_store(order: Order) -> bool:
    """Whether the order's checks form a process group."""
    return not _MEETING_CHECKS.isdisjoint(order.checks)


def check_request(
    order: Order,
    seat: Seat,
    me: Identity,
    paths: Mapping[str, str],
    gpus: int,
    baseline: Mapping[str, Scalar],
) -> CheckRequest:
    """The request for the checks of this order. Checks that need a store and have none are left out.

    `baseline`: what the counters of this node's devices were when last nothing was wrong with them.
    """
    world = None
    checks = order.checks
    if needs_store(order) and order.store:
        host, port = split(order.store)
        world = World(
            group_rank=seat.group_rank,
            group_world_size=len(order.seats),
            rank_offset=seat.rank_offset,
            world_size=sum(other.nproc for other in order.seats),
            local_world_size=seat.nproc,
            master_addr=host,
            master_port=port,
            device="cuda" if gpus else "cpu",
            tag=str(order.seq_num),
        )
    elif needs_store(order):
        checks = tuple(check for check in checks if check not in _MEETING_CHECKS)
    return CheckRequest(
        checks=checks,
        worker=me.worker,
        node=me.node_name,
        paths={"shm": "/dev/shm", **paths},
        expected_gpus=max(gpus, seat.nproc) if gpus else None,
        world=world,
        baseline=dict(baseline),
    )
