"""Who is measured with whom, and who is slow: pure functions over node indices and bandwidths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

# Comparing needs a majority: with two nodes there is no telling whether one is slow or the other fast.
PEERS_MIN = 3


def pair_rounds(nodes: int, rounds_max: int) -> list[list[tuple[int, int]]]:
    """Up to `rounds_max` rounds of disjoint pairs of `nodes` nodes; no pair comes twice (the circle method).

    With an odd count one node sits out in every round.
    """
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(rounds_max, len(seats) - 1)):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def slow_nodes(best: Mapping[int, float], factor: float) -> dict[int, float]:
    """Nodes at least `factor` times slower than the median of the others, with how many times.

    `best` is every node's best bandwidth with any partner: a healthy node that met one slow partner has met
    another one too, a slow node is slow with everybody.
    """
    if len(best) < PEERS_MIN:
        return {}
    slow = {}
    for node, bandwidth in best.items():
        others = statistics.median(value for other, value in best.items() if other != node)
        if others >= factor * bandwidth:
            slow[node] = others / bandwidth if bandwidth > 0 else float("inf")
    return slow
