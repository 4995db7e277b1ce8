"""How often a training saves, and when it is late. Monotonic seconds; no clock is read here."""

from __future__ import annotations

import statistics
from collections import deque

KEPT = 16
# A checkpoint that doesn't come within this many usual intervals isn't coming.
LATE_FACTOR = 3.0
# What counts as usual while nobody has seen two checkpoints.
UNKNOWN_INTERVAL_S = 3600.0


class SaveIntervals:
    """The checkpoints of one job, over all starts of its training."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=KEPT)
        self._last_s: float | None = None

    def started(self) -> None:
        """Training starts anew: the time since the last checkpoint says nothing of its pace."""
        self._last_s = None

    def saved(self, now_s: float) -> None:
        """One has completed."""
        if self._last_s is not None:
            self._intervals.append(now_s - self._last_s)
        self._last_s = now_s

    @property
    def usual_s(self) -> float:
        """The median of the last intervals."""
        return statistics.median(self._intervals) if self._intervals else UNKNOWN_INTERVAL_S

    def late_s(self, waiting_since_s: float) -> float:
        """The moment at which a checkpoint is late for who has waited since then."""
        return max(waiting_since_s, self._last_s or waiting_since_s) + LATE_FACTOR * self.usual_s
