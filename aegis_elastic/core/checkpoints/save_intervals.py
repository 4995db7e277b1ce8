"""How often a training saves, and when a checkpoint is late. Monotonic seconds; no clock is read here."""

from __future__ import annotations

import statistics
from collections import deque

KEPT = 16
# A checkpoint that doesn't come within this many usual intervals isn't coming.
LATE_FACTOR = 3.0
# The usual interval until two checkpoints have been seen.
UNKNOWN_INTERVAL_S = 3600.0


class SaveIntervals:
    """The intervals between checkpoints of one job, over all its incarnations."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=KEPT)
        self._last_s: float | None = None

    def started(self) -> None:
        """Training restarts: the time since the last checkpoint is no interval."""
        self._last_s = None

    def saved(self, now_s: float) -> None:
        """A checkpoint has completed."""
        if self._last_s is not None:
            self._intervals.append(now_s - self._last_s)
        self._last_s = now_s

    @property
    def usual_s(self) -> float:
        """The median of the last intervals, in seconds."""
        return statistics.median(self._intervals) if self._intervals else UNKNOWN_INTERVAL_S

    def late_s(self, waiting_since_s: float) -> float:
        """When (monotonic seconds) a checkpoint is late that has been waited for since `waiting_since_s`."""
        return max(waiting_since_s, self._last_s or waiting_since_s) + LATE_FACTOR * self.usual_s
