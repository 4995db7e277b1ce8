"""The stamps of the measured ranks, and the parts of one recovery's time."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A process group that takes longer to form has waited for a reverse name look-up that timed out (5 s).
STALL_S = 4.5
OUTSIDE = "outside"


class Stamp(NamedTuple):
    """One line of a rank's stamp file; `at` in monotonic seconds. Rank -1: noted by the benchmark itself."""

    rank: int
    life: int
    what: str
    at: float
    pid: int = 0


class Parts(NamedTuple):
    """The parts of one recovery's time; each ends when the *last* rank has finished it."""

    detect_s: float
    stop_s: float
    decide_s: float
    start_s: float
    group_s: float
    step_s: float
    total_s: float

    @property
    def stalled(self) -> bool:
        """Whether it includes a name look-up that timed out: such runs are listed apart."""
        return self.group_s > STALL_S


HEADINGS = ("detect", "stop", "decide", "start+import", "init_pg", "first step", "total")


def parts_of(stamps: Sequence[Stamp], ranks: int) -> Parts:
    """Splits the last recovery by the stamps of all ranks. ValueError when there was none, or a rank is not
    back."""
    faults = [stamp.at for stamp in stamps if stamp.what == "fault"]
    if not faults:
        raise ValueError("there was no fault")
    fault = max(faults)
    second: dict[str, list[float]] = {"begun": [], "imported": [], "group": [], "step": []}
    for rank in range(ranks):
        own = [stamp for stamp in stamps if stamp.rank == rank]
        steps = [stamp for stamp in own if stamp.what == "step" and stamp.at > fault]
        if not steps:
            raise ValueError(f"rank {rank} of {ranks} took no step after the fault")
        step = min(steps, key=lambda stamp: stamp.at)
        at = {stamp.what: stamp.at for stamp in own if stamp.life == step.life}
        # A warm spare was started before the fault: then its part begins with the script.
        at["begun"] = at["start"] if at["start"] > fault else at["main"]
        for what, found in second.items():
            found.append(at[what])
    # A survivor that is killed leaves no stamp: detect and stop then count as decide.
    stopped = [s.at for s in stamps if s.what == "stopped" and fault < s.at < min(second["step"])] or [fault]
    ends = [fault, min(stopped), max(stopped)]
    for found in second.values():
        ends.append(max(ends[-1], *found))
    spans = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return Parts._make(round(span, 4) for span in [*spans, ends[-1] - fault])


def median_of(recoveries: Sequence[Parts]) -> Parts:
    """The median of each part by itself (so they need not add up); those with a stall left out."""
    counted = [parts for parts in recoveries if not parts.stalled] or recoveries
    return Parts._make(statistics.median(part) for part in zip(*counted, strict=True))


def read(folder: Path) -> list[Stamp]:
    """All stamps so far."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        rank = -1 if file.stem == OUTSIDE else int(file.stem)
        found += [Stamp(rank, **json.loads(line)) for line in file.read_text().splitlines()]
    return found


def note(folder: Path, what: str, at: float) -> None:
    """Add a stamp of the benchmark's own."""
    with open(folder / f"{OUTSIDE}.jsonl", "a") as file:
        file.write(json.dumps({"life": 0, "what": what, "at": at}) + "\n")
