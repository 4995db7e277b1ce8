"""Which of two deaths on different nodes came first, when every node has its own clock.

A node's clock is never known as a point. Two messages bound it: what the node sent at its time T was heard by
the master at M, later than it was sent, so `master - node <= M - T`; what the master sent at M was heard by
the node at T, so `master - node >= M - T`. Between two such messages clocks drift, by `DRIFT` at most, so an
old bound is widened by its age and gives way to a new one as soon as that is tighter. Bounds that
contradict each other mean that a clock was set: then only the newest counts.

Two deaths whose intervals overlap are undecided by time; the functions say so instead of guessing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Seconds a second that two clocks may drift apart: cheap quartz does half of it, NTP at most slews 500 ppm.
DRIFT = 500e-6
# Differences below this don't count: what the kernel needs to report a death.
RESOLUTION_S = 0.001


class Bounds(NamedTuple):
    """`master - node` lies between these two, in seconds."""

    low: float
    high: float


class Span(NamedTuple):
    """When something happened, by the master's clock: between these wall seconds."""

    low: float
    high: float


class _Bound(NamedTuple):
    value: float
    at: float  # when it was taken, on the master's monotonic clock


class Clock(NamedTuple):
    """What is known of one node's clock. Immutable; `heard` and `echoed` make the next one."""

    low: _Bound | None = None
    high: _Bound | None = None

    def heard(self, sent: float, here: float, now_s: float) -> Clock:
        """A message that the node sent at `sent` (its wall seconds) was heard at `here` (the master's)."""
        bound = _Bound(here - sent, now_s)
        if self.high is not None and bound.value > self.high.value + DRIFT * (now_s - self.high.at):
            return self  # it was longer on its way than one that is known
        return Clock(self.low, bound).consistent(now_s, newest=Clock(None, bound))

    def echoed(self, sent: float, there: float, now_s: float) -> Clock:
        """A message that the master sent at `sent` (its wall seconds) was heard at `there` (the node's)."""
        bound = _Bound(sent - there, now_s)
        if self.low is not None and bound.value < self.low.value - DRIFT * (now_s - self.low.at):
            return self
        return Clock(bound, self.high).consistent(now_s, newest=Clock(bound, None))

    def consistent(self, now_s: float, newest: Clock) -> Clock:
        """This one, or `newest` alone if its bounds contradict each other."""
        bounds = self.bounds(now_s)
        return newest if bounds is not None and bounds.low > bounds.high + RESOLUTION_S else self

    def bounds(self, now_s: float) -> Bounds | None:
        """The offset at that moment of the master's monotonic clock; None while one side is unknown."""
        if self.low is None or self.high is None:
            return None
        low = self.low.value - DRIFT * max(now_s - self.low.at, 0.0)
        high = self.high.value + DRIFT * max(now_s - self.high.at, 0.0)
        return Bounds(low, high)


def span(time: float, bounds: Bounds | None) -> Span | None:
    """A node's wall time by the master's clock; None if that clock isn't known."""
    if bounds is None or not all(map(math.isfinite, (time, *bounds))):
        return None
    low, high = sorted(bounds)
    return Span(time + low, time + high)


def before(one: Span | None, other: Span | None) -> bool:
    """Whether `one` certainly came before `other`."""
    return one is not None and other is not None and one.high + RESOLUTION_S < other.low


def lead(one: Span, other: Span) -> str:
    """By how much `one` came before `other`, as text: "0.40 to 0.62 s before"."""
    least, most = other.low - one.high, other.high - one.low
    return f"{least:.3g} to {most:.3g} s before"
