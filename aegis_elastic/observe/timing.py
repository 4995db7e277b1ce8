"""How long a job's parts have taken, followed event by event. Pure: times are given, wall seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aegis_elastic.core.events import Error, Finish, Started
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import RECOVERING, TERMINAL, Phase, Status

# What agents measure themselves: everybody waits for the slowest, so the longest counts.
MEASURED = ("detect_s", "stop_s", "diagnose_s", "rendezvous_s", "start_s")


@dataclass
class Recovery:
    """One recovery that is under way: when it was noticed, and what has been measured of it."""

    noticed_at: float
    left_at: float
    timings_s: dict[str, float] = field(default_factory=dict)
    finished_at: float = 0.0
    ran_at: float = 0.0
    started: set[str] = field(default_factory=set)

    def note(self, timings_s: Mapping[str, float]) -> None:
        for name, seconds in timings_s.items():
            if name in MEASURED:
                self.timings_s[name] = max(seconds, self.timings_s.get(name, 0.0))

    def segments(self, over_at: float) -> dict[str, float]:
        """Seconds by segment, for those that are known."""
        known = {name.removesuffix("_s"): seconds for name, seconds in self.timings_s.items()}
        answered = self.ran_at - self.finished_at if self.finished_at else 0.0
        known["decide"] = max(self.left_at - self.noticed_at + answered, 0.0)
        known["total"] = known.get("detect", 0.0) + over_at - self.noticed_at
        return known


class Clock:
    """Where the job's time goes."""

    def __init__(self) -> None:
        self.created_at = 0.0
        self.ended_at = 0.0
        self._trained_s = 0.0
        self._running_since = 0.0
        self._phase_since = 0.0
        self._recovery: Recovery | None = None
        self._noticed: tuple[float, float] | None = None

    def follow(
        self, event: object, before: Status | None, transition: Transition, at: float
    ) -> dict[str, float]:
        """An event and what became of it; the segments of a recovery, if with it one is over."""
        after = transition.status
        over: dict[str, float] = {}
        if before is None:
            self.created_at = self._phase_since = at
            self._running_since = at if after.phase is Phase.RUN_COMMAND else 0.0
            return over
        if isinstance(event, Error) and self._noticed is None and before.phase is Phase.RUN_COMMAND:
            self._noticed = at, event.timings_s.get("detect_s", 0.0)
        if self._recovery is not None and isinstance(event, Finish) and after is not before:
            self._recovery.finished_at = at
            self._recovery.note(event.timings_s)
        if before.phase is not after.phase:
            self._change_phase(before, after, at)
        if self._recovery is not None and isinstance(event, Started) and after.phase is Phase.RUN_COMMAND:
            self._recovery.note(event.timings_s)
            self._recovery.started.add(event.worker)
            if self._recovery.started >= {worker.name for worker in after.workers}:
                over, self._recovery = self._recovery.segments(at), None
        return over

    def in_phase_s(self, at: float) -> float:
        """How long the job has been in its phase; ask before the event that ends it is followed."""
        return max(at - self._phase_since, 0.0)

    def trained_s(self, at: float) -> float:
        """How long training has run, without what was lost since the last checkpoint at each failure."""
        running_s = max(at - self._running_since, 0.0) if self._running_since else 0.0
        return self._trained_s + running_s

    def ettr(self, at: float) -> float:
        """Effective training time ratio: `trained_s` over the time since the job was created. 0 to 1."""
        over_s = (self.ended_at or at) - self.created_at
        return min(self.trained_s(at) / over_s, 1.0) if over_s > 0 else 0.0

    def _change_phase(self, before: Status, after: Status, at: float) -> None:
        self._phase_since = at
        if before.phase is Phase.RUN_COMMAND:
            ran_s = at - self._running_since
            if after.phase is not Phase.SUCCEED and before.saves:
                # What came after the last checkpoint is done again. If no checkpoint was ever reported,
                # nothing is known, and nothing is taken off.
                ran_s = min(ran_s, max(before.saved_at - self._running_since, 0.0))
            self._trained_s += max(ran_s, 0.0)
            self._running_since = 0.0
            if after.phase in RECOVERING:
                noticed_at, detect_s = self._noticed or (at, 0.0)
                self._recovery = Recovery(noticed_at, at, {"detect_s": detect_s} if detect_s else {})
        if after.phase is Phase.RUN_COMMAND:
            self._running_since = at
            self._noticed = None
            if self._recovery is not None:
                self._recovery.ran_at = at
        if after.phase in TERMINAL:
            self.ended_at, self._recovery = at, None
