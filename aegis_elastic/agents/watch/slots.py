"""Reading the slots that ranks write (`worker.slot` has their layout): what a rank last said, whole or not at
all.

Records are read while they are written; who reads a half-written one sees that and looks again. Every number
comes from a process of the user's, so nothing here trusts more than the form.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from aegis_elastic.worker import slot as layout

TRIES = 8


class Beat(NamedTuple):
    """Steps of optimizers: how many ended, the training step, monotonic ns, longest pause in ns."""

    beats: int
    step: int
    last_ns: int
    first_ns: int
    longest_ns: int


class Call(NamedTuple):
    """Calls of `aegis_elastic.progress`: how many, the step said last, monotonic ns."""

    calls: int
    step: int
    last_ns: int


class Save(NamedTuple):
    """Calls of `aegis_elastic.checkpoint_saved`: how many, and what the last one said (wall ns)."""

    calls: int
    step: int
    wall_ns: int
    path: str


class Sample(NamedTuple):
    """One iteration: µs of own work up to its first and up to its last collective, µs in all."""

    step: int
    first_us: int
    last_us: int
    step_us: int


class Work(NamedTuple):
    """Own work: how many samples there have been, CPU ns a step of the main thread, ns that looking took,
    whether waiting between collectives is taken off.
    """

    total: int
    cpu_ns: int
    look_ns: int
    timed: bool
    samples: tuple[Sample, ...]


class SlotReader:
    """One rank's slot. Closed when it is not needed any more."""

    def __init__(self, path: Path) -> None:
        """OSError if there is none, ValueError if it is no slot (yet)."""
        # read, not mapped: whoever cut the file short would otherwise end the agent by SIGBUS
        self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(self._handle).st_size < layout.SIZE:
            os.close(self._handle)
            raise ValueError(f"cannot read the slot {path}: it is not written yet")

    def pid(self) -> int:
        """The process that writes; 0 if it is no slot of ours (yet)."""
        head = self._unpacked(layout.HEAD, 0)
        return int(head[3]) if head and head[:2] == (layout.MAGIC, layout.VERSION) else 0

    def beat(self) -> Beat | None:
        """The last step of an optimizer, None if there was none."""
        record = self._record(layout.BEAT, layout.BEAT_AT)
        return Beat(*record) if record else None

    def call(self) -> Call | None:
        """The last call of `progress`, None if there was none."""
        record = self._record(layout.CALL, layout.CALL_AT)
        return Call(*record) if record else None

    def save(self) -> Save | None:
        """The last call of `checkpoint_saved`, None if there was none."""
        record = self._record(layout.SAVED, layout.SAVED_AT)
        if not record:
            return None
        calls, step, wall_ns, length, path = record
        return Save(calls, step, wall_ns, os.fsdecode(path[:length]))

    def work(self, since: int = 0) -> Work | None:
        """The samples after number `since` that are still there, None if there was never one."""
        record = self._record(layout.OWN, layout.OWN_AT)
        if not record:
            return None
        count, cpu_ns, look_ns, timed = record
        numbers = range(max(since, count - layout.RING), count)
        places = [layout.RING_AT + number % layout.RING * layout.SAMPLE.size for number in numbers]
        parts = [self._unpacked(layout.SAMPLE, place) for place in places]
        return Work(count, cpu_ns, look_ns, bool(timed), tuple(Sample(*part) for part in parts if part))

    def groups(self) -> tuple[int, ...]:
        """Numbers of the process groups in which the rank's equals are, () if it hasn't told."""
        return tuple(key for key in self._record(layout.GROUPS, layout.GROUPS_AT) if key)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._handle)

    def _record(self, form: struct.Struct, place: int) -> tuple[Any, ...]:
        for _ in range(TRIES):
            read = self._unpacked(form, place)
            if read and read[0] == read[-1]:
                return read[1:-1] if read[0] else ()
        return ()

    def _unpacked(self, form: struct.Struct, place: int) -> tuple[Any, ...]:
        data = os.pread(self._handle, form.size, place)
        return form.unpack(data) if len(data) == form.size else ()
