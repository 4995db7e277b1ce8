"""Anomalies of one rank's resources: rules that first learn from this job what is usual, and then judge.

Lengths are counted in samples, so that a rule is the same whatever the pace (one sample a second by default).
Each rule fires once, then stays silent until the condition is over (the `_CLEAR` thresholds).

A rule never decides anything: what fires is a record in the journal and in the node's history.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

DETAIL_CHARS_MAX = 500
NODE = -1  # the "rank" of what concerns the whole node

CPU_IDLE = "cpu.zero"
GPU_IDLE = "gpu.zero"
MEMORY_GROWS = "memory.growth"
NETWORK_DROPS = "network.drop"
SIGNATURE = "signature."  # + the fault class of the line

_MIB = 1 << 20
_STEADY = 0.9  # of its speed: what keeps that much from one half to the next doesn't slow down


class Anomaly(msgspec.Struct, frozen=True, rename="camel"):
    """An anomaly of a rank (global number; `NODE`: the node as a whole). `time` in wall seconds of its node.

    `code` is for machines, `detail` for people; `numbers` have their units in their names.
    """

    code: str
    rank: int
    time: float
    detail: str
    numbers: dict[str, float] = {}


@dataclass(frozen=True)
class Rules:
    """What counts as an anomaly. Lengths in samples unless the name says otherwise.

    `warm_up`: how much must have been seen of a rank's work before it is judged. A rank is idle when it uses
    less than `idle_share` of what it usually does, for `idle_min` samples and `idle_factor` times as long as
    its longest idle stretch after which it went on.
    """

    warm_up: int = 120
    idle_share: float = 0.05
    idle_min: int = 60
    idle_factor: float = 3.0
    bucket: int = 10
    growth_buckets: int = 60
    growth_buckets_min: int = 30
    growth_order: float = 0.9
    growth_bytes_min: int = 64 * _MIB
    growth_share_min: float = 0.05
    growth_horizon_s: float = 6 * 3600.0
    drop_window: int = 10
    drop_warm_up: int = 12
    drop_share: float = 0.4
    drop_confirm: int = 3


@dataclass(frozen=True)
class Fired:
    """A rule's result: a sentence, and the numbers in it."""

    detail: str
    numbers: dict[str, float]


class Idle:
    """Utilisation that has fallen to (nearly) zero and stays there.

    What is usual, and how long this rank may be idle without anything being wrong (checkpoints, evaluation),
    is learned over all its incarnations.
    """

    _AWAKE = 3  # samples of work that end an idle stretch; fewer don't
    _SMOOTHED = 10  # the kernel counts processor time in hundredths of a second, and runs others in between
    _KEPT = 600

    def __init__(self, rules: Rules, unit: str, floor: float) -> None:
        """`unit`: of the numbers; below `floor` nothing ever counts as work."""
        self._rules = rules
        self._unit = unit
        self._floor = floor
        self._worked: deque[float] = deque(maxlen=self._KEPT)
        self._seen = 0
        self._usual = 0.0
        self._longest = 0
        self.begin()

    def begin(self) -> None:
        """A new incarnation: how it starts says nothing about it."""
        self._recent: deque[float] = deque(maxlen=self._SMOOTHED)
        self._stretch = 0
        self._awake = 0
        self._since = 0
        self.fired = False

    def observe(self, value: float) -> Fired | None:
        """The next sample. Returns what is wrong, once."""
        self._recent.append(value)
        value = sum(self._recent) / len(self._recent)
        if value >= max(self._floor, self._rules.idle_share * self._usual):
            self._work(value)
            return None
        if not self._since:
            return None  # it has not begun yet
        self._stretch += 1 + self._awake
        self._awake = 0
        if self.fired or self._stretch < self._patience():
            return None
        self.fired = True
        numbers = {f"usual_{self._unit}": self._usual, f"now_{self._unit}": value, "samples": self._stretch}
        return Fired(
            f"usually {self._usual:.2f} {self._unit}, now {value:.2f} for {self._stretch} samples", numbers
        )

    def _work(self, value: float) -> None:
        self._seen += 1
        self._since += 1
        self._worked.append(value)
        if self._seen <= self._rules.warm_up or self._seen % self._rules.warm_up == 0:
            self._usual = statistics.median(self._worked)
        self._awake += 1
        if self._awake >= self._AWAKE:
            # it went on by itself, so a stretch as long is normal from now on
            self._longest = max(self._longest, self._stretch)
            self._stretch = self._awake = 0
            self.fired = False

    def _patience(self) -> float:
        if self._seen < self._rules.warm_up or self._since < self._rules.warm_up / 10:
            return float("inf")
        return max(self._rules.idle_min, self._rules.idle_factor * self._longest)


class Growth:
    """Memory that only grows: a rising floor that doesn't level off, and would fill the node soon."""

    _CLEAR_ORDER = 0.5
    _COARSE = 5  # buckets

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.begin()

    def begin(self) -> None:
        """A new incarnation has other memory."""
        self._floors: deque[tuple[float, float]] = deque(maxlen=self._rules.growth_buckets)
        self._bucket: list[float] = []
        self._skip = self._rules.warm_up
        self.fired = False

    def observe(self, used_bytes: float, available_bytes: float, now_s: float) -> Fired | None:
        """The next sample: bytes used, and bytes available to it. Returns what is wrong, once."""
        if self._skip:
            self._skip -= 1  # what a training allocates at its start is no leak
            return None
        self._bucket.append(used_bytes)
        if len(self._bucket) < self._rules.bucket:
            return None
        # The floor of each bucket: what comes and goes (batches, a garbage collector's sawtooth) is above it.
        self._floors.append((now_s, min(self._bucket)))
        self._bucket.clear()
        if len(self._floors) < self._rules.growth_buckets_min:
            return None
        return self._judge(available_bytes)

    def _judge(self, available_bytes: float) -> Fired | None:
        points = list(self._floors)
        slope, order = trend(points)
        if len(points) == self._rules.growth_buckets:
            # A sawtooth longer than a bucket hides a leak in the fine series, not in the coarse one.
            order = max(order, trend(_floors_of(points, self._COARSE))[1])
        if self.fired:
            self.fired = order >= self._CLEAR_ORDER
            return None
        used, grown = points[-1][1], slope * (points[-1][0] - points[0][0])
        least = max(self._rules.growth_bytes_min, self._rules.growth_share_min * used)
        if order < self._rules.growth_order or grown < least:
            return None
        full_s = available_bytes / slope
        if full_s > self._rules.growth_horizon_s or still_to_come(points) < available_bytes:
            return None
        self.fired = True
        return Fired(
            f"grows by {slope / _MIB:.2f} MiB/s, {used / _MIB:.0f} MiB now; the node is full in "
            f"{full_s / 60:.0f} min",
            {
                "slope_bytes_s": slope,
                "used_bytes": used,
                "available_bytes": available_bytes,
                "full_s": full_s,
            },
        )


Points = Sequence[tuple[float, float]]


def _floors_of(points: Points, length: int) -> list[tuple[float, float]]:
    """The lowest of every `length` points."""
    groups = [points[start : start + length] for start in range(0, len(points), length)]
    return [(group[-1][0], min(value for _, value in group)) for group in groups]


def still_to_come(points: Points) -> float:
    """How much more a growth will add, in bytes: infinite unless it slows down, as a filling cache does.

    A growth that loses a share of its speed in every half of the series goes on losing it: what comes is the
    sum of a geometric series.
    """
    half = len(points) // 2
    (first, _), (second, _) = trend(points[:half]), trend(points[half:])
    left = second / first if first > 0 else 1.0
    if left >= _STEADY:
        return float("inf")
    return max(second, 0.0) * (points[-1][0] - points[half][0]) * left / (1 - left)


def trend(points: Points) -> tuple[float, float]:
    """(slope, order) of values over time, robust: the median of all pairs' slopes, and how monotonic it is
    (share of rising pairs less that of falling ones: 1 when every value is above all before it).
    """
    slopes = []
    for place, (later_s, later) in enumerate(points):
        slopes += [
            (later - value) / (later_s - then_s) for then_s, value in points[:place] if later_s > then_s
        ]
    if not slopes:
        return 0.0, 0.0
    rising = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
    return statistics.median(slopes), rising / len(slopes)


class Drop:
    """Bandwidth that drops: bytes delivered for each second in which there was something to send.

    That quotient doesn't fall when the training sends less (evaluation, a slower step, a peer that computes),
    but it does when the link gives less. A window counts if much was sent in it, or if much waited to be sent
    all the time: of small messages it would measure how long their acknowledgements took.
    """

    _BUSY_SHARE = 0.05
    _LEARN_SHARE = 0.002
    _BYTES_MIN = _MIB  # in a window
    _QUEUED_MIN = 1 << 16  # a queue that long is no small message
    _KEPT = 60
    _BELOW_POOR = 0.7  # of the poorest tenth of what is healthy
    _CLEAR = 1.5  # times the drop's share: what has recovered by half is over

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._healthy: deque[float] = deque(maxlen=self._KEPT)
        self.begin()

    def begin(self) -> None:
        """A new incarnation has new connections over the same links: what was learned is kept."""
        self._clear()
        self._low = 0
        self.fired = False

    def _clear(self) -> None:
        self._bytes = self._busy_s = self._window_s = 0.0
        self._samples = self._full = 0

    def observe(self, sent_bytes: float, busy_s: float, queued_bytes: float, took_s: float) -> Fired | None:
        """The next sample: since the last one, and what waits to be sent now. Returns what is wrong, once."""
        self._bytes += sent_bytes
        self._busy_s += busy_s
        self._window_s += took_s
        self._full += queued_bytes >= self._QUEUED_MIN
        self._samples += 1
        if self._samples < self._rules.drop_window:
            return None
        rate = self._bytes / self._busy_s if self._busy_s else 0.0
        share = self._busy_s / self._window_s if self._window_s else 0.0
        much, full = self._bytes >= self._BYTES_MIN, 2 * self._full >= self._samples
        self._clear()
        known = len(self._healthy) >= self._rules.drop_warm_up
        if known and share >= self._BUSY_SHARE and (much or full):
            return self._judge(rate)
        if much and share >= self._LEARN_SHARE:
            # A fast link is busy for a moment of each step only: nothing to judge, but much to learn from.
            self._healthy.append(rate)
        return None

    def _judge(self, rate: float) -> Fired | None:
        usual, poor = statistics.median(self._healthy), sorted(self._healthy)[len(self._healthy) // 10]
        threshold = min(self._rules.drop_share * usual, self._BELOW_POOR * poor)
        if rate >= (self._CLEAR if self.fired else 1.0) * threshold:
            self._low, self.fired = 0, False
            self._healthy.append(rate)
            return None
        self._low += 1
        if self.fired or self._low < self._rules.drop_confirm:
            return None
        self.fired = True
        return Fired(
            f"delivers {rate / 1e6:.1f} MB/s while sending, usually {usual / 1e6:.1f} MB/s",
            {"now_bytes_s": rate, "usual_bytes_s": usual},
        )
