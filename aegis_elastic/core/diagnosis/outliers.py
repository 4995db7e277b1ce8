"""Which node is slower than its peers, from exchanges in rotating pairs: robust statistics, pure.

An exchange takes as long as the slower of its two nodes, so a slow node makes every partner look slow for
one round. And everything may be slow for a while (another job on the switch), which is nobody's fault. Times
are therefore compared as logarithms, with

    log(time of a and b in turn t) = common(t) + max(score(a), score(b)) + noise

fitted by medians: a node's score is the lower median over its partners, so that it takes slowness with most
of them to be slow; common(t) is the median over the pairs of a turn. A node is called slow if its score lies
above its peers' median by more than `factor_min` and by more than chance and the peers' own spread allow:
noisy or few measurements raise the bar instead of naming a node. If more than a third of the nodes seem
slow, these are machines of two kinds, or it can't be told which slows which: none is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aegis_elastic.core.diagnosis.localization import Link, pair_rounds

# Comparing needs a majority: of two nodes it can't be told whether one is slow or the other fast.
PEERS_MIN = 3
# Measurements of each node: eight partners tell enough; of fewer nodes more times, since there the noise has
# to be told from few pairs.
PARTNERS_MAX, FEW_PARTNERS_MEASUREMENTS = 8, 16
# How many standard errors, and how many of the peers' own deviations. A check compares every node twice, and
# a thousand checks must not name a node by chance.
SIGMAS = 6.0
# Standard deviation over median absolute deviation, and standard error of a median over that of a mean,
# both of a normal distribution.
_MAD_SIGMA, _MEDIAN_ERROR = 1.4826, 1.2533
# An estimate of the noise from few measurements may be far too small: the bar is raised by 1 + this/freedom.
_FEW = 4.0
_PASSES = 3


class Exchange(NamedTuple):
    """One measurement: `pair` exchanged within `seconds` (> 0). Pairs of one `turn` share its conditions."""

    turn: int
    pair: Link
    seconds: float


def schedule(nodes: int) -> list[tuple[int, list[Link]]]:
    """Rounds of disjoint pairs, each with its turn: every node is measured about equally often.

    With three nodes a round has one pair, which can't be compared with itself: there the whole cycle of
    three rounds is one turn.
    """
    if nodes < PEERS_MIN:
        return []
    cycle = pair_rounds(nodes, PARTNERS_MAX)
    cycles = 1 if nodes > PARTNERS_MAX else math.ceil(FEW_PARTNERS_MEASUREMENTS / (nodes - 1))
    rounds = [(number, pairs) for number in range(cycles) for pairs in cycle]
    return rounds if nodes == PEERS_MIN else [(turn, pairs) for turn, (_, pairs) in enumerate(rounds)]


def slow_nodes(exchanges: Sequence[Exchange], factor_min: float) -> dict[int, float]:
    """The slow nodes, and how many times slower than the median of the others each is.

    `factor_min` (> 1): less than that isn't called slow however sure it is.
    """
    if factor_min <= 1:
        raise ValueError(f"cannot call nodes slow that aren't: the factor must be above 1 (got {factor_min})")
    logs = [(each.turn, each.pair, math.log(each.seconds)) for each in exchanges]
    if len({node for _, pair, _ in logs for node in pair}) < PEERS_MIN:
        return {}
    scores, noise = _fit(logs)
    typical = statistics.median(scores.values())
    if 3 * sum(score - typical > math.log(factor_min) for score in scores.values()) > len(scores):
        return {}
    slow = {}
    for node, score in scores.items():
        others = [value for other, value in scores.items() if other != node]
        middle = statistics.median(others)
        spread = _MAD_SIGMA * statistics.median(abs(value - middle) for value in others)
        error = _MEDIAN_ERROR * noise / math.sqrt(_weight(logs, node))
        if score - middle > max(math.log(factor_min), SIGMAS * error, SIGMAS * spread):
            slow[node] = math.exp(score - middle)
    return slow


def _fit(logs: Sequence[tuple[int, Link, float]]) -> tuple[dict[int, float], float]:
    """Every node's score, and the standard deviation of the noise of one measurement, a careful estimate."""
    scores = {node: 0.0 for _, pair, _ in logs for node in pair}
    common: dict[int, float] = {}
    for _ in range(_PASSES):
        rests: dict[int, list[float]] = {}
        for turn, pair, value in logs:
            rests.setdefault(turn, []).append(value - _slower(scores, pair))
        common = {turn: statistics.median(values) for turn, values in rests.items()}
        with_partner: dict[int, dict[int, list[float]]] = {node: {} for node in scores}
        for turn, (a, b), value in logs:
            with_partner[a].setdefault(b, []).append(value - common[turn])
            with_partner[b].setdefault(a, []).append(value - common[turn])
        scores = {
            node: statistics.median_low(statistics.median(values) for values in partners.values())
            for node, partners in with_partner.items()
        }
    left = [abs(value - common[turn] - _slower(scores, pair)) for turn, pair, value in logs]
    # What was fitted has taken its part of the noise along.
    freedom = max(1, len(logs) - len(common) - len(scores) + 1)
    careful = math.sqrt(len(logs) / freedom) * (1 + _FEW / freedom)
    return scores, _MAD_SIGMA * statistics.median(left) * careful


def _slower(scores: Mapping[int, float], pair: Link) -> float:
    return max(scores[pair[0]], scores[pair[1]])


def _weight(logs: Sequence[tuple[int, Link, float]], node: int) -> float:
    """How many measurements a node's score rests on; of two partners the better one alone decides."""
    partners = [pair[0] + pair[1] - node for _, pair, _ in logs if node in pair]
    return len(partners) / (2 if len(set(partners)) <= 2 else 1)
