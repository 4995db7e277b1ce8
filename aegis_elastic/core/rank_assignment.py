"""Who takes part in the next start, and with which ranks.

A worker's group rank is its place in `Status.pods`. Places are given once, when the world first forms, and
kept over every restart; a spare that steps in takes the place of the worker it replaces. So ranks move only
when the world shrinks or grows.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import PodInfo


class Seat(msgspec.Struct, frozen=True, rename="camel"):
    """One worker's place in the world: group rank, its first global rank, its number of processes."""

    worker: str
    uid: str
    group_rank: int
    rank_offset: int
    nproc: int


def seating(pods: tuple[PodInfo, ...]) -> tuple[Seat, ...]:
    """The seats of these workers, in group-rank order; global ranks are consecutive over them."""
    seats, offset = [], 0
    for group_rank, pod in enumerate(pods):
        seats.append(Seat(pod.name, pod.uid, group_rank, offset, pod.nproc))
        offset += pod.nproc
    return tuple(seats)


def first_order(pods: tuple[PodInfo, ...]) -> tuple[PodInfo, ...]:
    """The order when the world first forms: workers with a given node rank by it, the others as they came.

    A worker that gave its node rank keeps that place where it can, so `--node-rank 0` is group rank 0.
    """
    given = sorted((pod for pod in pods if pod.ordinal >= 0), key=lambda pod: pod.ordinal)
    others = [pod for pod in pods if pod.ordinal < 0]
    placed: list[PodInfo] = []
    for pod in given:
        while len(placed) < pod.ordinal and others:
            placed.append(others.pop(0))
        placed.append(pod)
    return tuple(placed + others)
