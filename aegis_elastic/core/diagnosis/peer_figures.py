"""A node's figures compared with its peers': what the checks measure, and which node is far behind. Pure.

Storage is called slow when it takes so many times as long as the peers' median takes, and longer than that
many seconds: twice a few milliseconds is noise, and no training feels it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

SLOW_FACTOR, SLOW_S_MIN = 4.0, 0.5
# The median of two is no comparison.
PEERS_MIN = 3
# What the io check measures in each directory.
STORAGE_FIGURES = ("write_s", "read_s")

Figures = Mapping[str, Mapping[str, float]]


def storage_figures(details: Mapping[str, object]) -> dict[str, float]:
    """The figures in an io check's details, by name ("checkpoint_write_s"); only numbers that make sense."""
    return {
        name: float(value)
        for name, value in details.items()
        if name.endswith(STORAGE_FIGURES) and isinstance(value, (int, float)) and 0 <= value < 1e9
    }


def medians(figures: Figures) -> dict[str, float]:
    """Name -> median over all workers that have that figure, where there are enough of them."""
    named: dict[str, list[float]] = {}
    for values in figures.values():
        for name, value in values.items():
            named.setdefault(name, []).append(value)
    return {name: statistics.median(each) for name, each in named.items() if len(each) >= PEERS_MIN}


def is_slow(seconds: float, usual_s: float) -> bool:
    """Whether a node that takes `seconds` is slow, if its peers' median takes `usual_s`."""
    return seconds > max(SLOW_S_MIN, SLOW_FACTOR * usual_s)


def slow_storage(figures: Figures) -> dict[str, str]:
    """Worker -> reason, for those whose storage is slow while that of most is not."""
    usual = medians(figures)
    return {
        worker: "; ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} took {value:.2f} s, peers {usual[name]:.2f} s"
            for name, value in slow.items()
        )
        for worker, values in figures.items()
        if (slow := {n: v for n, v in values.items() if n in usual and is_slow(v, usual[n])})
    }
