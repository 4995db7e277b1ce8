"""Reading the slots that ranks write (`worker.slot` has their layout): each record whole or not at all.

Records are read while they are written; a half-written one is recognised and read again. Every number comes
from a process of the user's, so nothing beyond the layout is trusted.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from aegis_elastic.worker import slot as layout

TRIES = 8


class StepRecord(NamedTuple):
    """Optimizer steps: how many ended, the training step, monotonic ns, longest pause in ns."""

    total: int
    step: int
    last_ns: int
    first_ns: int
    longest_ns: int


class ProgressRecord(NamedTuple):
    """Calls of `aegis_elastic.progress`: how many, the step of the last, its monotonic ns."""

    total: int
    step: int
    last_ns: int


class CheckpointRecord(NamedTuple):
    """Calls of `aegis_elastic.checkpoint_saved`: how many; step, wall ns and path of the last."""

    total: int
    step: int
    wall_ns: int
    path: str


class WorkSample(NamedTuple):
    """One iteration: µs of own work up to its first and up to its last collective, µs in all."""

    step: int
    first_us: int
    last_us: int
    step_us: int


class OwnWork(NamedTuple):
    """Own work: how many samples there have been, CPU ns per step of the main thread, ns that reading the
    flight recorder took, whether waiting between collectives is subtracted.
    """

    total: int
    cpu_ns: int
    read_ns: int
    timed: bool
    samples: tuple[WorkSample, ...]


class SlotReader:
    """One rank's slot. `close` it."""

    def __init__(self, path: Path) -> None:
        """OSError if there is no such file, ValueError if it is not a slot (yet)."""
        # read, not mapped: a file that is truncated would otherwise end the agent by SIGBUS
        self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(self._handle).st_size < layout.SIZE:
            os.close(self._handle)
            raise ValueError(f"cannot read the slot {path}: it is not written yet")

    def pid(self) -> int:
        """The process that writes; 0 if the header is missing or of another version."""
        head = self._unpacked(layout.HEAD, 0)
        return int(head[3]) if head and head[:2] == (layout.MAGIC, layout.VERSION) else 0

    def step(self) -> StepRecord | None:
        """The optimizer steps, None if there was none."""
        record = self._record(layout.STEP, layout.STEP_AT)
        return StepRecord(*record) if record else None

    def progress(self) -> ProgressRecord | None:
        """The calls of `progress`, None if there was none."""
        record = self._record(layout.PROGRESS, layout.PROGRESS_AT)
        return ProgressRecord(*record) if record else None

    def checkpoint(self) -> CheckpointRecord | None:
        """The calls of `checkpoint_saved`, None if there was none."""
        record = self._record(layout.CHECKPOINT, layout.CHECKPOINT_AT)
        if not record:
            return None
        total, step, wall_ns, length, path = record
        return CheckpointRecord(total, step, wall_ns, os.fsdecode(path[:length]))

    def own_work(self, since: int = 0) -> OwnWork | None:
        """The samples after number `since` that are still in the ring, None if there was never one."""
        record = self._record(layout.OWN_WORK, layout.OWN_WORK_AT)
        if not record:
            return None
        total, cpu_ns, read_ns, timed = record
        numbers = range(max(since, total - layout.RING), total)
        offsets = [layout.RING_AT + number % layout.RING * layout.SAMPLE.size for number in numbers]
        parts = [self._unpacked(layout.SAMPLE, offset) for offset in offsets]
        return OwnWork(
            total, cpu_ns, read_ns, bool(timed), tuple(WorkSample(*part) for part in parts if part)
        )

    def groups(self) -> tuple[int, ...]:
        """Numbers of the process groups of the rank's equals, () if they are unknown."""
        return tuple(key for key in self._record(layout.GROUPS, layout.GROUPS_AT) if key)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _record(self, form: struct.Struct, offset: int) -> tuple[Any, ...]:
        for _ in range(TRIES):
            read = self._unpacked(form, offset)
            if read and read[0] == read[-1]:
                return read[1:-1] if read[0] else ()
        return ()

    def _unpacked(self, form: struct.Struct, offset: int) -> tuple[Any, ...]:
        data = os.pread(self._handle, form.size, offset)
        return form.unpack(data) if len(data) == form.size else ()
