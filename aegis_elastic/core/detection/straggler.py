"""Stragglers: which rank computes longer than its peers, and keeps all of them waiting.

In a synchronous training every step takes as long as the slowest rank's, so step times tell nothing. A rank's
own work between collectives does (`worker.step_hooks`). For each window of iterations every rank reports its
usual own work, up to the first collective and up to the last. A rank is slow in a window if one of them
lies above its peers' median by more than `FACTOR_MIN`, by more than the peers differ among themselves, and by
a relevant part of the step. Where most look slow at once there is a common cause, and no rank is slow.

What lies between the first collective and the last may be waiting, too: with a slow link somewhere, ranks
leave the one at different times, and reach the next one so. Unless that is known and subtracted, being late
there counts only for a rank that has used the processor more.

Peers are ranks with the same work: those that reduce or gather data together, be it over several groups
(`equals`). Stages of a pipeline do that each among themselves, and are compared each among themselves. Yet a
late stage makes the next one late where its wait is unknown; so of slow ranks in several stages, on several
nodes, only those are named whose own processor time explains it.

One window proves nothing: a mark needs `BAD_WINDOWS` in a row, and more of them where iterations differ so
much that all together they could still be chance (`SURE`). It goes away after `GOOD_WINDOWS` in a row. It is
made only where moving the node out pays: the time saved until the end against what a restart costs.

A slow link shows in no rank's own work: it slows the collective itself, for everybody. What each rank's
connections deliver tells that (`core.detection.anomalies`, `network.drop`), and the performance check
(`checks/collective/allreduce.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from aegis_elastic.core.detection.progress import WindowWork

# Comparing needs a majority: of two it can't be told whether one is slow or the other fast.
RANKS_MIN = 3
# Among this many no single one moves the median: all are compared with the same, or it would take minutes.
MANY = 128
# At most this many of the worst are named in one window.
NAMED_MAX = 16
# Less than this many times the peers' median isn't called slow however sure it is.
FACTOR_MIN = 1.15
# The peers' own spread, in robust standard deviations, and the least spread that is believed: a handful of
# peers may agree by chance.
SIGMAS, SIGMA_MIN = 4.0, 0.02
# The loss must be at least this part of an iteration.
SHARE_MIN = 0.05
COUNT_MIN = 4
BAD_WINDOWS, GOOD_WINDOWS = 3, 6
# Standard errors by which the windows in a row must lie above the peers, all of them taken together.
SURE = 5.0
# The remaining time of a job is unknown: it is taken to be the time it has run, at least this.
LEFT_S_MIN = 3600.0
# What moving a node out costs as long as this job has no figure of its own: stop, checks, start, first step.
COST_S = 60.0
_MAD_SIGMA, _MEDIAN_ERROR = 1.4826, 1.2533


class Slow(NamedTuple):
    """A rank that keeps its peers waiting. Times in µs, `share` is the lost part of every iteration.

    `error_us` is the standard error of the difference to its peers.
    """

    rank: int
    own_us: float
    peers_us: float
    step_us: float
    cpu_us: float
    peers_cpu_us: float
    where: str
    error_us: float = 0.0

    @property
    def certainty(self) -> float:
        """By how many standard errors it lies above its peers."""
        return (self.own_us - self.peers_us) / self.error_us if self.error_us else math.inf

    @property
    def ratio(self) -> float:
        """How many times its peers' median."""
        return self.own_us / self.peers_us

    @property
    def share(self) -> float:
        """The part of an iteration that all lose to it."""
        return min(1.0, (self.own_us - self.peers_us) / max(self.step_us, self.own_us))

    @property
    def computes_more(self) -> bool:
        """Whether its processor time explains it."""
        grew = self.cpu_us / self.peers_cpu_us if self.peers_cpu_us > 0 else 1.0
        return grew > 1 + (self.ratio - 1) / 2

    def describe(self) -> str:
        """With numbers, for a person."""
        why = (
            f"it computes more ({self.cpu_us / 1000:.3g} ms CPU a step, peers {self.peers_cpu_us / 1000:.3g})"
            if self.computes_more
            else "it doesn't compute more: starved, throttled, or waiting for data"
        )
        return (
            f"rank {self.rank} takes {self.own_us / 1000:.3g} ms of own work {self.where}, its peers "
            f"{self.peers_us / 1000:.3g} ms ({self.ratio:.2f} times; {self.share:.0%} of each step is lost): "
            f"{why}"
        )


def equals(window: Mapping[int, WindowWork]) -> list[frozenset[int]]:
    """Sets of ranks with the same work: ranks that share a group of equals. Those without a known group are
    compared with one another.
    """
    by_key: dict[int, set[int]] = {}
    for rank, own in window.items():
        for key in own.groups or (0,):
            by_key.setdefault(key, set()).add(rank)
    found: list[set[int]] = []
    for ranks in by_key.values():
        apart = [each for each in found if each.isdisjoint(ranks)]
        joined = set(ranks).union(*(each for each in found if not each.isdisjoint(ranks)))
        found = [*apart, joined]
    return [frozenset(ranks) for ranks in found]


def slow_ranks(window: Mapping[int, WindowWork], node_of: Mapping[int, str] | None = None) -> dict[int, Slow]:
    """The slow ranks of this window. Empty if most seem slow, or if there are too few to compare. `node_of`:
    rank -> node; without it each rank counts as on a node of its own.
    """
    known = {rank: own for rank, own in window.items() if own.count >= COUNT_MIN}
    several = [_slow_among({rank: known[rank] for rank in ranks}) for ranks in equals(known)]
    found = {rank: slow for each in several for rank, slow in each.items()}
    places = {(node_of or {}).get(rank, str(rank)) for rank in found}
    if sum(map(bool, several)) > 1 and len(places) > 1:
        return {rank: slow for rank, slow in found.items() if slow.computes_more}
    return found


def _slow_among(known: Mapping[int, WindowWork]) -> dict[int, Slow]:
    if len(known) < RANKS_MIN:
        return {}
    found: dict[int, Slow] = {}
    for part in ("first", "last"):
        times = {rank: max(1.0, float(getattr(own, f"{part}_us"))) for rank, own in known.items()}
        late = _late(times)
        # A third of them is no exception any more; of three ranks one may be.
        if late and len(late) <= max(1, len(times) // 3):
            for rank in sorted(late, key=times.__getitem__, reverse=True)[:NAMED_MAX]:
                one = _compared(rank, times, known, part)
                own_doing = part == "first" or known[rank].timed or one.computes_more
                so_far = found[rank].share if rank in found else 0.0
                if own_doing and one.share >= SHARE_MIN and one.share > so_far:
                    found[rank] = one
    return found


def _late(times: Mapping[int, float]) -> list[int]:
    """The ranks above the limit that their peers set."""
    if len(times) > MANY:
        limit = _limit(list(times.values()))
        return [rank for rank, time in times.items() if time > limit]
    return [rank for rank, time in times.items() if time > _limit(_peers(rank, times))]


def _peers(rank: int, times: Mapping[int, float]) -> list[float]:
    return [time for other, time in times.items() if other != rank]


def _limit(peers: list[float]) -> float:
    logs = [math.log(peer) for peer in peers]
    middle = statistics.median(logs)
    spread = _MAD_SIGMA * statistics.median(abs(log - middle) for log in logs)
    if len(logs) < 4:
        # the median deviation of two or three says little: the whole range of them counts
        spread = max(spread, (max(logs) - min(logs)) / 2)
    return math.exp(middle + max(math.log(FACTOR_MIN), SIGMAS * max(spread, SIGMA_MIN)))


def _compared(rank: int, times: Mapping[int, float], known: Mapping[int, WindowWork], part: str) -> Slow:
    others = [own for other, own in known.items() if other != rank]
    errors = [float(getattr(own, f"{part}_error_us")) for own in others]
    # of a median of so many
    peers_error_us = _MEDIAN_ERROR * statistics.median(errors) / math.sqrt(len(others))
    return Slow(
        rank,
        times[rank],
        statistics.median(_peers(rank, times)),
        known[rank].step_us,
        known[rank].cpu_us,
        statistics.median(own.cpu_us for own in others),
        f"before its {part} collective",
        math.hypot(float(getattr(known[rank], f"{part}_error_us")), peers_error_us),
    )


class WindowHistory(NamedTuple):
    """The state of all nodes between windows: bad windows in a row, the sum of their certainties, good
    windows in a row, marked nodes.
    """

    bad: Mapping[str, int] = {}
    sure: Mapping[str, float] = {}
    good: Mapping[str, int] = {}
    marked: frozenset[str] = frozenset()


def update(history: WindowHistory, slow: Mapping[str, float], nodes: frozenset[str]) -> WindowHistory:
    """The history after a window in which these nodes were slow, with that certainty (standard errors). Nodes
    that have left are dropped, except for their marks, which only good windows remove.
    """
    bad = {node: history.bad.get(node, 0) + 1 for node in slow if node in nodes}
    sure = {node: history.sure.get(node, 0.0) + slow[node] for node in bad}
    good = {node: history.good.get(node, 0) + 1 for node in nodes - slow.keys()}
    proven = {
        node for node, count in bad.items() if count >= BAD_WINDOWS and sure[node] >= SURE * math.sqrt(count)
    }
    marked = (history.marked | proven) - {node for node, count in good.items() if count >= GOOD_WINDOWS}
    return WindowHistory(bad, sure, good, marked)


def pays(share: float, trained_s: float, cost_s: float = COST_S) -> bool:
    """Whether moving the node out saves more than it costs: `share` of the remaining time."""
    return share * max(trained_s, LEFT_S_MIN) > cost_s
