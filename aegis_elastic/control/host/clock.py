"""Wall time for deadlines that are recorded, without the jumps of wall clocks."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Wall seconds that go on evenly while somebody waits for a deadline.

    Deadlines are wall times because a successor on another start of the machine reads them. But a clock that
    is set right by an hour in the middle of a wait must not declare everybody late, nor keep them an hour.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`wall`, `monotonic`: in seconds."""
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()

    def now(self, *, waiting: bool) -> float:
        """Wall seconds; unless somebody is `waiting`, as the machine has them now."""
        if not waiting:
            self._offset_s = self._wall() - self._monotonic()
        return self._offset_s + self._monotonic()
