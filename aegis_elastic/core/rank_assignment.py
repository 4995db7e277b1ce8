"""Rank assignment: who takes part in the next start, and with which ranks.

A worker's group rank is its index in `Status.workers`. The order is fixed when the world first forms and kept
over every restart; a spare takes the index of the worker it replaces. So ranks change only when the world
shrinks or grows.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import Worker


class RankAssignment(msgspec.Struct, frozen=True, rename="camel"):
    """One worker's place in the world: group rank, its first global rank, its number of processes."""

    worker: str
    uid: str
    group_rank: int
    rank_offset: int
    nproc: int


def assign_ranks(workers: tuple[Worker, ...]) -> tuple[RankAssignment, ...]:
    """The assignments of these workers, in group-rank order; global ranks are consecutive over them."""
    assignments, offset = [], 0
    for group_rank, worker in enumerate(workers):
        assignments.append(RankAssignment(worker.name, worker.uid, group_rank, offset, worker.nproc))
        offset += worker.nproc
    return tuple(assignments)


def first_order(workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """The order when the world first forms: workers with a given node rank by it, others by arrival.

    A given node rank becomes the group rank where possible, so `--node-rank 0` is group rank 0.
    """
    given = sorted((worker for worker in workers if worker.ordinal >= 0), key=lambda worker: worker.ordinal)
    others = [worker for worker in workers if worker.ordinal < 0]
    placed: list[Worker] = []
    for worker in given:
        while len(placed) < worker.ordinal and others:
            placed.append(others.pop(0))
        placed.append(worker)
    return tuple(placed + others)
